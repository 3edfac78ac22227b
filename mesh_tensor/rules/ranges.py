"""What is known of a kernel's loop variables and sizes, wherever they are used."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import arith, ir, tirx


def loops_in(body: tirx.Stmt) -> list[tirx.For]:
    """The loops of a body, outer ones before those in them."""
    found: list[tirx.For] = []
    tirx.stmt_functor.post_order_visit(body, lambda n: found.append(n) if isinstance(n, tirx.For) else None)
    return found[::-1]


def loop_ranges(body: tirx.Stmt, buffers: Iterable[tirx.Buffer] = ()) -> arith.Analyzer:
    """An analyzer that knows the range of every loop's variable, and that the sizes of `buffers` are not negative."""
    analyzer = arith.Analyzer()
    for buffer in buffers:
        for size in buffer.shape:
            if isinstance(size, tirx.Var):
                analyzer.update(size, arith.ConstIntBound(0, arith.ConstIntBound.POS_INF), True)
    for loop in loops_in(body):
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent), True)
    return analyzer
