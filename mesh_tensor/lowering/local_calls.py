"""What every step of an ExplicitGraph is as a Relax expression on tiles."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.atoms import Atoms, made_plain, plain_sharding
from mesh_tensor.plan.explicit import Cast, Fill, Form, Run, Step
from mesh_tensor.rules.operator import LocalCall


def tile_shape(form: Form, atoms: Atoms) -> tuple[int, ...]:
    """The shape that every device allocates for a form, with the value's own dims."""
    return atoms.merge(form.value, form.sharding.tile_shape(atoms.shape(form.value)))


def tile_info(form: Form, atoms: Atoms) -> relax.TensorStructInfo:
    """The struct info of a form's tile."""
    return relax.TensorStructInfo(tile_shape(form, atoms), form.dtype)


def local_call(step: Step, atoms: Atoms, tiles: Sequence[relax.Expr]) -> relax.Expr:
    """The expression that makes the step's results of its operands' tiles, given in order."""
    if isinstance(step, Run):
        return _run(step, atoms, tiles)
    (tile,) = tiles
    if isinstance(step, Cast):
        return relax.op.astype(tile, step.dst.dtype)
    refined = relax.ShapeExpr(atoms.shape(step.src.value))
    layout = relax.StringImm(step.src.sharding.text())
    if isinstance(step, Fill):
        args = [refined, layout, relax.ShapeExpr(step.dims), relax.StringImm(step.op)]
        return packed("mesh.fill_padding", [tile, *args], tile_info(step.dst, atoms))
    args = [refined, layout, relax.StringImm(step.dst.sharding.text()), relax.StringImm(", ".join(step.move.axes))]
    return packed(f"mesh.{step.move.kind}", [tile, *args], tile_info(step.dst, atoms))


def check_tile(form: Form, info: relax.StructInfo, atoms: Atoms) -> None:
    """TVM infers the tile that was decided: an operator and its rule agree."""
    expected = tile_info(form, atoms)
    if not tvm.ir.structural_equal(info, expected):
        refuse(
            f"the tile of {form.name!r} is {expected}, but TVM infers {info}",
            why="the operator's sharding rule and the operator disagree",
            fix="report it as a bug of mesh_tensor; replicate the value meanwhile",
        )


def packed(name: str, args: list[relax.Expr], info: relax.StructInfo) -> relax.Call:
    """A call of a registered function that has no side effects."""
    return relax.op.call_pure_packed(name, *args, sinfo_args=[info])


def outputs_of(step: Step) -> tuple[Form, ...]:
    """The forms that a step makes."""
    return step.outputs if isinstance(step, Run) else (step.dst,)


def inputs_of(step: Step) -> tuple[Form, ...]:
    """The forms that a step takes."""
    return step.inputs if isinstance(step, Run) else (step.src,)


def scopes_of(step: Step) -> tuple:
    """The calls that a step stands in."""
    return step.node.scopes if isinstance(step, Run) else step.scopes


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


def _contiguous(form: Form, atoms: Atoms) -> Sharding:
    """How the form's own dims are split, of those that are split in contiguous tiles; the others count as whole."""
    dims = atoms.of[form.value]
    layout = plain_sharding(made_plain(atoms.on_device(form.value, form.sharding), dims), dims)
    assert layout is not None
    return layout
