"""Loops as functions that end by calling themselves, and the same steps one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax

# Of a builder, the count, what is carried, and what stays: what is carried next, and the rows that the step gives.
Step = Callable[[relax.BlockBuilder, relax.Expr, list[relax.Expr], list[relax.Expr]], tuple[list, list]]


@dataclass(frozen=True)
class Loop:
    """`carried` and `kept` are shapes; `rows` those of what steps give; all of float32."""

    carried: Sequence[tuple[int, ...]]
    kept: Sequence[tuple[int, ...]]
    rows: Sequence[tuple[int, ...]]
    step: Step


def looped(loop: Loop, steps: int, first: int = 0, *, by_data: bool = False) -> ir.IRModule:
    """main(carried, kept): what is carried in the end, and the rows, by a function that calls itself. `by_data`: the
    count begins with what is computed of data."""
    builder, infos = relax.BlockBuilder(), [_info(()), *map(_info, loop.carried)]
    blank = [_info((steps, *row)) for row in loop.rows]
    infos[0] = relax.TensorStructInfo((), "int64")
    every, count = [*infos, *blank, *map(_info, loop.kept)], len(infos) + len(blank)

    def function(write: Callable[[list[relax.Var]], Any]) -> relax.Function:
        inner, params = relax.BlockBuilder(), [relax.Var(f"v{n}", info) for n, info in enumerate(every)]
        with inner.function("loop", params):
            inner.emit_func_output(write(inner, params))
        return inner.get()["loop"].without_attr("global_symbol")

    called = builder.add_func(function(lambda _, params: relax.Tuple(params[1:count])), "loop")

    def write(inner: relax.BlockBuilder, params: list[relax.Var]) -> relax.Expr:
        at, carried, puts, kept = params[0], params[1 : len(infos)], params[len(infos) : count], params[count:]
        goes_on = inner.emit(relax.op.less(at, relax.const(first + steps, "int64")))
        inner._begin_binding_block()
        new, rows = loop.step(inner, at, list(carried), list(kept))
        place = inner.emit(relax.op.reshape(at, (1,)))
        made = [inner.emit(relax.op.scatter_nd(put, place, row)) for put, row in zip(puts, rows, strict=True)]
        following = inner.emit(relax.op.add(at, relax.const(1, "int64")))
        again = inner.emit(relax.Call(called, [following, *new, *made, *kept]))
        block = inner._end_block()
        ends = relax.SeqExpr([], relax.Tuple(params[1:count]))
        return inner.emit(relax.If(goes_on, relax.SeqExpr([block], again), ends))

    builder.update_func(called, function(write))
    params = _params(loop)
    with builder.function("main", params):
        blanks = [builder.emit(relax.op.zeros(info.shape, "float32")) for info in blank]
        begin = relax.const(first, "int64")
        if by_data:
            nothing = builder.emit(relax.op.sum(builder.emit(relax.op.greater(params[0], relax.const(1e9, "float32")))))
            begin = builder.emit(relax.op.astype(nothing, "int64"))
        given = [begin, *params[: len(loop.carried)], *blanks, *params[len(loop.carried) :]]
        builder.emit_func_output(builder.emit(relax.Call(called, given)))
    return builder.get()


def unrolled(loop: Loop, steps: int, first: int = 0) -> ir.IRModule:
    """The same without a function."""
    builder, params = relax.BlockBuilder(), _params(loop)
    with builder.function("main", params):
        carried, kept = list(params[: len(loop.carried)]), list(params[len(loop.carried) :])
        columns: list[list] = []
        for step in range(first, first + steps):
            carried, rows = loop.step(builder, relax.const(step, "int64"), carried, kept)
            columns.append(rows)
        stacked = [builder.emit(relax.op.stack(list(column), axis=0)) for column in zip(*columns, strict=True)]
        builder.emit_func_output(relax.Tuple([*carried, *stacked]))
    return builder.get()


def _params(loop: Loop) -> list[relax.Var]:
    names = [f"c{n}" for n in range(len(loop.carried))] + [f"k{n}" for n in range(len(loop.kept))]
    return [relax.Var(name, _info(shape)) for name, shape in zip(names, (*loop.carried, *loop.kept), strict=True)]


def _info(shape: tuple[int, ...]) -> relax.TensorStructInfo:
    return relax.TensorStructInfo(shape, "float32")


def recurrent(bb, at, carried, kept):
    row = bb.emit(relax.op.take(kept[1], at, axis=0))
    new = bb.emit(relax.op.tanh(bb.emit(relax.op.add(bb.emit(relax.op.matmul(carried[0], kept[0])), row))))
    return [new], [new]


def turned(bb, at, carried, kept):
    """What is carried lies the other way round after each step."""
    other = bb.emit(relax.op.permute_dims(carried[0]))
    return [bb.emit(relax.op.multiply(other, relax.const(0.5, "float32")))], [carried[0]]


def swapped(bb, at, carried, kept):
    return [carried[1], bb.emit(relax.op.add(carried[0], kept[0]))], [carried[1]]


def same_twice(bb, at, carried, kept):
    """Two carried values are one, then another one that stays."""
    new = bb.emit(relax.op.add(carried[0], carried[1]))
    return [new, new, kept[0]], [new, carried[2]]


def summed(bb, at, carried, kept):
    """A sum over rows in each step; the count as a number."""
    total = bb.emit(relax.op.sum(bb.emit(relax.op.matmul(kept[0], carried[0])), 0, True))
    number = bb.emit(relax.op.astype(at, "float32"))
    scaled = bb.emit(relax.op.multiply(total, bb.emit(relax.op.add(number, relax.const(0.1, "float32")))))
    return [bb.emit(relax.op.tanh(bb.emit(relax.op.add(carried[0], scaled))))], [scaled]


def merged(bb, at, carried, kept):
    """Dims are merged in the step, and taken apart again."""
    flat = bb.emit(relax.op.reshape(carried[0], (24,)))
    back = bb.emit(relax.op.reshape(bb.emit(relax.op.negative(flat)), (6, 4)))
    return [bb.emit(relax.op.add(back, kept[0]))], [flat]


LOOPS = {
    "recurrent": Loop([(6, 4)], [(4, 4), (5, 6, 4)], [(6, 4)], recurrent),
    "turned": Loop([(5, 5)], [], [(5, 5)], turned),
    "swapped": Loop([(6, 4), (6, 4)], [(4,)], [(6, 4)], swapped),
    "same_twice": Loop([(6, 4)] * 3, [(6, 4)], [(6, 4), (6, 4)], same_twice),
    "summed": Loop([(4, 7)], [(5, 4)], [(1, 7)], summed),
    "merged": Loop([(6, 4)], [(6, 4)], [(24,)], merged),
}
