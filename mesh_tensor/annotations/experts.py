"""Rows that go to the devices of their experts and back, none dropped: a manual computation with a loop in it.

How many rows every expert gets is known when it runs; shapes are known before. So rows go in rounds: in each one, every
device sends at most `room` rows to each other one, and there are as many rounds as the fullest way takes. With rows
that are spread evenly that is one; if all rows of all devices go to one expert, it is rows / room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, relax, tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh

from .expert_rounds import Carried, Run, expert_round, function_of, is_known, on_one_device, sizes_of, tile_of, widened
from .manual import Experts, Manual, manual_call

op = relax.op
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
    """A mixture-of-experts layer with expert parallelism, as a call that the builder binds: each row is processed by
    the expert that it chose. Experts are split over `axes`, rows over `axes` and `tokens`; all-to-alls bring rows to
    their experts and back, and no row is dropped.

    Args:
        builder: a BlockBuilder, to whose module functions are added.
        body: the function of the experts on one device. It takes rows (r, ...) sorted by expert, with r symbolic; the
            ends of the experts' groups of rows, int32 (experts on the device,); and the device's tile of each weight.
            It returns (r, ...), row by row. Rows after the last end are 0, and their results are not used.
            `R.call_pure_packed("mesh.grouped_matmul", rows, w, ends)` multiplies groups by matrices (experts, in, out).
        rows: (T, ...), of known sizes.
        chosen: integers (T,): the expert of each row. Rows with another number get 0 as their result.
        weights: tensors (experts, ...).
        mesh: the mesh.
        axes: the axes that split the experts; None: all that are not in `tokens`.
        tokens: further axes that split the rows.
        room: the number of rows that one device sends to another in a round; None: 1.25 x an even distribution.

    Raises:
        MeshTensorError: sizes are not known, axes do not divide rows or experts or are given twice, or the body is not
            for what devices have.
    """
    way = Way.of(body, rows, chosen, weights, Mesh(mesh), axes, tuple(tokens), room)
    _check_body(body, way, [tile_of(info, count) for info, count in zip(way.infos, way.counts, strict=True)])
    return way.call(builder, Run(body), [rows], chosen, weights)


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
    way = Way(stated.axes, said.axes, tokens, infos, tile_of(rows.struct_info, 1), said.room)
    return way.call(builder, Run(backward, tuple(wanted)), [rows, gradient], chosen, weights)


@dataclass(frozen=True)
class Way:
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
    ) -> Way:
        """What these say."""
        split = mesh.in_order([axis for axis in mesh if axis not in tokens] if axes is None else axes)
        given = [arg if arg.struct_info_ is not None else relax.BlockBuilder().normalize(arg) for arg in (rows, chosen)]
        infos = tuple([arg.struct_info for arg in (*given, *weights)])
        made = Way(mesh, split, tokens, infos, body.struct_info.ret, 0)
        made.check(body.name_hint)
        even = made.rows_of_device * _SLACK / math.prod(map(mesh.size, split))
        room = max(1, min(math.ceil(even), made.rows_of_device)) if room is None else room
        if not isinstance(room, int) or room < 1:
            refuse(f"room is {room}, no number of rows to send", where="mt.experts", fix="state at least 1 row")
        return Way(mesh, split, tokens, infos, body.struct_info.ret, room)

    def check(self, name: str) -> None:
        """Refuse what has no known sizes, or does not fit."""
        problems = [
            f"operand {n} is {info}" if n < len(self.infos) else f"the result is {info}"
            for n, info in enumerate((*self.infos, self.result))
            if not isinstance(info, relax.TensorStructInfo) or not is_known(info, first=n < len(self.infos))
        ]
        problems += [f"axis {axis!r} is one of experts and of tokens" for axis in self.tokens if axis in self.axes]
        problems += [] if self.axes else ["experts are split over no axis"]
        problems = problems or [
            f"dim 0 of operand {n} has {sizes_of(info)[0]} elements, for {count} devices"
            for n, (info, count) in enumerate(zip(self.infos, self.counts, strict=True))
            if not info.ndim or not sizes_of(info)[0] or sizes_of(info)[0] % count
        ]
        if not problems and len({sizes_of(info)[0] for info in self.infos[2:]}) != 1:
            problems.append("weights have other numbers of experts, or there are none")
        rows, choices = self.infos[:2]
        if not problems and (sizes_of(rows)[:1] != sizes_of(choices) or "int" not in choices.dtype):
            problems.append(f"choices are {choices}, not one whole number for each row of {rows}")
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
        return sizes_of(self.infos[0])[0] // self.counts[0]

    @property
    def experts_of_device(self) -> int:
        return sizes_of(self.infos[2])[0] // self.devices

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
        run: Run,
        sent: Sequence[relax.Expr],
        chosen: relax.Expr,
        weights: Sequence[relax.Expr],
    ) -> relax.Call:
        """The manual computation that runs this on rows that are sent, with functions that are added to a builder."""
        both, summed = (*self.axes, *self.tokens), run.summed
        counts = [self.counts[0]] * (len(sent) + 1) + [self.devices] * len(weights)
        infos = [operand.struct_info for operand in (*sent, chosen, *weights)]
        tiles = [tile_of(info, count) for info, count in zip(infos, counts, strict=True)]
        made = relax.TensorStructInfo((self.rows_of_device, *sizes_of(self.result)[1:]), self.result.dtype)
        sums = [widened(tiles[len(sent) + 1 + n]) for n in summed or ()]
        carried = Carried(tiles[: len(sent)], tiles[len(sent) + 1 :], [made, *sums])
        ending = lambda _, *params: carried.ending(params, summed is None)  # noqa: E731
        loop = builder.add_func(function_of(ending, carried.infos), "experts_round")
        step = lambda b, *params: expert_round(b, self, run, loop, carried, params)  # noqa: E731
        builder.update_func(loop, function_of(step, carried.infos))
        on_device = lambda b, *params: on_one_device(b, self, run, loop, carried, params)  # noqa: E731
        called = builder.add_func(function_of(on_device, tiles), "experts_on_device")
        rows, split = dict.fromkeys(both, 0), dict.fromkeys(self.axes, 0)
        layouts = [*[rows] * (len(sent) + 1), *[split] * len(weights)]
        total = {"sharding": split, "partial": dict.fromkeys(self.tokens, "sum")}
        results = rows if summed is None else [rows, *[total] * len(summed)]
        operands = [*sent, chosen, *weights]
        said = Experts(str(run.body.name_hint), self.axes, self.room) if summed is None else None
        return manual_call(called, operands, self.mesh, layouts, results, both, said)


def _check_body(body: ir.GlobalVar, way: Way, tiles: Sequence[relax.TensorStructInfo]) -> None:
    """Refuse a body that is not for the rows and experts of a device, or does not give one row for each."""
    shapes = [(way.devices * way.room, *sizes_of(tiles[0])[1:]), (way.experts_of_device,), *map(sizes_of, tiles[2:])]
    given = list(zip(shapes, [tiles[0].dtype, "int32", *(info.dtype for info in tiles[2:])], strict=True))
    infos, symbols = list(body.struct_info.params or ()), dict[tirx.Var, int]()
    problems = [] if len(infos) == len(given) else [f"it has {len(infos)} parameters, not {len(given)}"]
    for n, (info, (shape, dtype)) in enumerate(zip(infos, given, strict=False)):
        sizes = info.shape.values if isinstance(info, relax.TensorStructInfo) and info.shape is not None else ()
        fits = len(sizes) == len(shape) and info.dtype == dtype
        if not fits or any(_bound(one, size, symbols) != size for one, size in zip(sizes, shape, strict=True)):
            problems.append(f"parameter {n} is {info}, of what is {dtype}{list(shape)} on a device")
    if not problems and (
        not way.result.ndim or not ir.structural_equal(way.result.shape.values[0], infos[0].shape.values[0])
    ):
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
