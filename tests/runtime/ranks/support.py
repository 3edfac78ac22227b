"""What the bodies that ranks run have in common."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from mesh_tensor.runtime.ranks.ranks import Ranks


def say(words: str) -> None:
    """Let a rank that waits for these words go on."""
    dist.distributed_c10d._get_default_store().set(words, "said")


def wait_for(words: str) -> None:
    """Return when another rank has said them: whatever that takes on a machine that has other things to do."""
    dist.distributed_c10d._get_default_store().wait([words], timedelta(minutes=5))


def all_come(place: str) -> None:
    """Return when all ranks are at this place: without a timeout of the process group's, which a test made short."""
    say(f"{place} {dist.get_rank()}")
    for rank in range(dist.get_world_size()):
        wait_for(f"{place} {rank}")


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
