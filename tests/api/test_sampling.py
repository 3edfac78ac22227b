"""Tokens are drawn as often as their probabilities say, from those that are left, whatever was drawn before."""

import numpy as np
import pytest
import torch

from mesh_tensor.api.sampling import Sampling
from mesh_tensor.base.errors import MeshTensorError

LOGITS = torch.tensor([[0.1, 2.0, -1.0, 2.0, 0.9]])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [1, 3, 4, 0, 2]),
        ({"top_k": 1}, [1, 3]),  # equals stay together
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 99}, [1, 3, 4, 0, 2]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.7}, [1, 3]),
        ({"top_p": 0.85}, [1, 3, 4]),
        ({"top_k": 3, "top_p": 0.85}, [1, 3]),  # of what top_k leaves
        ({"temperature": 5.0, "top_p": 0.85}, [1, 3, 4, 0]),
    ],
)
def test_how_often(options, kept):
    sampling = Sampling(**{"temperature": 1.0, **options})
    tokens, weights = sampling.kept(LOGITS[0].double().numpy())
    assert tokens.tolist() == kept
    expected = torch.softmax(LOGITS[0].double() / sampling.temperature, 0)[kept]
    np.testing.assert_allclose(weights / weights.sum(), expected / expected.sum(), rtol=1e-6)
    drawn = torch.stack([sampling.tokens(LOGITS.expand(40, -1), number) for number in range(50)])
    shares = torch.bincount(drawn.flatten(), minlength=5)[kept] / 2000
    torch.testing.assert_close(shares.double(), expected / expected.sum(), atol=0.04, rtol=0)


def test_a_token_is_a_function_of_seed_row_and_number():
    wide, sampling = LOGITS.expand(6, -1), Sampling(temperature=2.0, seed=1 << 100)
    once = [sampling.tokens(wide, number) for number in range(9)]
    assert torch.equal(sampling.tokens(wide[:2], 4), once[4][:2])
    assert all(torch.equal(sampling.tokens(wide, number), once[number]) for number in reversed(range(9)))
    assert len({tuple(tokens.tolist()) for tokens in once}) == 9
    other = [Sampling(temperature=2.0, seed=2).tokens(wide, number) for number in range(9)]
    assert not torch.equal(torch.stack(once), torch.stack(other))


def test_a_row_with_some_tokens_ruled_out():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    assert [Sampling(t).tokens(logits, 0).tolist() for t in (0.0, 1.0)] == [[1], [1]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_numbers(bad):
    with pytest.raises(MeshTensorError, match="logits of token 7 are NaN or infinite"):
        Sampling().tokens(torch.tensor([[0.0, bad]]), 7)
