"""The tensor that an on-chip buffer's elements, of all blocks, stand for: what a value in the middle of a kernel is."""

from __future__ import annotations

from typing import NamedTuple

from tvm import tirx

from mesh_tensor.tir.linear import Linear, as_expr

from .factors import Factor
from .live_ranges import LiveRange
from .sharding_rule import Analysis
from .statements import Loop


class WorkspaceDim(NamedTuple):
    """A dim of such a tensor: the factor that walks it (None: a plain dim), and the part that is in one buffer."""

    size: tirx.PrimExpr
    factor: Factor | None
    start: tirx.PrimExpr
    extent: tirx.PrimExpr


def workspace_dims(live_range: LiveRange, analysis: Analysis) -> list[WorkspaceDim]:
    """The dims of what a live range holds: one per loop of the grid that nothing else tells apart, then the buffer's
    own."""
    dims = []
    covered: set[tirx.Var] = set()
    for dim, extent in enumerate(live_range.buffer.shape):
        entry = analysis.coordinates.of_node((live_range, dim))
        factor, base = entry if entry is not None else (None, Linear({}))
        covered.update(base.terms)
        dims.append(WorkspaceDim(extent if factor is None else factor.size, factor, as_expr(base), extent))
    tainted = analysis.taints[live_range]
    grid = [loop for loop in analysis.kernel.grid if loop.var in tainted and loop.var not in covered]
    one = tirx.IntImm("int32", 1)
    return [*(WorkspaceDim(loop.extent, _walked_by(loop, analysis), loop.var, one) for loop in grid), *dims]


def _walked_by(loop: Loop, analysis: Analysis) -> Factor | None:
    """The factor of which a grid's variable is the coordinate."""
    equal = analysis.kernel.analyzer.can_prove_equal
    return next((f for f in analysis.factors if f.roles.get(loop.var) == 1 and equal(loop.extent, f.size)), None)
