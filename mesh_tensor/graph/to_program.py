"""to_program: the Program of an ExplicitGraph, the same that kernels have: operators and collectives on values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from ..lowering import verify
from ..program import CollectiveStep, OpStep, Parameter, Program, Value, bytes_moved, with_lifetimes
from ..program import Step as ProgramStep
from ..rules.ops.call import OpCall, op_call, tensor_infos, tensor_type
from ..rules.ops.cost import count_flops
from ..sharding import Sharding
from ..verify_program import verify_program
from .explicit import Change, ExplicitGraph, Form, Run, Step, forms_in
from .kernel_steps import KernelSteps, is_kernel
from .local_calls import check_tile, inputs_of, local_call, outputs_of, tile_info
from .schedule import schedule


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


def to_program(explicit: ExplicitGraph, kernels: Kernels) -> ModuleProgram:
    """The steps of every device, as a Program over values whose shapes are those of their atoms. Operators run as
    `kernels` where there is one."""
    return _Programmer(explicit, kernels).made()


class _Programmer:
    def __init__(self, explicit: ExplicitGraph, kernels: Kernels) -> None:
        self._kernels = kernels
        self._explicit, self._atoms = explicit, explicit.atoms
        self._builder = relax.BlockBuilder()
        self._values: dict[str, Value] = {}
        self._vars: dict[Form, relax.Var] = {}
        self._names: dict[relax.Var, str] = {}
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
        shape = self._atoms.shape(form.value)
        return self._values.setdefault(form.name, Value(form.name, shape, form.dtype, form.sharding, form.name))

    def _steps(self, step: Step) -> Iterator[ProgramStep]:
        """A step; where an operator is several on tiles, each of them."""
        forms = outputs_of(step)
        for form in (*inputs_of(step), *forms):
            self._value(form)
        if isinstance(step, Change):
            yield self._collective(step)
            return
        if isinstance(step, Run) and is_kernel(step):
            yield from KernelSteps(step, self._atoms, self._values).steps()
            return
        where = step.node.where if isinstance(step, Run) else forms[0].name
        whole = frozenset(form.name for form in forms if form in self._in_one_piece)
        for var, call in self._bindings(local_call(step, self._atoms, self._tile)):
            operands = tuple(self._operand(leaf) for arg in call.expr.args for leaf in _tensors(arg))
            results = tuple(form.name for form in forms) if var is None else (self._inner(var, call),)
            if var is None:
                for form, info in zip(forms, tensor_infos(call.expr.struct_info), strict=True):
                    check_tile(form, info, self._atoms)
            kernel = self._kernels[call.name](call) if call.name in self._kernels else None
            yield OpStep(call, operands, results, whole, count_flops(call), where, kernel)

    def _bindings(self, expr: relax.Expr) -> Iterator[tuple[relax.Var | None, OpCall]]:
        """The calls that an expression is made of, each with the variable that holds it; None for the last."""
        self._builder._begin_binding_block()
        last = self._builder.emit(expr)
        for binding in self._builder._end_block().bindings:
            yield None if binding.var.same_as(last) else binding.var, op_call(binding.value)

    def _operand(self, leaf: relax.Expr) -> str:
        if isinstance(leaf, relax.Constant):
            tensor, name = tensor_type(leaf.struct_info, "a constant"), f"const.{len(self._values)}"
            self._constants[name] = leaf
            self._add_whole(name, tensor.shape, tensor.dtype)
            return name
        return self._names[leaf]

    def _inner(self, var: relax.Var, call: OpCall) -> str:
        """A value between the calls of one operator: known as the tile that a device has, and as nothing else."""
        (tensor,) = call.outputs
        name = self._names[var] = f"{var.name_hint}.{len(self._values)}"
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

    def _tile(self, form: Form) -> relax.Var:
        if form not in self._vars:
            var = self._vars[form] = relax.Var(form.name, tile_info(form, self._atoms))
            self._names[var] = form.name
        return self._vars[form]


def names_of(tree: Any) -> Any:
    """The tree with names in place of forms."""
    return tree.name if isinstance(tree, Form) else tuple(names_of(item) for item in tree)


def _tensors(arg: relax.Expr) -> list[relax.Expr]:
    if isinstance(arg, relax.Tuple):
        return [leaf for field in arg.fields for leaf in _tensors(field)]
    return [arg] if isinstance(arg.struct_info, relax.TensorStructInfo) else []
