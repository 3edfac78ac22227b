"""Stages on meshes of different sizes: where a model is cut, and how many devices each part has, best.

A step of 1F1B takes about what one microbatch takes through all stages, and what the others take in the slowest one.
For every bound on the slowest, dynamic programming finds the stages with the least sum from the last one backwards:
with so many layers and devices left, and so many stages behind, which say how many microbatches a stage holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, order=True)
class Part:
    """A stage: its layers, and the sizes of its mesh's data and model axes."""

    layers: int
    data: int
    model: int

    @property
    def devices(self) -> int:
        """Of its mesh."""
        return self.data * self.model


@dataclass(frozen=True)
class Question:
    """What is cut: `layers` and `devices` in all, into stages that are `sizes` (data, model) large, for so many
    microbatches. `seconds` and `memory` say what a part takes, as the first or the last one or both; a part holds up
    to so many microbatches (the last argument of `memory`), and has `limit` bytes."""

    layers: int
    devices: int
    microbatches: int
    sizes: Sequence[tuple[int, int]]
    seconds: Callable[[Part, bool, bool], float]
    memory: Callable[[Part, bool, bool, int], float]
    limit: float
    most: int | None = None  # stages

    def takes(self, parts: Sequence[Part]) -> float:
        """Seconds of a step that is cut so: one microbatch through all, and the others through the slowest."""
        ends = [(number == 0, number == len(parts) - 1) for number in range(len(parts))]
        times = [self.seconds(part, *end) for part, end in zip(parts, ends, strict=True)]
        return sum(times) + (self.microbatches - 1) * max(times)

    def fits(self, parts: Sequence[Part]) -> bool:
        """Whether every part has the memory that it needs."""
        count = len(parts)
        return all(
            self.memory(part, n == 0, n == count - 1, min(self.microbatches, count - n)) <= self.limit
            for n, part in enumerate(parts)
        )


def cut_best(question: Question) -> tuple[Part, ...] | None:
    """The stages with which a step takes least, all devices used; None if nothing fits."""
    tables = _tables(question)
    times = sorted({t for table in tables.values() for t, _ in table.values()})
    best: tuple[float, tuple[Part, ...]] | None = None
    for bound in times:
        if best is not None and (question.microbatches - 1) * bound + times[0] >= best[0]:
            break
        found = _least(question, tables, bound)
        if found is not None and (best is None or question.takes(found) < best[0]):
            best = question.takes(found), found
    return None if best is None else best[1]


Ends = tuple[bool, bool, int]  # whether a stage is the first, and the last one; how many there are from it on
Tables = Mapping[Ends, Mapping[tuple[int, int], tuple[float, Part]]]


def _tables(question: Question) -> Tables:
    """By a stage's place: by its layers and devices, the fastest part that has the memory it needs."""
    most = min(question.most or question.layers, question.layers, question.devices)
    found: dict[Ends, dict[tuple[int, int], tuple[float, Part]]] = {}
    for behind in range(1, most + 1):
        for first in (False, True):
            last = behind == 1
            table = found[first, last, behind] = {}
            for layers in range(1, question.layers + 1):
                for data, model in [each for each in question.sizes if math.prod(each) <= question.devices]:
                    part = Part(layers, data, model)
                    held = min(question.microbatches, behind)
                    if question.memory(part, first, last, held) > question.limit:
                        continue
                    made = question.seconds(part, first, last), part
                    key = layers, part.devices
                    table[key] = min(table.get(key, made), made)
    return found


def _least(question: Question, tables: Tables, bound: float) -> tuple[Part, ...] | None:
    """The stages with the least sum of times, none of which takes more than the bound."""
    shape = question.layers + 1, question.devices + 1
    sums = np.full(shape, math.inf)
    sums[0, 0] = 0.0
    ways: list[dict[tuple[int, int], Part]] = []
    best: tuple[float, int, Part] | None = None
    for behind in range(1, max(each for _, _, each in tables) + 1):
        last = behind == 1
        for time, part in tables[True, last, behind].values():
            rest = (question.layers - part.layers, question.devices - part.devices)
            if time <= bound and rest[1] >= 0 and time + sums[rest] < (math.inf if best is None else best[0]):
                best = float(time + sums[rest]), behind, part
        more, way = np.full(shape, math.inf), dict[tuple[int, int], Part]()
        for time, part in tables[False, last, behind].values():
            if time > bound:
                continue
            n, s = part.layers, part.devices
            for i, j in np.argwhere(time + sums[: shape[0] - n, : shape[1] - s] < more[n:, s:]):
                more[i + n, j + s] = time + sums[i, j]
                way[int(i) + n, int(j) + s] = part
        ways.append(way)
        sums = more
    return None if best is None else _followed(question, ways, best[1], best[2])


def _followed(
    question: Question, ways: Sequence[Mapping[tuple[int, int], Part]], count: int, first: Part
) -> tuple[Part, ...]:
    """The stages from the first one on."""
    parts, left = [first], (question.layers - first.layers, question.devices - first.devices)
    for behind in range(count - 1, 0, -1):
        part = ways[behind - 1][left]
        parts.append(part)
        left = left[0] - part.layers, left[1] - part.devices
    return tuple(parts)
