"""Random sequences of calls on real ranks, one after the other in the same processes."""

from __future__ import annotations

import random
import time

import torch

import mesh_tensor as mt

from .kernels import NAMES, OnPurpose, expected, faults, kernel, part

FAULTS = ("refuse", "raise", "other", "slow inside")


def many(rank: int, count: int, seed: int, sequences: int) -> dict[str, int]:
    """How many calls were right, refused or raised; all resume after every sequence."""
    draw, counts = random.Random(seed), dict.fromkeys(("right", "refused", "raised"), 0)
    kernel("total", count, rank).local(part(0, rank))
    for number in range(sequences):
        calls = [draw.choice(NAMES) for _ in range(5)]
        places = {(draw.randrange(count), draw.randrange(5)): draw.choice(FAULTS) for _ in range(2)}
        for step, name in enumerate(calls):
            counts[_call(rank, count, name, 10 * number + step, places.get((rank, step), ""))] += 1
        mt.resume({"x": count})
        for name in NAMES:
            assert _call(rank, count, name, 10 * number + 9, "") == "right"
    return counts


def _call(rank: int, count: int, name: str, step: int, fault: str) -> str:
    name = next(n for n in NAMES if n != name) if fault == "other" else name
    mine = part(step, rank)
    faults.now = {"raise": _raise, "slow inside": lambda: time.sleep(0.5)}.get(fault)
    try:
        result = kernel(name, count, rank).local(mine.double() if fault == "refuse" else mine)
    except mt.MeshTensorError:
        return "refused"
    except OnPurpose:
        return "raised"
    finally:
        faults.now = None
    assert torch.equal(result, expected(name, step, rank, count)), f"{name} at step {step}: {result}"
    return "right"


def _raise() -> None:
    raise OnPurpose
