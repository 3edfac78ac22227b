"""to_program: the Program of an ExplicitGraph, the same that kernels have: operators and collectives on values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.lowering import verify
from mesh_tensor.lowering.local_calls import inputs_of, outputs_of
from mesh_tensor.lowering.tile_calls import TileCalls
from mesh_tensor.plan.explicit import Change, ExplicitGraph, Form, Run, Step, forms_in
from mesh_tensor.rules.operator.call import OpCall, tensor_type

from .early_starts import schedule
from .kernel_steps import KernelSteps, is_kernel
from .lifetimes import with_lifetimes
from .steps import CollectiveStep, OpStep, Parameter, Program, Value, bytes_moved
from .steps import Step as ProgramStep
from .verify import verify_program


@dataclass(frozen=True)
class ModuleProgram:
    """A module's Program. Its parameters are the function's own (named in `inputs`), then the constants (with their
    data), then what it computes. `result` is what the function returns: a tree of names of values."""

    program: Program
    inputs: tuple[str, ...]
    constants: dict[str, relax.Constant]
    result: Any


# By operator: a kernel that computes a call on tiles, or None where it does not fit.
Kernels = Mapping[str, Callable[[OpCall], "tirx.PrimFunc | None"]]


def to_program(explicit: ExplicitGraph, calls: TileCalls, kernels: Kernels) -> ModuleProgram:
    """The steps of every device, as a Program over values whose shapes are those of their atoms. Operators run as
    `kernels` where there is one."""
    return _Programmer(explicit, calls, kernels).made()


class _Programmer:
    def __init__(self, explicit: ExplicitGraph, calls: TileCalls, kernels: Kernels) -> None:
        self._calls, self._kernels = calls, kernels
        self._explicit, self._atoms = explicit, explicit.atoms
        self._values: dict[str, Value] = {}
        self._known_kernels: dict[OpCall, tirx.PrimFunc | None] = {}
        self._constants: dict[str, relax.Constant] = {}
        read = [step for step in explicit.steps if isinstance(step, Change) or is_kernel(step)]
        self._in_one_piece = {*forms_in(explicit.result), *(form for step in read for form in inputs_of(step))}

    def made(self) -> ModuleProgram:
        explicit, graph = self._explicit, self._explicit.graph
        for form in (*explicit.params, *explicit.constants):
            self._value(form)
        self._constants |= {form.name: form.value.data for form in explicit.constants if form.value.data is not None}
        steps = [made for step in explicit.steps for made in self._steps(step)]
        inputs = tuple(form.name for form in explicit.params)
        given = {*inputs, *self._constants}
        computed = dict.fromkeys(form.name for form in forms_in(explicit.result) if form.name not in given)
        parameters = (
            *(Parameter(name, name, None) for name in (*inputs, *self._constants)),
            *(Parameter(name, None, name) for name in computed),
        )
        all_steps = with_lifetimes(schedule(steps), self._values, parameters)
        program = Program(graph.name, graph.mesh, parameters, self._values, all_steps)
        if verify.enabled():
            verify_program(program)
        return ModuleProgram(program, inputs, self._constants, names_of(explicit.result))

    def _value(self, form: Form) -> Value:
        """A value's shape is over its atoms, like its layout."""
        if form.name not in self._values:
            shape = self._atoms.shape(form.value)
            self._values[form.name] = Value(form.name, shape, form.dtype, form.sharding, form.name)
        return self._values[form.name]

    def _steps(self, step: Step) -> Iterator[ProgramStep]:
        """A step; where an operator is several on tiles, each of them."""
        forms = outputs_of(step)
        for form in forms:
            self._value(form)
        if isinstance(step, Change):
            yield self._collective(step)
            return
        if isinstance(step, Run) and is_kernel(step):
            yield from KernelSteps(step, self._atoms, self._values).steps()
            return
        where = step.node.where if isinstance(step, Run) else forms[0].name
        whole = frozenset(form.name for form in forms if form in self._in_one_piece)
        tiles, calls = [form.name for form in inputs_of(step)], self._calls.of(step)
        for made in calls:
            operands = tuple(tiles[o] if isinstance(o, int) else self._constant(o) for o in made.operands)
            results = tuple(form.name for form in forms) if made is calls[-1] else (self._inner(made.call),)
            tiles += results
            yield OpStep(made.call, operands, results, whole, made.flops, where, self._kernel(made.call))

    def _kernel(self, call: OpCall) -> tirx.PrimFunc | None:
        if call.name not in self._kernels:
            return None
        if call not in self._known_kernels:
            self._known_kernels[call] = self._kernels[call.name](call)
        return self._known_kernels[call]

    def _constant(self, constant: relax.Constant) -> str:
        """An operator's own constant."""
        tensor, name = tensor_type(constant.struct_info, "a constant"), f"const.{len(self._values)}"
        self._constants[name] = constant
        self._add_whole(name, tensor.shape, tensor.dtype)
        return name

    def _inner(self, call: OpCall) -> str:
        """A value between the calls of one operator: known as the tile that a device has, and as nothing else."""
        (tensor,) = call.outputs
        name = f"gv.{len(self._values)}"
        self._add_whole(name, tensor.shape, tensor.dtype)
        return name

    def _add_whole(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self._values[name] = Value(name, shape, dtype, Sharding.of(self._explicit.graph.mesh, len(shape), {}), name)

    def _collective(self, step: Change) -> CollectiveStep:
        move, src, dst = step.move, self._value(step.src), self._value(step.dst)
        size = bytes_moved(move.kind, src, dst, move.axes)
        return CollectiveStep(
            move.kind, src.name, dst.name, move.axes, move.op, move.src_dim, move.dst_dim, size, step.reason
        )


def names_of(tree: Any) -> Any:
    """The tree with names in place of forms."""
    return tree.name if isinstance(tree, Form) else tuple(names_of(item) for item in tree)
