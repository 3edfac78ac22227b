"""Rows that go to the devices of their experts and back, none dropped: a manual computation with a loop in it.

How many rows every expert gets is known when it runs; shapes are known before. So rows go in rounds: in each one, every
device sends at most `room` rows to each other one, and there are as many rounds as the fullest way takes. With rows
that are spread evenly that is one; if all rows of all devices go to one expert, it is rows / room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, tirx

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh

from . import comm
from .manual import Experts, Manual, manual_call

op = relax.op
Emit = Callable[[relax.Expr], relax.Var]
_INT = "int64"
_SLACK = 1.25  # of the rows that go one way, over those of an even spread


def experts(
    builder: relax.BlockBuilder,
    body: ir.GlobalVar,
    rows: relax.Expr,
    chosen: relax.Expr,
    weights: Sequence[relax.Expr],
    mesh: Mesh | Mapping[str, int],
    *,
    axes: Iterable[str] | None = None,
    tokens: Iterable[str] = (),
    room: int | None = None,
) -> relax.Call:
    """What experts make of rows, each of the expert that it chose, to be bound by the builder. Experts are split over
    `axes`, rows over these and `tokens`; rows go to their experts and back by all-to-alls, and none is dropped.

    Args:
        builder: a BlockBuilder, to whose module functions are added.
        body: the function of one device's experts: of rows (r, ...) sorted by expert, as many as a symbol says, the
            ends (experts, int32) of their groups, and the device's part of each weight; it gives (r, ...), row by row.
            Rows after the last end are 0, and what is made of them is not used.
            `R.call_pure_packed("mesh.grouped_matmul", rows, w, ends)` multiplies groups by matrices (experts, in, out).
        rows: (T, ...), of known sizes.
        chosen: (T,), the expert of each row: a whole number; rows of which it is none are 0 in the result.
        weights: (experts, ...) each.
        mesh: the mesh.
        axes: those over which experts are split; all that are not in `tokens`, by default.
        tokens: further axes that split rows.
        room: how many rows one device sends to another in a round: 1.25 x an even spread, by default.

    Raises:
        MeshTensorError: sizes are not known, axes do not divide rows or experts or are given twice, or the body is not
            for what devices have.
    """
    way = _Way.of(body, rows, chosen, weights, Mesh(mesh), axes, tuple(tokens), room)
    _check_body(body, way, [_tile(info, count) for info, count in zip(way.infos, way.counts, strict=True)])
    return way.call(builder, _Run(body), [rows], chosen, weights)


def experts_backward(
    builder: relax.BlockBuilder,
    backward: ir.GlobalVar,
    stated: Manual,
    operands: Sequence[relax.Expr],
    gradient: relax.Expr,
    wanted: Sequence[int],
) -> relax.Call:
    """The gradients of rows, and of the weights `wanted`, by their numbers, of that of what `mt.experts` made of
    `operands`: rows go to their experts once more, with their gradients.

    Args:
        builder: has the module's functions, and gets those of this.
        backward: the function of one device's experts: of what theirs is of, and the gradient of its result; it gives
            (result, (gradient of rows, gradients of weights)).
        stated: the manual computation.
    """
    rows, chosen, *weights = operands
    said = stated.experts
    assert said is not None
    tokens = tuple([axis for axis in stated.axes if axis not in said.axes])
    infos = tuple([operand.struct_info for operand in operands])
    way = _Way(stated.axes, said.axes, tokens, infos, _tile(rows.struct_info, 1), said.room)
    return way.call(builder, _Run(backward, tuple(wanted)), [rows, gradient], chosen, weights)


@dataclass(frozen=True)
class _Run:
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


@dataclass(frozen=True)
class _Way:
    """How rows go: over the axes of experts, and those of tokens alone. `infos`: of rows, choices and weights;
    `result`: of one device's body."""

    mesh: Mesh
    axes: tuple[str, ...]
    tokens: tuple[str, ...]
    infos: tuple[relax.TensorStructInfo, ...]
    result: relax.TensorStructInfo
    room: int

    @staticmethod
    def of(
        body: ir.GlobalVar,
        rows: relax.Expr,
        chosen: relax.Expr,
        weights: Sequence[relax.Expr],
        mesh: Mesh,
        axes: Iterable[str] | None,
        tokens: tuple[str, ...],
        room: int | None,
    ) -> _Way:
        """What these say."""
        split = mesh.in_order([axis for axis in mesh if axis not in tokens] if axes is None else axes)
        given = [arg if arg.struct_info_ is not None else relax.BlockBuilder().normalize(arg) for arg in (rows, chosen)]
        infos = tuple([arg.struct_info for arg in (*given, *weights)])
        made = _Way(mesh, split, tokens, infos, body.struct_info.ret, 0)
        made.check(body.name_hint)
        even = made.rows_of_device * _SLACK / math.prod(map(mesh.size, split))
        room = max(1, min(math.ceil(even), made.rows_of_device)) if room is None else room
        if not isinstance(room, int) or room < 1:
            refuse(f"room is {room}, no number of rows to send", where="mt.experts", fix="state at least 1 row")
        return _Way(mesh, split, tokens, infos, body.struct_info.ret, room)

    def check(self, name: str) -> None:
        """Refuse what has no known sizes, or does not fit."""
        problems = [
            f"operand {n} is {info}" if n < len(self.infos) else f"the result is {info}"
            for n, info in enumerate((*self.infos, self.result))
            if not isinstance(info, relax.TensorStructInfo) or not _known(info, first=n < len(self.infos))
        ]
        problems += [f"axis {axis!r} is one of experts and of tokens" for axis in self.tokens if axis in self.axes]
        problems += [] if self.axes else ["experts are split over no axis"]
        problems = problems or [
            f"dim 0 of operand {n} has {_sizes(info)[0]} elements, for {count} devices"
            for n, (info, count) in enumerate(zip(self.infos, self.counts, strict=True))
            if not info.ndim or not _sizes(info)[0] or _sizes(info)[0] % count
        ]
        if not problems and len({_sizes(info)[0] for info in self.infos[2:]}) != 1:
            problems.append("weights have other numbers of experts, or there are none")
        if not problems and (_sizes(self.infos[0])[:1] != _sizes(self.infos[1]) or "int" not in self.infos[1].dtype):
            problems.append(f"choices are {self.infos[1]}, not one whole number for each row of {self.infos[0]}")
        if problems:
            refuse(
                problems, where=f"mt.experts of {name!r}", fix="pad rows to a number that axes divide; fix the sizes"
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """The parts that each operand is in."""
        experts = math.prod(map(self.mesh.size, self.axes))
        rows = experts * math.prod(map(self.mesh.size, self.tokens))
        return (rows, rows, *(experts for _ in self.infos[2:]))

    @property
    def rows_of_device(self) -> int:
        return _sizes(self.infos[0])[0] // self.counts[0]

    @property
    def experts_of_device(self) -> int:
        return _sizes(self.infos[2])[0] // self.devices

    @property
    def devices(self) -> int:
        """Those that experts are split over."""
        return math.prod(map(self.mesh.size, self.axes))

    @property
    def group(self) -> Mesh:
        """Those that exchange rows."""
        return Mesh({axis: self.mesh.size(axis) for axis in self.axes})

    @property
    def everybody(self) -> Mesh:
        """Those that go on together."""
        both = {*self.axes, *self.tokens}
        return Mesh({axis: self.mesh.size(axis) for axis in self.mesh if axis in both})

    def call(
        self,
        builder: relax.BlockBuilder,
        run: _Run,
        sent: Sequence[relax.Expr],
        chosen: relax.Expr,
        weights: Sequence[relax.Expr],
    ) -> relax.Call:
        """The manual computation that runs this on rows that are sent, with functions that are added to a builder."""
        both, summed = (*self.axes, *self.tokens), run.summed
        counts = [self.counts[0]] * (len(sent) + 1) + [self.devices] * len(weights)
        infos = [operand.struct_info for operand in (*sent, chosen, *weights)]
        tiles = [_tile(info, count) for info, count in zip(infos, counts, strict=True)]
        made = relax.TensorStructInfo((self.rows_of_device, *_sizes(self.result)[1:]), self.result.dtype)
        sums = [_wide(tiles[len(sent) + 1 + n]) for n in summed or ()]
        carried = _Carried(tiles[: len(sent)], tiles[len(sent) + 1 :], [made, *sums])
        ending = lambda _, *params: carried.ending(params, summed is None)  # noqa: E731
        loop = builder.add_func(_function(ending, carried.infos), "experts_round")
        step = lambda b, *params: _round(b, self, run, loop, carried, params)  # noqa: E731
        builder.update_func(loop, _function(step, carried.infos))
        on_device = lambda b, *params: _on_device(b, self, run, loop, carried, params)  # noqa: E731
        called = builder.add_func(_function(on_device, tiles), "experts_on_device")
        rows, split = dict.fromkeys(both, 0), dict.fromkeys(self.axes, 0)
        layouts = [*[rows] * (len(sent) + 1), *[split] * len(weights)]
        total = {"sharding": split, "partial": dict.fromkeys(self.tokens, "sum")}
        results = rows if summed is None else [rows, *[total] * len(summed)]
        operands = [*sent, chosen, *weights]
        said = Experts(str(run.body.name_hint), self.axes, self.room) if summed is None else None
        return manual_call(called, operands, self.mesh, layouts, results, both, said)


def _check_body(body: ir.GlobalVar, way: _Way, tiles: Sequence[relax.TensorStructInfo]) -> None:
    """Refuse a body that is not for the rows and experts of a device, or does not give one row for each."""
    shapes = [(way.devices * way.room, *_sizes(tiles[0])[1:]), (way.experts_of_device,), *map(_sizes, tiles[2:])]
    given = list(zip(shapes, [tiles[0].dtype, "int32", *(info.dtype for info in tiles[2:])], strict=True))
    infos, symbols = list(body.struct_info.params or ()), dict[tirx.Var, int]()
    problems = [] if len(infos) == len(given) else [f"it has {len(infos)} parameters, not {len(given)}"]
    for n, (info, (shape, dtype)) in enumerate(zip(infos, given, strict=False)):
        sizes = info.shape.values if isinstance(info, relax.TensorStructInfo) and info.shape is not None else ()
        fits = len(sizes) == len(shape) and info.dtype == dtype
        if not fits or any(_bound(one, size, symbols) != size for one, size in zip(sizes, shape, strict=True)):
            problems.append(f"parameter {n} is {info}, of what is {dtype}{list(shape)} on a device")
    if not problems and (not way.result.ndim or not _same(way.result, infos[0])):
        problems.append(f"it gives {way.result} for rows {infos[0]}")
    if problems:
        refuse(
            problems,
            where=f"mt.experts of {body.name_hint!r}",
            fix="take rows (r, ...) of a symbol r, the ends (experts, int32) and parts of weights; give (r, ...)",
        )


def _bound(one: tirx.PrimExpr, size: int, symbols: dict[tirx.Var, int]) -> int | None:
    """What a size of the body's is: its value, or what its symbol stands for, which this size gives it at first."""
    if isinstance(one, tirx.IntImm):
        return int(one)
    return symbols.setdefault(one, size) if isinstance(one, tirx.Var) else None


def _same(made: relax.TensorStructInfo, rows: relax.TensorStructInfo) -> bool:
    """Whether there are as many of both."""
    return bool(ir.structural_equal(made.shape.values[0], rows.shape.values[0]))


@dataclass(frozen=True, eq=False)
class _Carried:
    """What a round takes: its number, the rows of the fullest way, what was made so far: rows, and sums over rounds;
    what is sent, where rows go, how many go there before them, which expert of that device it is; weights."""

    sent: Sequence[relax.TensorStructInfo]
    weights: Sequence[relax.TensorStructInfo]
    made: Sequence[relax.TensorStructInfo]

    @property
    def infos(self) -> list[relax.TensorStructInfo]:
        """All of it."""
        number, each = relax.TensorStructInfo((), _INT), relax.TensorStructInfo(_sizes(self.sent[0])[:1], _INT)
        return [number, number, *self.made, *self.sent, each, each, each, *self.weights]

    def apart(self, params: Sequence[relax.Var]) -> tuple[list[relax.Var], ...]:
        """Number and rows of the fullest way; what was made; what is sent; target, rank and expert; weights."""
        rest, counts = list(params), [2, len(self.made), len(self.sent), 3, len(self.weights)]
        return tuple([[rest.pop(0) for _ in range(count)] for count in counts])

    def ending(self, params: Sequence[relax.Var], alone: bool) -> relax.Expr:
        """What there is after the last round. `alone`: rows, and no tuple of them."""
        made = self.apart(params)[1]
        return made[0] if alone else relax.Tuple(made)


def _on_device(
    b: relax.BlockBuilder, way: _Way, run: _Run, loop: ir.GlobalVar, carried: _Carried, params: Sequence[relax.Var]
) -> relax.Expr:
    """Where the rows of a device go, and the rounds."""
    emit: Emit = b.emit
    sent, (chosen, *weights) = params[: len(carried.sent)], params[len(carried.sent) :]
    place = emit(op.astype(chosen, _INT))
    held = relax.const(way.experts_of_device, _INT)
    target = emit(op.floor_divide(place, held))
    local = emit(op.subtract(place, emit(op.multiply(target, held))))
    numbers = emit(op.arange(0, way.devices, 1, _INT))
    goes = emit(op.astype(emit(op.equal(emit(op.expand_dims(target, 1)), numbers)), _INT))
    so_far = emit(op.multiply(emit(op.cumsum(goes, 0)), goes))
    rank = emit(op.subtract(emit(op.sum(so_far, 1)), relax.const(1, _INT)))
    fullest = emit(op.max(emit(op.sum(goes, 0))))
    fullest = emit(comm.all_reduce(fullest, way.everybody, "max"))
    blanks = [emit(op.zeros(info.shape, info.dtype)) for info in carried.made]
    made = emit(relax.Call(loop, [relax.const(0, _INT), fullest, *blanks, *sent, target, rank, local, *weights]))
    if run.summed is None:
        return made
    rows, *sums = [emit(relax.TupleGetItem(made, n)) for n in range(1 + len(run.summed))]
    pairs = zip(sums, run.summed, strict=True)
    return emit(relax.Tuple([rows, *(emit(op.astype(one, weights[n].struct_info.dtype)) for one, n in pairs)]))


def _round(
    b: relax.BlockBuilder, way: _Way, run: _Run, loop: ir.GlobalVar, carried: _Carried, params: Sequence[relax.Var]
) -> relax.Expr:
    """One round, and the next ones."""
    (number, fullest), (made, *sums), sent, (target, rank, local), weights = carried.apart(params)
    room = relax.const(way.room, _INT)
    more = b.emit(op.less(b.emit(op.multiply(number, room)), fullest))
    b._begin_binding_block()
    goes, slot = _slots(b.emit, way, number, target, rank)
    answers, *parts = _answers(b.emit, way, run, slot, sent, local, weights)
    ndim = answers.struct_info.ndim
    there = b.emit(op.reshape(goes, (way.rows_of_device, *(1 for _ in range(ndim - 1)))))
    new = b.emit(op.where(there, b.emit(op.take(answers, slot, axis=0)), made))
    wide = [b.emit(op.astype(part, one.struct_info.dtype)) for part, one in zip(parts, sums, strict=True)]
    totals = [b.emit(op.add(one, part)) for one, part in zip(sums, wide, strict=True)]
    following = b.emit(op.add(number, relax.const(1, _INT)))
    again = b.emit(relax.Call(loop, [following, fullest, new, *totals, *sent, target, rank, local, *weights]))
    block = b._end_block()
    ending = carried.ending(params, run.summed is None)
    return b.emit(relax.If(more, relax.SeqExpr([block], again), relax.SeqExpr([], ending)))


def _slots(emit: Emit, way: _Way, number: relax.Var, target: relax.Var, rank: relax.Var) -> tuple[relax.Var, relax.Var]:
    """Which rows go in this round, and the places where they are sent from; that after the last, of all others."""
    room = relax.const(way.room, _INT)
    goes = emit(op.equal(emit(op.floor_divide(rank, room)), number))
    first = emit(op.multiply(emit(op.subtract(target, number)), room))
    slot = emit(op.where(goes, emit(op.add(first, rank)), relax.const(way.devices * way.room, _INT)))
    return goes, slot


def _answers(
    emit: Emit,
    way: _Way,
    run: _Run,
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
        empty = op.full((places + 1, *_sizes(info)[1:]), relax.const(blank, _INT), info.dtype)
        put = emit(op.scatter_nd(emit(empty), there, values, "update"))
        full = emit(op.strided_slice(put, [0], [0], [places]))
        return emit(comm.all_to_all(full, way.group, 0, 0))

    mine, whose = [sent(one, 0) for one in rows], sent(local, held)
    order = emit(op.argsort(whose, 0, False, _INT))
    experts_here = emit(op.reshape(emit(op.arange(0, held, 1, _INT)), (held, 1)))
    before = emit(op.astype(emit(op.less_equal(whose, experts_here)), "int32"))
    ends = emit(op.sum(before, 1))
    ran, *parts = run(emit, [emit(op.take(one, order, axis=0)) for one in mine], ends, weights)
    back = emit(op.take(ran, emit(op.argsort(order, 0, False, _INT)), axis=0))
    back = emit(comm.all_to_all(back, way.group, 0, 0))
    info = back.struct_info
    return [emit(op.concat([back, emit(op.zeros((1, *_sizes(info)[1:]), info.dtype))], 0)), *parts]


def _function(write: Callable[..., relax.Expr], infos: Sequence[relax.TensorStructInfo]) -> relax.Function:
    builder, params = relax.BlockBuilder(), [relax.Var(f"p{n}", info) for n, info in enumerate(infos)]
    with builder.function("made", params, private=True):
        builder.emit_func_output(write(builder, *params))
    return builder.get()["made"]


def _wide(info: relax.TensorStructInfo) -> relax.TensorStructInfo:
    """The type in which such tensors are summed."""
    return relax.TensorStructInfo(info.shape, "float32" if info.dtype in NARROW else info.dtype)


def _tile(info: relax.TensorStructInfo, count: int) -> relax.TensorStructInfo:
    first, *rest = _sizes(info)
    return relax.TensorStructInfo((first // count, *rest), info.dtype)


def _known(info: relax.TensorStructInfo, *, first: bool) -> bool:
    """Whether all sizes are known; also that of the first dim, or of all others."""
    return isinstance(info.shape, relax.ShapeExpr) and all(
        hasattr(size, "value") for size in info.shape.values[0 if first else 1 :]
    )


def _sizes(info: relax.TensorStructInfo) -> tuple[int, ...]:
    return tuple(int(size) if hasattr(size, "value") else -1 for size in info.shape.values)
