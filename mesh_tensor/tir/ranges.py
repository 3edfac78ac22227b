"""What is known of a kernel's loop variables and sizes, wherever they are used."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import arith, ir, tirx

from .nodes import nodes


def loops_in(body: tirx.Stmt) -> list[tirx.For]:
    """The loops of a body, outer ones before those in them."""
    return nodes(body, tirx.For)[::-1]


def loop_ranges(body: tirx.Stmt, buffers: Iterable[tirx.Buffer] = ()) -> arith.Analyzer:
    """An analyzer that knows the range of every loop's and every block's variables, and that the sizes of `buffers` are
    not negative."""
    analyzer = arith.Analyzer()
    for buffer in buffers:
        for size in buffer.shape:
            if isinstance(size, tirx.Var):
                analyzer.update(size, arith.ConstIntBound(0, arith.ConstIntBound.POS_INF), True)
    for var, ranges in _ranges(body).items():
        if all(ir.structural_equal(ranges[0], other) for other in ranges):
            analyzer.bind(var, ranges[0], True)
    return analyzer


def _ranges(body: tirx.Stmt) -> dict[tirx.Var, list[ir.Range]]:
    """The ranges of the loops' and the blocks' variables: several, where loops share one."""
    found: dict[tirx.Var, list[ir.Range]] = {}
    for loop in loops_in(body):
        found.setdefault(loop.loop_var, []).append(ir.Range.from_min_extent(loop.min, loop.extent))
    for iter_var in (iter_var for block in nodes(body, tirx.SBlock) for iter_var in block.iter_vars):
        found.setdefault(iter_var.var, []).append(iter_var.dom)
    return found
