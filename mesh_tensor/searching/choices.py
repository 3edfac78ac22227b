"""Choices of how a model is trained: data x model parallel meshes, stages, microbatches, schedule, ZeRO, recompute; and
stages on meshes of different sizes: where a model is cut, and how many devices each part has, best.

A step of 1F1B takes about what one microbatch takes through all stages, and what the others take in the slowest one.
For every bound on the slowest, dynamic programming finds the stages with the least sum from the last one backwards:
with so many layers and devices left, and so many stages behind, which say how many microbatches a stage holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.pipelining.orders import SCHEDULES
from mesh_tensor.pipelining.schedule import Schedule

DATA, MODEL = "data", "model"  # the axes of a stage's mesh; devices along the second one are neighbours
_CHUNKS = {"interleaved": (2, 3), "zbv": (2,), "dualpipev": (2,)}


@dataclass(frozen=True, order=True)
class Choice:
    """One way to train a model on data x model x meshes devices.

    data, model    sizes of each mesh's axes: rows of a microbatch are split over the first one, and weights as
                   Megatron splits them over the second one
    meshes         how many meshes, each with `chunks` stages of the model
    microbatches   of a batch, gone through in the order of `schedule`
    zero           0: every device of a data axis has all; 1: optimizer states are split over it; 3: weights as well
    recompute      backwards run their stage's forward again; nothing but what it took is kept
    sequence       what is between split layers is split by positions
    parts          stages on meshes of different sizes, one each: `data` and `model` are the largest then
    """

    data: int = 1
    model: int = 1
    meshes: int = 1
    microbatches: int = 1
    schedule: str = "gpipe"
    chunks: int = 1
    zero: int = 0
    recompute: bool = False
    sequence: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def devices(self) -> int:
        """In all."""
        return sum(each.data * each.model for each in self.each)

    @property
    def each(self) -> tuple[Choice, ...]:
        """Per mesh, the choice as if all were of its size."""
        alike = replace(self, parts=())
        if not self.parts:
            return (alike,) * self.meshes
        return tuple(replace(alike, data=part.data, model=part.model) for part in self.parts)

    @property
    def stages(self) -> int:
        """Parts that the model is cut into."""
        return self.meshes * self.chunks

    @property
    def order(self) -> tuple[str, int, int, int]:
        """What its schedule is made of: name, meshes, microbatches, chunks."""
        return self.schedule, self.meshes, self.microbatches, self.chunks

    @property
    def halves(self) -> bool:
        """Whether its schedule runs backwards in two halves: gradients of what stages take, and of weights."""
        return self.meshes > 1 and runs_halves(self.schedule)

    @property
    def mesh(self) -> Mesh:
        """What every stage lies on."""
        return Mesh({DATA: self.data, MODEL: self.model})

    def rows(self, batch: int) -> int:
        """Of a microbatch, on one device."""
        return batch // self.microbatches // self.data

    def __str__(self) -> str:
        sizes = f"D{self.data} H{self.model} P{self.meshes}"
        if self.parts:
            sizes = " + ".join(f"D{part.data} H{part.model}" for part in self.parts)
        words = [f"{sizes} K{self.microbatches}", self.schedule]
        words += [f"x {self.chunks}"] if self.chunks > 1 else []
        words += [f"ZeRO-{self.zero}"] if self.zero else []
        words += ["recompute"] if self.recompute else []
        return " ".join([*words, *(["sequence"] if self.sequence else [])])


@dataclass(frozen=True)
class Space:
    """What is tried: all combinations that there can be."""

    devices: int
    batch: int
    layers: int
    model: Sequence[int]
    microbatches: Sequence[int] | None = None
    schedules: Sequence[str] = ("gpipe", "1f1b", "interleaved")
    zero: Sequence[int] = (0, 1, 3)
    recompute: Sequence[bool] = (False, True)
    sequence: Sequence[bool] = (False, True)

    def choices(self) -> Iterator[Choice]:
        """Every choice, once."""
        for model in divisors(self.devices):
            if model not in self.model:
                continue
            for meshes in divisors(self.devices // model):
                data = self.devices // model // meshes
                if self.batch % data == 0:
                    yield from self._on_meshes(data, model, meshes)

    def _on_meshes(self, data: int, model: int, meshes: int) -> Iterator[Choice]:
        for count in self.counts(data):
            for schedule, chunks in self._schedules(meshes, count):
                for zero in self.zero if data > 1 else self.zero[:1]:
                    for sequence in self.sequence if model > 1 else (False,):
                        for again in self.recompute if meshes == 1 or not runs_halves(schedule) else (False,):
                            yield Choice(data, model, meshes, count, schedule, chunks, zero, again, sequence)

    def counts(self, data: int) -> list[int]:
        """How many microbatches a batch can be of which every device has the same rows."""
        counts = divisors(self.batch // data)
        return [each for each in counts if self.microbatches is None or each in self.microbatches]

    def _schedules(self, meshes: int, count: int) -> Iterator[tuple[str, int]]:
        """The schedules that there can be; on one mesh, forwards and backwards take turns in all of them."""
        if meshes == 1:
            yield "1f1b", 1
            return
        for name in self.schedules:
            for chunks in _CHUNKS.get(name, (1,)):
                order = SCHEDULES[name]
                in_rounds = not (order.in_rounds and chunks > 1) or count % meshes == 0
                if meshes * chunks <= self.layers and in_rounds and (not order.fills_twice or count >= 2 * meshes):
                    yield name, chunks


@lru_cache
def runs_halves(schedule: str) -> bool:
    """Whether the schedule of that name has actions for halves of backwards."""
    chunks = _CHUNKS.get(schedule, (1,))[0]
    made = Schedule.named(schedule, meshes=2, microbatches=4, chunks=chunks)
    return any(action.kind in "IW" for row in made.rows for action in row)


def divisors(number: int) -> list[int]:
    """All of a number, the least first."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


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
