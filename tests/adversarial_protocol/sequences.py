"""Sequences of calls, what goes wrong in them on some rank, and what has to come of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from mesh_tensor import Mesh, MeshTensorError

from .kernels import NAMES, OnPurpose, expected, faults, kernel, part
from .world import Killed, World, WorldRanks

_COMPILE = importlib.import_module("mesh_tensor.api.compile")
FAULTS = ("refuse", "raise", "raise late", "other", "swap", "slow", "slow inside", "die", "die inside")


@dataclass(frozen=True)
class Sequence:
    """`calls`: the kernels that every rank calls, thread by thread, `resume` among them. `faults`: what happens on a
    rank at a call of its first thread, by (rank, step)."""

    count: int
    calls: tuple[tuple[str, ...], ...]
    faults: dict[tuple[int, int], str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.count} ranks, calls {self.calls}, faults {self.faults}"


@dataclass
class Outcome:
    """Of one call on a rank: `right`, `wrong`, `refused` or `injected`, and what was said."""

    verdict: str
    words: str = ""


@st.composite
def sequences(draw: Callable) -> Sequence:
    """Two or three ranks, one or two threads, up to eight calls, up to three faults."""
    count = draw(st.integers(2, 3))
    several = draw(st.booleans())
    names = st.sampled_from(NAMES)
    first = st.lists(names if several else st.sampled_from((*NAMES, "resume")), min_size=2, max_size=8)
    lanes = (tuple(draw(first)), *([tuple(draw(st.lists(names, max_size=6)))] if several else []))
    places = st.tuples(st.integers(0, count - 1), st.integers(0, len(lanes[0]) - 1))
    return Sequence(count, lanes, draw(st.dictionaries(places, st.sampled_from(FAULTS), max_size=3)))


def run(sequence: Sequence) -> dict[tuple[int, int], list[Outcome | None]]:
    """What came of each call, by (rank, thread); None of those that a rank no longer made."""
    world, mesh = World(sequence.count), Mesh({"x": sequence.count})
    everyone = [WorldRanks(world, rank, mesh) for rank in range(sequence.count)]
    found: dict[tuple[int, int], list[Outcome | None]] = {}
    bodies = []
    for rank, ranks in enumerate(everyone):
        for lane, calls in enumerate(sequence.calls):
            outcomes = found[rank, lane] = [None] * len(calls)
            here = {step: fault for (who, step), fault in sequence.faults.items() if who == rank and lane == 0}
            bodies.append((f"thread {lane}", partial(_rank, world, ranks, lane, calls, here, outcomes)))
    with (
        patch.object(_COMPILE, "ranks_of", lambda mesh, device_mesh, device_type: device_mesh),
        patch.object(_COMPILE, "are_current", lambda: True),
    ):
        world.run(bodies)
    assert not world.collisions, world.collisions
    return found


def _rank(
    world: World, ranks: WorldRanks, lane: int, calls: tuple[str, ...], here: dict[int, str], outcomes: list
) -> None:
    order = list(range(len(calls)))
    for step, fault in here.items():
        both = calls[step : step + 2]
        # No rank sees that one calls the same kernel once more or once less, as if another call were missing.
        if fault == "swap" and len(set(both)) == 2 and "resume" not in both and order == sorted(order):
            order[step : step + 2] = reversed(order[step : step + 2])
    try:
        for place, step in enumerate(order):
            fault = here.get(place, "")
            name = _other(calls, step) if fault == "other" else calls[step]
            outcomes[step] = _call(world, ranks, lane, name, step, fault)
    except Killed:
        world.kill(ranks.rank)


def _other(calls: tuple[str, ...], step: int) -> str:
    """A kernel that no rank calls at the step, swapped or not, if there is one."""
    if calls[step] in ("resume", "alone"):
        return calls[step]
    near = calls[max(step - 1, 0) : step + 2]
    return next((name for name in NAMES if name not in near and name != "alone"), calls[step])


def _call(world: World, ranks: WorldRanks, lane: int, name: str, step: int, fault: str) -> Outcome:
    rank, count = ranks.rank, world.count
    if fault == "die":
        raise Killed
    if fault == "slow":
        world.sleep(5.0)
    if ranks.rank in world.dead:
        raise Killed
    faults.now = _inside(world, fault)
    try:
        if name == "resume":
            ranks.calls.resume()
            return Outcome("right")
        mine = part(step, rank, lane)
        result = kernel(name, count, rank).local(mine.double() if fault == "refuse" else mine, device_mesh=ranks)
        if fault == "raise late":
            raise OnPurpose
    except MeshTensorError as error:
        return Outcome("refused", str(error))
    except OnPurpose:
        return Outcome("injected")
    finally:
        faults.now = None
    wanted = expected(name, step, rank, count, lane)
    return Outcome("right") if torch.equal(result, wanted) else Outcome("wrong", f"{result} is not {wanted}")


def _inside(world: World, fault: str) -> Callable[[], None] | None:
    def raising(error: type[BaseException]) -> None:
        raise error

    return {
        "raise": partial(raising, OnPurpose),
        "die inside": partial(raising, Killed),
        "slow inside": partial(world.sleep, 5.0),
    }.get(fault)
