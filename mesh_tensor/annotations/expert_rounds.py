"""One round of `mt.experts`: rows to the devices of their experts, what these make of them, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import ir, relax

from mesh_tensor.base.dtypes import NARROW

from . import comm

if TYPE_CHECKING:
    from .experts import Way

op = relax.op
Emit = Callable[[relax.Expr], relax.Var]
INT = "int64"


@dataclass(frozen=True)
class Run:
    """What experts run on rows, and on gradients of results if there are any: their body, or what gives gradients,
    summed for these weights over all rounds."""

    body: ir.GlobalVar
    summed: tuple[int, ...] | None = None

    def __call__(
        self, emit: Emit, rows: Sequence[relax.Var], ends: relax.Var, weights: Sequence[relax.Var]
    ) -> list[relax.Var]:
        """Rows, and what is summed."""
        first, *others = rows
        made = emit(relax.Call(self.body, [first, ends, *weights, *others]))
        if self.summed is None:
            return [made]
        gradients = emit(relax.TupleGetItem(made, 1))
        return [emit(relax.TupleGetItem(gradients, n)) for n in range(1 + len(self.summed))]


@dataclass(frozen=True, eq=False)
class Carried:
    """What a round takes: its number, the rows of the fullest way, what was made so far: rows, and sums over rounds;
    what is sent, where rows go, how many go there before them, which expert of that device it is; weights."""

    sent: Sequence[relax.TensorStructInfo]
    weights: Sequence[relax.TensorStructInfo]
    made: Sequence[relax.TensorStructInfo]

    @property
    def infos(self) -> list[relax.TensorStructInfo]:
        """All of it."""
        number, each = relax.TensorStructInfo((), INT), relax.TensorStructInfo(sizes_of(self.sent[0])[:1], INT)
        return [number, number, *self.made, *self.sent, each, each, each, *self.weights]

    def apart(self, params: Sequence[relax.Var]) -> tuple[list[relax.Var], ...]:
        """Number and rows of the fullest way; what was made; what is sent; target, rank and expert; weights."""
        rest, counts = list(params), [2, len(self.made), len(self.sent), 3, len(self.weights)]
        return tuple([[rest.pop(0) for _ in range(count)] for count in counts])

    def ending(self, params: Sequence[relax.Var], alone: bool) -> relax.Expr:
        """What there is after the last round. `alone`: rows, and no tuple of them."""
        made = self.apart(params)[1]
        return made[0] if alone else relax.Tuple(made)


def on_one_device(
    b: relax.BlockBuilder, way: Way, run: Run, loop: ir.GlobalVar, carried: Carried, params: Sequence[relax.Var]
) -> relax.Expr:
    """Where the rows of a device go, and the rounds."""
    emit: Emit = b.emit
    sent, (chosen, *weights) = params[: len(carried.sent)], params[len(carried.sent) :]
    place = emit(op.astype(chosen, INT))
    held = relax.const(way.experts_of_device, INT)
    target = emit(op.floor_divide(place, held))
    local = emit(op.subtract(place, emit(op.multiply(target, held))))
    numbers = emit(op.arange(0, way.devices, 1, INT))
    goes = emit(op.astype(emit(op.equal(emit(op.expand_dims(target, 1)), numbers)), INT))
    so_far = emit(op.multiply(emit(op.cumsum(goes, 0)), goes))
    rank = emit(op.subtract(emit(op.sum(so_far, 1)), relax.const(1, INT)))
    fullest = emit(op.max(emit(op.sum(goes, 0))))
    fullest = emit(comm.all_reduce(fullest, way.everybody, "max"))
    blanks = [emit(op.zeros(info.shape, info.dtype)) for info in carried.made]
    made = emit(relax.Call(loop, [relax.const(0, INT), fullest, *blanks, *sent, target, rank, local, *weights]))
    if run.summed is None:
        return made
    rows, *sums = [emit(relax.TupleGetItem(made, n)) for n in range(1 + len(run.summed))]
    pairs = zip(sums, run.summed, strict=True)
    return emit(relax.Tuple([rows, *(emit(op.astype(one, weights[n].struct_info.dtype)) for one, n in pairs)]))


def expert_round(
    b: relax.BlockBuilder, way: Way, run: Run, loop: ir.GlobalVar, carried: Carried, params: Sequence[relax.Var]
) -> relax.Expr:
    """One round, and the next ones."""
    (number, fullest), (made, *sums), sent, (target, rank, local), weights = carried.apart(params)
    room = relax.const(way.room, INT)
    more = b.emit(op.less(b.emit(op.multiply(number, room)), fullest))
    b._begin_binding_block()
    goes, slot = _slots(b.emit, way, number, target, rank)
    answers, *parts = _answers(b.emit, way, run, slot, sent, local, weights)
    ndim = answers.struct_info.ndim
    there = b.emit(op.reshape(goes, (way.rows_of_device, *(1 for _ in range(ndim - 1)))))
    new = b.emit(op.where(there, b.emit(op.take(answers, slot, axis=0)), made))
    wide = [b.emit(op.astype(part, one.struct_info.dtype)) for part, one in zip(parts, sums, strict=True)]
    totals = [b.emit(op.add(one, part)) for one, part in zip(sums, wide, strict=True)]
    following = b.emit(op.add(number, relax.const(1, INT)))
    again = b.emit(relax.Call(loop, [following, fullest, new, *totals, *sent, target, rank, local, *weights]))
    block = b._end_block()
    ending = carried.ending(params, run.summed is None)
    return b.emit(relax.If(more, relax.SeqExpr([block], again), relax.SeqExpr([], ending)))


def _slots(emit: Emit, way: Way, number: relax.Var, target: relax.Var, rank: relax.Var) -> tuple[relax.Var, relax.Var]:
    """Which rows go in this round, and the places where they are sent from; that after the last, of all others."""
    room = relax.const(way.room, INT)
    goes = emit(op.equal(emit(op.floor_divide(rank, room)), number))
    first = emit(op.multiply(emit(op.subtract(target, number)), room))
    slot = emit(op.where(goes, emit(op.add(first, rank)), relax.const(way.devices * way.room, INT)))
    return goes, slot


def _answers(
    emit: Emit,
    way: Way,
    run: Run,
    slot: relax.Var,
    rows: Sequence[relax.Var],
    local: relax.Var,
    weights: Sequence[relax.Var],
) -> list[relax.Var]:
    """What came back for every place, and 0 after them; and what experts here add to sums."""
    places, held = way.devices * way.room, way.experts_of_device
    there = emit(op.reshape(slot, (way.rows_of_device, 1)))

    def sent(values: relax.Var, blank: Any) -> relax.Var:
        info = values.struct_info
        empty = op.full((places + 1, *sizes_of(info)[1:]), relax.const(blank, INT), info.dtype)
        put = emit(op.scatter_nd(emit(empty), there, values, "update"))
        full = emit(op.strided_slice(put, [0], [0], [places]))
        return emit(comm.all_to_all(full, way.group, 0, 0))

    mine, whose = [sent(one, 0) for one in rows], sent(local, held)
    order = emit(op.argsort(whose, 0, False, INT))
    experts_here = emit(op.reshape(emit(op.arange(0, held, 1, INT)), (held, 1)))
    before = emit(op.astype(emit(op.less_equal(whose, experts_here)), "int32"))
    ends = emit(op.sum(before, 1))
    ran, *parts = run(emit, [emit(op.take(one, order, axis=0)) for one in mine], ends, weights)
    back = emit(op.take(ran, emit(op.argsort(order, 0, False, INT)), axis=0))
    back = emit(comm.all_to_all(back, way.group, 0, 0))
    info = back.struct_info
    return [emit(op.concat([back, emit(op.zeros((1, *sizes_of(info)[1:]), info.dtype))], 0)), *parts]


def function_of(write: Callable[..., relax.Expr], infos: Sequence[relax.TensorStructInfo]) -> relax.Function:
    builder, params = relax.BlockBuilder(), [relax.Var(f"p{n}", info) for n, info in enumerate(infos)]
    with builder.function("made", params, private=True):
        builder.emit_func_output(write(builder, *params))
    return builder.get()["made"]


def widened(info: relax.TensorStructInfo) -> relax.TensorStructInfo:
    """The type in which such tensors are summed."""
    return relax.TensorStructInfo(info.shape, "float32" if info.dtype in NARROW else info.dtype)


def tile_of(info: relax.TensorStructInfo, count: int) -> relax.TensorStructInfo:
    first, *rest = sizes_of(info)
    return relax.TensorStructInfo((first // count, *rest), info.dtype)


def is_known(info: relax.TensorStructInfo, *, first: bool) -> bool:
    """Whether all sizes are known; also that of the first dim, or of all others."""
    return isinstance(info.shape, relax.ShapeExpr) and all(
        hasattr(size, "value") for size in info.shape.values[0 if first else 1 :]
    )


def sizes_of(info: relax.TensorStructInfo) -> tuple[int, ...]:
    return tuple(int(size) if hasattr(size, "value") else -1 for size in info.shape.values)
