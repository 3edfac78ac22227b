"""Whether models give the same logits with a static cache. The model here has the form of those of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from mesh_tensor.importers.transformers_models import refuse_another_rotation, refuse_other_logits

BATCH, LENGTH, WORDS, SIZE = 3, 16, 24, 8


class Model(nn.Module):
    """One layer that attends to the last `window` tokens. `by_keys`: it takes its ids for those of the last keys, as
    GPT-Neo's code does."""

    def __init__(self, window: int, by_keys: bool) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, SIZE), nn.Embedding(LENGTH, SIZE)
        self.mix, self.head = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, WORDS)
        self.window, self.by_keys = window, by_keys
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=WORDS))

    def forward(self, input_ids, attention_mask, position_ids, use_cache=False, cache=None, start=None):
        q, k, v = self.mix(self.embed(input_ids) + self.places(position_ids)).chunk(3, dim=-1)
        rows = torch.arange(input_ids.shape[1])
        if cache is not None:
            k, v = (old.index_copy_(1, start + rows, new) for old, new in zip(cache, (k, v), strict=True))
        columns, at = torch.arange(k.shape[1]), rows if start is None else start + rows
        back = (rows + k.shape[1] - len(rows) if self.by_keys else at)[:, None] - columns
        seen = (back >= 0) & (back < self.window) & (columns <= at[:, None]) & attention_mask[:, None].bool()
        scores = (q @ k.mT).masked_fill(~seen, torch.finfo(q.dtype).min)
        return SimpleNamespace(logits=self.head(scores.softmax(-1) @ v))


class Decoder(nn.Module):
    """The model with a cache of LENGTH columns."""

    known = {"position_ids"}

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        for name in ("keys_0", "values_0"):
            self.register_buffer(name, torch.zeros(BATCH, LENGTH, SIZE))

    def forward(self, ids, mask, positions, start):
        cache = self.keys_0, self.values_0
        return self.model(ids, mask, positions, cache=cache, start=start).logits[:, -1]


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, LENGTH])
def test_the_same_logits(length):
    decoder = Decoder(Model(window=3, by_keys=False))
    decoder.keys_0, decoder.values_0 = torch.zeros(BATCH, length, SIZE), torch.zeros(BATCH, length, SIZE)
    refuse_other_logits(decoder, BATCH, length)
    assert not decoder.keys_0.any()
    assert not decoder.values_0.any()


@torch.no_grad()
def test_windows_that_are_counted_from_the_last_key():
    with pytest.raises(mt.MeshTensorError, match="a Model with a cache of 16 positions") as error:
        refuse_other_logits(Decoder(Model(window=3, by_keys=True)), BATCH, LENGTH)
    assert "result 0 differs from the uncached model's by" in str(error.value)
    assert "use_cache=False" in str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("nested", [False, True])
def test_rotations_that_change_with_a_rows_length(nested):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 8}
    config = SimpleNamespace(rope_parameters={"full_attention": rope} if nested else rope)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    refuse_another_rotation(model, 8)
    with pytest.raises(mt.MeshTensorError, match="the cache has 9 positions.* rows of more than 8") as error:
        refuse_another_rotation(model, 9)
    assert "take length=8" in str(error.value)
