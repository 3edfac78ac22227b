"""From a kernel in local view to the Program that every device runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from tvm import tirx

from mesh_tensor.base.decisions import Decisions
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.lowering.local_view import Collective, LocalKernel, LocalView, Tensor
from mesh_tensor.lowering.pipeline import KernelLowering
from mesh_tensor.lowering.slabs import Slabs
from mesh_tensor.lowering.verify import other_tiles
from mesh_tensor.rules.kernel.cost import coordinates_of, flops_function, size_function
from mesh_tensor.rules.kernel.factor_derivation import Dim

from .builder import collective_step, with_lifetimes
from .program import Parameter, Program, ProgramValue
from .steps import KernelStep, Step
from .verify import checked

_A_BUG = "the kernel was made local wrongly: a bug of mesh_tensor, which ends here and not in wrong numbers"

SplitDims = tuple[tuple[str, Dim], ...]  # axis, a dim that the factor which it splits walks
SizedStep = Callable[[Mapping[str, ProgramValue], Sequence[int]], Step]  # from the values and the symbols' sizes


def lower_to_program(func: tirx.PrimFunc, strict: bool = False, machine: Machine | None = None) -> Program:
    """Lower an annotated kernel without symbolic sizes to the Program that every device runs, planned for a machine.
    Refused where the kernel can't be lowered (see `lower`), or a size is symbolic."""
    return Lowering(KernelLowering("auto", machine), strict)(func).sized(())


@dataclass(frozen=True)
class Lowering:
    """Makes Programs of annotated kernels: each is lowered, and its symbols stay open."""

    lowering: KernelLowering
    strict: bool

    def __call__(
        self, func: tirx.PrimFunc, symbols: Sequence[tirx.Var] = (), split: SplitDims | None = None
    ) -> OpenProgram:
        """The Program of a kernel, with that split, or with the one that costs least."""
        return OpenProgram(self.lowering(func, self.strict, split), symbols)

    def splits(self, func: tirx.PrimFunc) -> Callable[[Mapping[tirx.Var, int]], SplitDims]:
        """What costs least, by the sizes of symbols."""
        return self.lowering.splits(func, self.strict)


def build_program(local: LocalView) -> Program:
    """The Program of a kernel in local view: its kernels and collectives, and when memory lives."""
    return OpenProgram(local).sized(())


class OpenProgram:
    """The Program of a kernel in local view, whose `symbols` are still open: `sized` fills them in, and does no more.
    Refused where there are other symbols in the shapes of its tensors."""

    def __init__(self, local: LocalView, symbols: Sequence[tirx.Var] = ()) -> None:
        self._name, self._mesh, self._decisions = local.name, local.mesh, local.decisions
        self._values = {name: _value_function(tensor, symbols) for name, tensor in local.tensors.items()}
        self._parameters = tuple(Parameter(*names, names[0] in local.kept) for names in local.parameters)
        self._symbols, self._local = symbols, local
        kinds: dict[type, Callable[[Any], SizedStep]] = {LocalKernel: self._kernel, Collective: self._collective}
        lasting = with_lifetimes(local.steps, local.tensors, self._parameters)
        self._steps = [kinds.get(type(step), _constant)(step) for step in lasting]

    def sized(self, sizes: Sequence[int], decided: Callable[[], Decisions] | None = None) -> Program:
        """The Program for the symbols' sizes, in their order. `decided` gives what was decided for just these, if
        that is not what was for all."""
        values = {name: value(sizes) for name, value in self._values.items()}
        steps = tuple([step(values, sizes) for step in self._steps])
        return checked(Program(self._name, self._mesh, self._parameters, values, steps, decided or self._decisions))

    def _kernel(self, step: LocalKernel) -> SizedStep:
        """A local kernel; in slabs it may run only where no sizes are open."""
        local, func = self._local, step.func
        name = str(func.attrs["global_symbol"])
        if problems := list(other_tiles(step, local.tensors)):
            refuse(
                "; ".join(problems), where=f"local kernel {name}", why=_A_BUG, fix="split fewer of the kernel's dims"
            )
        scalars = tuple(v.name for v in local.scalars)
        slabs = None if self._symbols else Slabs(step, local.mesh)
        at = coordinates_of(func, step.axes, local.mesh)
        parameters, counts = self._size_parameters(step), cache(partial(flops_function, func, self._symbols, at))

        def sized(values: Mapping[str, ProgramValue], sizes: Sequence[int]) -> Step:
            own = tuple([sizes[position] for position in parameters])
            return KernelStep(
                name, func, step.args, step.axes, step.writes, lambda: counts()(sizes), scalars, own, slabs
            )

        return sized

    def _collective(self, step: Collective) -> SizedStep:
        return lambda values, sizes: collective_step(step.move, values[step.src], values[step.dst], step.reason)

    def _size_parameters(self, step: LocalKernel) -> tuple[int, ...]:
        """Which of the symbols the kernel takes between its own parameters and the coordinates."""
        params = step.func.params
        names = params[len(step.args) + len(self._local.scalars) : len(params) - len(step.axes)]
        return tuple(next(i for i, symbol in enumerate(self._symbols) if symbol.same_as(name)) for name in names)


def _value_function(tensor: Tensor, symbols: Sequence[tirx.Var]) -> Callable[[Sequence[int]], ProgramValue]:
    """From the values of the symbols to that of a tensor: the same one where its shape has no symbols."""
    try:
        dims = [size_function(size, symbols) for size in tensor.shape]
    except MeshTensorError:
        refuse(
            f"tensor {tensor.name!r} has the symbolic shape {tuple(tensor.shape)}",
            why="a Program has sizes",
            fix="specialize the kernel to sizes first (compile does at the first call)",
        )

    def value(sizes: Sequence[int]) -> ProgramValue:
        shape = tuple([dim(sizes) for dim in dims])
        return ProgramValue(tensor.name, shape, tensor.dtype, tensor.sharding, tensor.storage)

    if all(isinstance(size, (int, tirx.IntImm)) for size in tensor.shape):
        constant = value(())
        return lambda sizes: constant
    return value


def _constant(step: Step) -> SizedStep:
    return lambda values, sizes: step
