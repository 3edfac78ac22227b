"""Choices of how a model is trained: data x model parallel meshes, stages, microbatches, schedule, ZeRO, recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.pipelining.orders import SCHEDULES
from mesh_tensor.pipelining.schedule import Schedule

from .stages import Part

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
        for model in _divisors(self.devices):
            if model not in self.model:
                continue
            for meshes in _divisors(self.devices // model):
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
        counts = _divisors(self.batch // data)
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


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
