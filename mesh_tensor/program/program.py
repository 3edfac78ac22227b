"""The Program: what one device runs, as a list of steps that runtimes, checks and simulators give a meaning.

A Program knows nothing of TileLang's code generators, of torch or of threads. Every device runs the same steps; where a
kernel has to know which device it is on, it takes the device's coordinates as its last arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from mesh_tensor.base.decisions import Decisions
from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import elements_received

from .loop_step import LoopStep
from .steps import CollectiveStep, KernelStep, Meanings, OpStep, Step, only

T = TypeVar("T")


@dataclass(frozen=True)
class Slab:
    """A contiguous part of every device's tile: indices `start` to `stop` along `dim` (all dims before it are 1)."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class ProgramValue:
    """A tensor of the program: `shape` is global, `sharding` says what of it each device holds.

    Values with the same `storage` share memory (a collective that works in place goes from one to the other). A value
    with a `slab` is that part of the storage's tiles: a tensor of its own, whose tiles are the slabs. An `inner` one is
    between the calls that one operator is on tiles: `shape` is a tile's, and nothing is said of other devices'."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    storage: str
    slab: Slab | None = None
    inner: bool = False

    @cached_property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape that every device allocates: ceildiv(dim, axis sizes)."""
        return self.sharding.tile_shape(self.shape)

    @property
    def tile_bytes(self) -> int:
        """The memory of what `tile_shape` tells."""
        return math.prod(self.tile_shape) * dtype_bits(self.dtype) // 8

    def overlaps(self, other: ProgramValue) -> bool:
        """Whether they share memory."""
        if self.storage != other.storage or self.slab is None or other.slab is None:
            return self.storage == other.storage
        return self.slab.start < other.slab.stop and other.slab.start < self.slab.stop


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel as its caller sees it: `input` is None if the kernel only writes it, `output` is None
    if it only reads it. Both name Values with the layout that was annotated. `kept`: nothing looks at what comes in,
    but some of it may stay; a caller who has nothing to keep may leave it out."""

    name: str
    input: str | None
    output: str | None
    kept: bool = False


@dataclass(frozen=True)
class Program:
    """`steps` over `values`; `parameters` are in the order of the caller's own. `overlap`: what was decided about
    running collectives beside kernels, and why. `decided` finds what was decided before, for these very sizes."""

    name: str
    mesh: Mesh
    parameters: tuple[Parameter, ...]
    values: Mapping[str, ProgramValue]
    steps: Sequence[Step]
    decided: Callable[[], Decisions] | None = field(default=None, compare=False, repr=False)
    overlap: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def kernels(self) -> tuple[KernelStep, ...]:
        """The steps that run local kernels."""
        return only(self.steps, KernelStep)

    @cached_property
    def ops(self) -> tuple[OpStep, ...]:
        """The steps that call operators."""
        return only(self.steps, OpStep)

    @cached_property
    def collectives(self) -> tuple[CollectiveStep, ...]:
        """The steps that run collectives, or start them."""
        return only(self.steps, CollectiveStep)

    @cached_property
    def loops(self) -> tuple[LoopStep, ...]:
        """The steps that run others several times."""
        return only(self.steps, LoopStep)

    @cached_property
    def parts(self) -> tuple[Program, ...]:
        """The program, and those that its loops run."""
        inner = [body for loop in self.loops for body in (loop.test, loop.body) if isinstance(body, Program)]
        return (self, *(part for body in inner for part in body.parts))

    @property
    def takes(self) -> tuple[str, ...]:
        """The values that callers bring."""
        return tuple(parameter.input for parameter in self.parameters if parameter.input is not None)

    @property
    def inputs(self) -> frozenset[str]:
        """The storages that callers bring."""
        return frozenset(self.values[p.input].storage for p in self.parameters if p.input is not None)

    @property
    def outputs(self) -> frozenset[str]:
        """The storages that callers take."""
        return frozenset(self.values[p.output].storage for p in self.parameters if p.output is not None)

    @cached_property
    def stored(self) -> dict[str, ProgramValue]:
        """Storage -> a value that is all of it."""
        return {value.storage: value for value in reversed(list(self.values.values())) if value.slab is None}

    @cached_property
    def last_writes(self) -> dict[str, Step]:
        """Storage -> the last step that writes it; storages that nothing writes are not there."""
        return {self.values[name].storage: step for step in self.steps for name in step.writes}

    @cached_property
    def overwrites_from(self) -> int:
        """The number of the first step that writes memory which callers bring; of all steps if none does."""
        inputs = self.inputs
        writing = (n for n, step in enumerate(self.steps) if any(self.values[w].storage in inputs for w in step.writes))
        return next(writing, len(self.steps))

    def mean(self, meanings: Meanings[T]) -> list[T]:
        """The meaning of every step, in order."""
        return [step.mean(meanings) for step in self.steps]


def bytes_received(kind: str, src: ProgramValue, dst: ProgramValue, axes: tuple[str, ...]) -> int:
    """What the busiest device of a collective receives, with the usual ring algorithms; at even sizes all devices send
    and receive as much."""
    elements = elements_received(kind, src.shape, src.sharding, dst.sharding, axes)
    return elements * dtype_bits(src.dtype) // 8
