"""The example trains as torch does."""

import pytest

from examples.train_gpt import train


@pytest.mark.parametrize(("mesh", "zero"), [({"data": 2, "model": 2}, 1), ({"data": 2}, 3)])
def test_losses_are_torchs(mesh, zero):
    losses = train(mesh, 10, zero)
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert losses[-1][0] < losses[0][0] - 0.5
