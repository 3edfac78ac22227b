"""Who sends where several ranks hold the same."""

from collections import Counter

import pytest
import torch

from mesh_tensor import Mesh, Sharding
from mesh_tensor.runtime.ranks.plan import share_out
from mesh_tensor.runtime.reshard import reshard_of


def sent(mesh, src, dst, shape):
    """Before and after sharing out: how many boxes each rank sends to others; and both deliveries."""
    src, dst = (Sharding.parse(mesh, len(shape), text) for text in (src, dst))
    before = reshard_of(shape, torch.float32, src, dst).deliveries
    after = share_out(before, src, dst, src.tile_shape(shape))
    counts = [
        Counter(s for d in ways for p in d.pieces for s, _ in p.sources for target in d.ranks if target != s)
        for ways in (before, after)
    ]
    return *counts, before, after, src


def test_axes_of_four_that_swap_places():
    """Of the four that hold a box, one was to send it to three."""
    before, after, *_ = sent(Mesh({"x": 4, "y": 4}), "S[0], R", "R, S[0]", (16,))
    assert max(before.values()) == 3
    assert max(after.values()) == 1


def test_the_same_boxes_arrive():
    _, _, before, after, src = sent(Mesh({"x": 3, "y": 4}), "S[0], R", "R, S[0]", (17, 2))
    shape = (17, 2)

    def boxes(deliveries):
        """Per rank: which region is filled with which box of the tensor."""
        found = {}
        for d in deliveries:
            for target in d.ranks:
                found[target] = [
                    (p.region, region, src.tile_offset(shape, s)) for p in d.pieces for s, region in p.sources
                ]
        return found

    assert boxes(after) == boxes(before)


@pytest.mark.parametrize(("src", "dst"), [("S[0], S[1]", "R, R"), ("P[sum], R", "R, S[0]"), ("R, R", "S[0], P[sum]")])
def test_what_is_left_alone(src, dst):
    _, _, before, after, _ = sent(Mesh({"x": 2, "y": 2}), src, dst, (8, 8))
    assert after == before
