"""The Program: what one device runs, as a list of steps that runtimes and simulators walk.

A Program knows nothing of TileLang's code generators, of torch or of threads. Every device runs the same steps; where a
kernel has to know which device it is on, it takes the device's coordinates as its last arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.lowering.layouts import Tensor
from mesh_tensor.lowering.pipeline import Lowered
from mesh_tensor.redistribution.plan import elements_received
from mesh_tensor.rules.operator import OpCall


@dataclass(frozen=True)
class Slab:
    """A contiguous part of every device's tile: indices `start` to `stop` along `dim` (all dims before it are 1)."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Value:
    """A tensor of the program: `shape` is global, `sharding` says what of it each device holds.

    Values with the same `storage` share memory (a collective that works in place goes from one to the other). A value
    with a `slab` is that part of the storage's tiles: a tensor of its own, whose tiles are the slabs."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    storage: str
    slab: Slab | None = None

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape that every device allocates: ceildiv(dim, axis sizes)."""
        return self.sharding.tile_shape(self.shape)

    @property
    def tile_bytes(self) -> int:
        """The memory of what `tile_shape` tells."""
        return math.prod(self.tile_shape) * dtype_bits(self.dtype) // 8


@dataclass(frozen=True)
class KernelStep:
    """One device runs `func`: its tensor parameters get the tiles of `args` in order, its scalar ones the kernel's own
    `scalars` (by name) in order, then come the `sizes` that no tile tells, and its last ones get the device's
    coordinate on each of `axes` (int32)."""

    name: str
    func: tirx.PrimFunc
    args: tuple[str, ...]
    axes: tuple[str, ...]
    writes: tuple[str, ...]
    flops: int
    scalars: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class OpStep:
    """One device calls an operator on the tiles of `args`; what it gives are the tiles of `results`, in memory of their
    own or views of the operands. `call` has the tiles' shapes as the operator knows them: values may have their dims
    taken apart further. `whole`: the results that have to lie in one piece, for who uses them. `where` names the
    binding. `kernel` computes the same, where there is one that is faster: it takes the operands, then the results."""

    call: OpCall
    args: tuple[str, ...]
    results: tuple[str, ...]
    whole: frozenset[str]
    flops: int
    where: str
    kernel: tirx.PrimFunc | None = None


@dataclass(frozen=True)
class CollectiveStep:
    """The devices that differ only in their coordinates on `axes` turn `src`'s layout into `dst`'s.

    `kind` is the name of one in `base.collectives`, which says what each of the axes does with the tensor before and
    after: partial values are combined by `op`, `src_dim` is the dim that they split, `dst_dim` the one that they split
    then. Where it is not to `wait`, it only starts: `src` is not written and `dst` not used before its WaitStep.
    """

    kind: str
    src: str
    dst: str
    axes: tuple[str, ...]
    op: str | None
    src_dim: int | None
    dst_dim: int | None
    bytes: int
    reason: str
    wait: bool = True


@dataclass(frozen=True)
class WaitStep:
    """The collective, which an earlier step started, has ended: its `dst` is there."""

    collective: CollectiveStep


@dataclass(frozen=True)
class AllocStep:
    """The memory of a workspace or an output comes to life here."""

    value: str


@dataclass(frozen=True)
class FreeStep:
    """Nothing uses this workspace any more."""

    value: str


Step = KernelStep | OpStep | CollectiveStep | WaitStep | AllocStep | FreeStep


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
    """`steps` over `values`; `parameters` are in the order of the kernel's own. `overlap`: what was decided about
    running collectives beside kernels, and why. `lowering` finds what it was made from, for these very sizes."""

    name: str
    mesh: Mesh
    parameters: tuple[Parameter, ...]
    values: dict[str, Value]
    steps: tuple[Step, ...]
    lowering: Callable[[], Lowered] | None = field(default=None, compare=False, repr=False)
    overlap: tuple[str, ...] = field(default=(), compare=False)

    @property
    def lowered(self) -> Lowered | None:
        """The kernel in local view that the steps are those of; None if nothing was lowered."""
        return None if self.lowering is None else self.lowering()


def bytes_moved(kind: str, src: Value, dst: Value, axes: tuple[str, ...]) -> int:
    """What the busiest device of a collective receives, with the usual ring algorithms; at even sizes all devices send
    and receive as much."""
    elements = elements_received(kind, src.shape, src.sharding, dst.sharding, axes)
    return elements * dtype_bits(src.dtype) // 8


def with_lifetimes(
    steps: Sequence[Step], values: Mapping[str, Value] | Mapping[str, Tensor], parameters: tuple[Parameter, ...]
) -> tuple[Step, ...]:
    """`steps`, and each storage is allocated before its first use, and workspaces are freed after their last."""
    kept = {values[p.input].storage for p in parameters if p.input is not None}
    outputs = {values[p.output].storage for p in parameters if p.output is not None}
    uses = [[values[name].storage for name in names_in(step)] for step in steps]
    last = {storage: index for index, names in enumerate(uses) for storage in names}
    lasting = kept | outputs
    alive = set(kept)
    result: list[Step] = []
    for index, step in enumerate(steps):
        for storage in dict.fromkeys(uses[index]):
            if storage not in alive:
                alive.add(storage)
                if not isinstance(step, OpStep):  # its results come with their memory
                    result.append(AllocStep(storage))
        result.append(step)
        for storage in dict.fromkeys(uses[index]):
            if last[storage] == index and storage not in lasting:
                result.append(FreeStep(storage))
    return tuple(result)


def names_in(step: Step) -> tuple[str, ...]:
    """The values that a step uses."""
    if isinstance(step, KernelStep):
        return step.args
    if isinstance(step, OpStep):
        return (*step.args, *step.results)
    if isinstance(step, WaitStep):
        step = step.collective
    return (step.src, step.dst) if isinstance(step, CollectiveStep) else ()
