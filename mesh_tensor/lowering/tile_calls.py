"""TileCalls: the steps of an ExplicitGraph as calls on numbered tiles; alike steps, as those of a model's layers, share
theirs.

A step is known by its operator and by how its operands and results lie. What it is on tiles, what TVM infers of that
and whether the rule agrees is found out once, on stand-ins for the operands' tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax

from mesh_tensor.plan.atoms import Atoms
from mesh_tensor.plan.explicit import Change, Fill, Form, Run, Step
from mesh_tensor.rules.operator.call import OpCall, op_call, tensor_infos
from mesh_tensor.rules.operator.cost import count_flops

from .local_calls import check_tile, inputs_of, local_call, outputs_of, tile_info

# An argument: the number of a tile, a tuple's fields, or what is the same in all alike steps.
Argument: TypeAlias = "int | tuple[Argument, ...] | relax.Expr"


@dataclass(frozen=True, eq=False)
class TileCall:
    """One call on tiles. Tiles are numbered within the step: its operands' first, then what its calls give, in order.

    `call` is on stand-ins for tiles. `operands`: the tensors among the arguments, tuples flattened, each by its number
    or as a constant of the operator's own."""

    call: OpCall
    arguments: tuple[Argument, ...]
    operands: tuple[int | relax.Constant, ...]
    flops: int

    @property
    def info(self) -> relax.StructInfo:
        """The struct info of what it gives."""
        return self.call.expr.struct_info

    def on(self, tiles: Sequence[relax.Expr]) -> relax.Call:
        """The call on these tiles."""
        expr = self.call.expr
        made = relax.Call(expr.op, [_filled(arg, tiles) for arg in self.arguments], expr.attrs, expr.sinfo_args)
        relax.expr._update_struct_info(made, expr.struct_info)
        return made


class TileCalls:
    """The calls of all steps of a plan, and the struct infos of its tiles."""

    def __init__(self, atoms: Atoms) -> None:
        self._atoms = atoms
        self._builder = relax.BlockBuilder()
        self._infos: dict[tuple, relax.TensorStructInfo] = {}
        self._of: dict[Step, tuple[TileCall, ...]] = {}
        self._known: dict[tuple, tuple[TileCall, ...]] = {}

    def of(self, step: Step) -> tuple[TileCall, ...]:
        """The calls that a step, which runs no kernel, is made of; the last one gives its results.

        Raises:
            MeshTensorError: TVM infers another tile than was decided.
        """
        if step not in self._of:
            layouts = tuple(self._layout(form) for form in (*inputs_of(step), *outputs_of(step)))
            key = (type(step), _particulars(step), layouts)
            calls = self._known.get(key)
            if calls is None:
                calls = self._known[key] = self._make(step)
            self._of[step] = calls
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
    arguments = tuple(_numbered(arg, numbers) for arg in call.expr.args)
    return TileCall(call, arguments, tuple(o for arg in arguments for o in _tensors(arg)), count_flops(call))


def _numbered(arg: relax.Expr, numbers: dict[relax.Var, int]) -> Argument:
    if isinstance(arg, relax.Tuple):
        return tuple(_numbered(field, numbers) for field in arg.fields)
    return numbers[arg] if isinstance(arg, relax.Var) else arg


def _filled(arg: Argument, tiles: Sequence[relax.Expr]) -> relax.Expr:
    if isinstance(arg, int):
        return tiles[arg]
    return relax.Tuple([_filled(field, tiles) for field in arg]) if isinstance(arg, tuple) else arg


def _tensors(arg: Argument) -> list[int | relax.Constant]:
    if isinstance(arg, tuple):
        return [operand for field in arg for operand in _tensors(field)]
    is_tensor = isinstance(arg, int) or isinstance(arg.struct_info, relax.TensorStructInfo)
    return [arg] if is_tensor else []
