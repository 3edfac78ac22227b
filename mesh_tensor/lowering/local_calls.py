"""What every step of an ExplicitGraph is on tiles: as a Relax expression, and as calls on numbered tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import Recent
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.atoms import Atoms, made_plain, plain_sharding
from mesh_tensor.plan.propagate import Cast, Change, Fill, Form, Run, Step
from mesh_tensor.rules.operator import LocalCall
from mesh_tensor.rules.operator.call import OpCall, op_call, tensor_infos
from mesh_tensor.rules.operator.cost import count_flops


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
