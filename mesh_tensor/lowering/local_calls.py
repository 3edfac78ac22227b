"""What every step of an ExplicitGraph is on tiles: as a Relax expression, and as calls on numbered tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import Recent
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.atoms import Atoms, made_plain, plain_sharding
from mesh_tensor.plan.explicit import Cast, Change, ExplicitStep, Fill, Form, Run
from mesh_tensor.rules.operator import LocalCall
from mesh_tensor.rules.operator.call import OpCall, op_call, packed, tensor_infos, tensors_in
from mesh_tensor.rules.operator.cost import count_flops


def tile_shape(form: Form, atoms: Atoms) -> tuple[int, ...]:
    """The shape that every device allocates for a form, with the value's own dims."""
    return atoms.merge(form.value, form.sharding.tile_shape(atoms.shape(form.value)))


def tile_info(form: Form, atoms: Atoms) -> relax.TensorStructInfo:
    """The struct info of a form's tile."""
    return relax.TensorStructInfo(tile_shape(form, atoms), form.dtype)


def check_tile(form: Form, info: relax.StructInfo, atoms: Atoms) -> None:
    """TVM infers the tile that was decided: an operator and its rule agree."""
    expected = tile_info(form, atoms)
    if not tvm.ir.structural_equal(info, expected):
        refuse(
            f"the tile of {form.name!r} is {expected}, but TVM infers {info}",
            why="the operator's sharding rule and the operator disagree",
            fix="report it as a bug of mesh_tensor; replicate the value meanwhile",
        )


def _run(step: Run, atoms: Atoms, tiles: Sequence[relax.Expr]) -> relax.Expr:
    node, rule = step.node, atoms.rules[step.node].rule
    local = LocalCall(
        node.call,
        tuple(tiles),
        tuple(tile_shape(form, atoms) for form in step.inputs),
        tuple(tile_shape(form, atoms) for form in step.outputs),
        tuple(_contiguous(form, atoms) for form in step.inputs),
        wide=any(form.dtype != form.value.type.dtype for form in step.outputs),
        out_layouts=tuple(_contiguous(form, atoms) for form in step.outputs),
        out_dtypes=tuple(form.dtype for form in step.outputs),
    )
    return rule.localize(local) if rule.localize else local.again()


def _cast(step: Cast, atoms: Atoms, tiles: Sequence[relax.Expr]) -> relax.Expr:
    return relax.op.astype(tiles[0], step.dst.dtype)


def _fill(step: Fill, atoms: Atoms, tiles: Sequence[relax.Expr]) -> relax.Expr:
    args = [*_lying(step.src, atoms), relax.ShapeExpr(step.dims), relax.StringImm(step.op)]
    return packed("mesh.fill_padding", [*tiles, *args], tile_info(step.dst, atoms))


def _change(step: Change, atoms: Atoms, tiles: Sequence[relax.Expr]) -> relax.Expr:
    after = [relax.StringImm(step.dst.sharding.text()), relax.StringImm(", ".join(step.move.axes))]
    return packed(f"mesh.{step.move.kind}", [*tiles, *_lying(step.src, atoms), *after], tile_info(step.dst, atoms))


def _lying(form: Form, atoms: Atoms) -> list[relax.Expr]:
    """Which shape a form has, and how it lies."""
    return [relax.ShapeExpr(atoms.shape(form.value)), relax.StringImm(form.sharding.text())]


_CALLS: dict[type, Callable[[Any, Atoms, Sequence[relax.Expr]], relax.Expr]] = {
    Run: _run,
    Cast: _cast,
    Fill: _fill,
    Change: _change,
}


def _contiguous(form: Form, atoms: Atoms) -> Sharding:
    """How the form's own dims are split, of those that are split in contiguous tiles; the others count as whole."""
    dims = atoms.of[form.value]
    layout = plain_sharding(made_plain(atoms.on_device(form.value, form.sharding), dims), dims)
    assert layout is not None
    return layout


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
        self._of: dict[ExplicitStep, tuple[TileCall, ...]] = {}

    def of(self, step: ExplicitStep) -> tuple[TileCall, ...]:
        """The calls that a step, which runs no kernel, is made of; the last one gives its results. Refused where TVM
        infers another tile than was decided."""
        if step not in self._of:
            layouts = tuple(self._layout(form) for form in (*step.inputs, *step.outputs))
            key = (type(step), step.kind, layouts)
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

    def _make(self, step: ExplicitStep) -> tuple[TileCall, ...]:
        stand_ins = [relax.Var(f"tile{i}", self.info(form)) for i, form in enumerate(step.inputs)]
        self._builder._begin_binding_block()
        self._builder.emit(_CALLS[type(step)](step, self._atoms, stand_ins))
        bindings = list(self._builder._end_block().bindings)
        numbers = {var: number for number, var in enumerate([*stand_ins, *(binding.var for binding in bindings)])}
        infos = tensor_infos(bindings[-1].var.struct_info)
        for form, info in zip(step.outputs, infos, strict=True):
            check_tile(form, info, self._atoms)
        return tuple(_tile_call(op_call(binding.value), numbers) for binding in bindings)


def _tile_call(call: OpCall, numbers: dict[relax.Var, int]) -> TileCall:
    operands = tuple([numbers[arg] if isinstance(arg, relax.Var) else arg for arg in tensors_in(call.expr.args)])
    return TileCall(call, operands, count_flops(call))
