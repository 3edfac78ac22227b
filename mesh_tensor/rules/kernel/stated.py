"""States of which the kernel's author says how those of two parts of a loop make that of both (`mt.combine`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tensor.annotations.combination import Combination, tried_combinations

from .iterations import Iteration
from .live_ranges import LiveRange


@dataclass(frozen=True, eq=False)
class Stated:
    """`held`: what the loop carries, in the order of the combination's buffers."""

    combination: Combination
    held: tuple[LiveRange, ...]


def find_stated(iteration: Iteration, carried: Sequence[LiveRange]) -> list[Stated]:
    """The groups of carried live ranges that were stated, and whose update depends on no other carried ones."""
    found = []
    for combination in tried_combinations(iteration.kernel.root):
        groups = [[r for r in carried if r.buffer.name == name] for name in combination.names]
        if all(len(group) == 1 for group in groups):
            held = tuple(r for (r,) in groups)
            if not _used_on_the_way(iteration, held) & set(carried) - set(held):
                found.append(Stated(combination, held))
    return found


def _used_on_the_way(iteration: Iteration, held: Sequence[LiveRange]) -> set[LiveRange]:
    """All that an iteration reads for the sake of a state."""
    of = iteration.coordinates.ranges.of
    known, todo = set(held), list(held)
    while todo:
        live_range = todo.pop()
        for statement in iteration.body:
            if statement.write is None or of(statement.write) is not live_range:
                continue
            sources = {of(access) for access in statement.reads} - known
            known |= sources
            todo += sources
    return known
