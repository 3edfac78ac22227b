"""What the bodies that ranks run have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch

import mesh_tensor as mt
from mesh_tensor.runtime.ranks.ranks import Ranks


def refusal(work: Callable[[], object]) -> str:
    """The message of the MeshTensorError that `work` raises."""
    try:
        work()
    except mt.MeshTensorError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def pure(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is equal to another's only if their bits are."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def in_a_call(ranks: Ranks) -> Ranks:
    """The Ranks, met and in a call that lasts as long as their process: so they can exchange what a test wants."""
    ranks.meet()
    lane = ranks.calls.lane()
    lane.__enter__()
    lane.run(1)
    return ranks
