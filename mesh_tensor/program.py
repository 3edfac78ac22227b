"""The Program: what one device runs, as a list of steps that runtimes and simulators walk.

A Program knows nothing of TileLang's code generators, of torch or of threads. Every device runs the same steps; where a
kernel has to know which device it is on, it takes the device's coordinates as its last arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tvm import tirx

from .errors import MeshTensorError, refuse
from .lowering import verify
from .lowering.layouts import Collective, LocalKernel, Tensor
from .lowering.pipeline import Lowered, lower_kernel
from .mesh import Mesh
from .propagation import dtype_bits
from .redistribution import elements_received
from .rules.cost import flops_function
from .rules.ops import OpCall
from .rules.sizes import size_function
from .sharding import Sharding


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

    kind          what changes over `axes`
    all_reduce    partial(op) -> replicated
    reduce_scatter partial(op) -> sharded on dst_dim
    all_gather    sharded on src_dim -> replicated
    all_to_all    sharded on src_dim -> sharded on dst_dim
    slice         replicated -> sharded on dst_dim          (nothing is sent)
    to_partial    replicated -> partial(op): only coordinate 0 keeps the value, the others take op's neutral element
                  (nothing is sent)
    permute       sharded or replicated -> sharded otherwise, or replicated: every device gets one device's whole tile
    exchange      the same, but every device gets boxes of several devices' tiles

    Where it is not to `wait`, it only starts: `src` is not written and `dst` not used before its WaitStep.
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


def lower_to_program(func: tirx.PrimFunc, strict: bool = False, view: str = "auto") -> Program:
    """Lower an annotated kernel without symbolic sizes to the Program that every device runs.

    Raises:
        MeshTensorError: the kernel can't be lowered (see `lower`), or a size is symbolic.
    """
    return build_program(lower_kernel(func, strict=strict, view=view))


def build_program(lowered: Lowered) -> Program:
    """The Program of a lowered kernel: its kernels and collectives, and when memory lives."""
    return OpenProgram(lowered).sized((), lambda: lowered)


class OpenProgram:
    """The Program of a kernel in local view, whose `symbols` are still open: `sized` fills them in, and does no more.

    Raises:
        MeshTensorError: there are other symbols in the shapes of its tensors.
    """

    def __init__(self, lowered: Lowered, symbols: Sequence[tirx.Var] = ()) -> None:
        self._name, self._mesh = lowered.name, lowered.mesh
        self._values = [(tensor, _shape_function(tensor, symbols)) for tensor in lowered.tensors.values()]
        self._parameters = tuple(Parameter(*names, names[0] in lowered.kept) for names in lowered.parameters)
        steps = [_step(step, lowered) for step in lowered.steps]
        self._steps = with_lifetimes(steps, lowered.tensors, self._parameters)
        self._kernels = {
            step.func: (flops_function(step.func, symbols), _size_parameters(step, symbols))
            for step in steps
            if isinstance(step, KernelStep)
        }

    def sized(self, sizes: Sequence[int], lowering: Callable[[], Lowered]) -> Program:
        """The Program for the symbols' sizes, in their order. `lowering` gives the kernel lowered for just these."""
        values = {
            tensor.name: Value(tensor.name, shape(sizes), tensor.dtype, tensor.sharding, tensor.storage)
            for tensor, shape in self._values
        }
        steps = tuple(self._sized(step, values, sizes) for step in self._steps)
        program = Program(self._name, self._mesh, self._parameters, values, steps, lowering)
        if verify.enabled():
            from .verify_program import verify_program  # it checks what this module defines

            verify_program(program)
        return program

    def _sized(self, step: Step, values: Mapping[str, Value], sizes: Sequence[int]) -> Step:
        if isinstance(step, KernelStep):
            flops, parameters = self._kernels[step.func]
            own = tuple(sizes[position] for position in parameters)
            return KernelStep(step.name, step.func, step.args, step.axes, step.writes, flops(sizes), step.scalars, own)
        if isinstance(step, CollectiveStep):
            return replace(step, bytes=bytes_moved(step.kind, values[step.src], values[step.dst], step.axes))
        return step


def _shape_function(tensor: Tensor, symbols: Sequence[tirx.Var]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    try:
        dims = [size_function(size, symbols) for size in tensor.shape]
    except MeshTensorError:
        refuse(
            f"tensor {tensor.name!r} has the symbolic shape {tuple(tensor.shape)}",
            why="a Program has sizes",
            fix="specialize the kernel to sizes first (compile does at the first call)",
        )
    return lambda sizes: tuple(dim(sizes) for dim in dims)


def _step(step: LocalKernel | Collective, lowered: Lowered) -> Step:
    """The step, without what depends on sizes."""
    if isinstance(step, LocalKernel):
        name = str(step.func.attrs["global_symbol"])
        scalars = tuple(v.name for v in lowered.scalars)
        return KernelStep(name, step.func, step.args, step.axes, step.writes, 0, scalars)
    move = step.move
    return CollectiveStep(move.kind, step.src, step.dst, move.axes, move.op, move.src_dim, move.dst_dim, 0, step.reason)


def _size_parameters(step: KernelStep, symbols: Sequence[tirx.Var]) -> tuple[int, ...]:
    """Which of the symbols the kernel takes between its own parameters and the coordinates."""
    params = step.func.params
    names = params[len(step.args) + len(step.scalars) : len(params) - len(step.axes)]
    return tuple(next(i for i, symbol in enumerate(symbols) if symbol.same_as(name)) for name in names)


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
