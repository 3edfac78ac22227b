"""TileCalls: the steps of an ExplicitGraph as calls on numbered tiles; alike steps, as those of a model's layers, share
theirs.

A step is known by its operator and by how its operands and results lie. What it is on tiles, what TVM infers of that
and whether the rule agrees is found out once, on stand-ins for the operands' tiles; and kept for other plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tvm import relax

from mesh_tensor.base.recent import Recent
from mesh_tensor.plan.atoms import Atoms
from mesh_tensor.plan.explicit import Change, Fill, Form, Run, Step
from mesh_tensor.rules.operator.call import OpCall, op_call, tensor_infos
from mesh_tensor.rules.operator.cost import count_flops

from .local_calls import check_tile, inputs_of, local_call, outputs_of, tile_info


@dataclass(frozen=True, eq=False)
class TileCall:
    """One call on tiles. Tiles are numbered within the step: its operands' first, then what its calls give, in order.

    `call` is on stand-ins for tiles. `operands`: the tensors among the arguments, tuples flattened, each by its number
    or as a constant of the operator's own."""

    call: OpCall
    operands: tuple[int | relax.Constant, ...]
    flops: int


_KNOWN: Recent[tuple, tuple[TileCall, ...]] = Recent(4096)


class TileCalls:
    """The calls of all steps of a plan, and the struct infos of its tiles."""

    def __init__(self, atoms: Atoms) -> None:
        self._atoms = atoms
        self._builder = relax.BlockBuilder()
        self._infos: dict[tuple, relax.TensorStructInfo] = {}
        self._of: dict[Step, tuple[TileCall, ...]] = {}

    def of(self, step: Step) -> tuple[TileCall, ...]:
        """The calls that a step, which runs no kernel, is made of; the last one gives its results.

        Raises:
            MeshTensorError: TVM infers another tile than was decided.
        """
        if step not in self._of:
            layouts = tuple(self._layout(form) for form in (*inputs_of(step), *outputs_of(step)))
            key = (type(step), _particulars(step), layouts)
            self._of[step] = _KNOWN.made(key, lambda: self._make(step))
        return self._of[step]

    def info(self, form: Form) -> relax.TensorStructInfo:
        """The struct info of a form's tile."""
        layout = self._layout(form)
        if layout not in self._infos:
            self._infos[layout] = tile_info(form, self._atoms)
        return self._infos[layout]

    def _layout(self, form: Form) -> tuple:
        return self._atoms.of[form.value], form.sharding, form.dtype

    def _make(self, step: Step) -> tuple[TileCall, ...]:
        stand_ins = [relax.Var(f"tile{i}", self.info(form)) for i, form in enumerate(inputs_of(step))]
        self._builder._begin_binding_block()
        self._builder.emit(local_call(step, self._atoms, stand_ins))
        bindings = list(self._builder._end_block().bindings)
        numbers = {var: number for number, var in enumerate([*stand_ins, *(binding.var for binding in bindings)])}
        infos = tensor_infos(bindings[-1].var.struct_info)
        for form, info in zip(outputs_of(step), infos, strict=True):
            check_tile(form, info, self._atoms)
        return tuple(_tile_call(op_call(binding.value), numbers) for binding in bindings)


def _particulars(step: Step) -> tuple:
    """All of a step that its calls depend on, but for the layouts of its operands and results."""
    if isinstance(step, Run):
        return step.node.call.kind
    if isinstance(step, Change):
        return step.move.kind, step.move.axes
    return (step.dims, step.op) if isinstance(step, Fill) else ()


def _tile_call(call: OpCall, numbers: dict[relax.Var, int]) -> TileCall:
    operands = tuple([numbers[arg] if isinstance(arg, relax.Var) else arg for arg in _tensors(call.expr.args)])
    return TileCall(call, operands, count_flops(call))


def _tensors(args: Iterable[relax.Expr]) -> Iterator[relax.Expr]:
    """The tensors among the arguments, tuples flattened."""
    for arg in args:
        if isinstance(arg, relax.Tuple):
            yield from _tensors(arg.fields)
        elif isinstance(arg.struct_info, relax.TensorStructInfo):
            yield arg
