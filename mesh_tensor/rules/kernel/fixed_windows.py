"""What of a dim all devices read, wherever they are: `A[3, i]`, `A[i, 2:6]`, one layer of a cache.

Of a dim that axes split, the devices that have it hand on what lies between its lowest and its highest place alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx

from mesh_tensor.base.window import EVERYWHERE, Reach, Reaches
from mesh_tensor.tir.linear import loop_ranges
from mesh_tensor.tir.prover import Prover, begins_anew

from .statements import Access, Kernel, Statement


class FixedWindows:
    """Bounds of places over all that a kernel runs through."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._known: Prover | None = None

    def of(self, uses: Sequence[tuple[Statement, Access]], dim: int) -> Reaches | None:
        """What all these accesses, which are all that there are of a parameter that nothing writes, read of a dim; None
        if that is as long as the dim, or not known."""
        bounds = [self._bounds(statement, access, dim) for statement, access in uses]
        known = [interval for interval in bounds if interval is not None]
        if not known or len(known) < len(bounds):
            return None
        low, high = min(low for low, _ in known), max(high for _, high in known)
        size = int(uses[0][1].buffer.shape[dim])
        reaches = Reaches(EVERYWHERE, size, 0, 1, (Reach(low, high),))
        return reaches if low <= high and reaches.margin < size else None

    def _bounds(self, statement: Statement, access: Access, dim: int) -> tuple[int, int] | None:
        """The lowest and the highest place that an access has in a dim."""
        index = access.indices[dim]
        if access.forms[dim] is None and isinstance(index, (int, tirx.IntImm)):
            return None  # it stands for places that are not known
        record = statement.tile_op
        if record is not None and (record.in_order is not None or not self._walks_all(statement)):
            return None
        if isinstance(index, (int, tirx.IntImm)):
            return int(index), int(index)
        analyzer = self._analyzer(statement)
        if begins_anew(index, analyzer):
            return None
        bound = analyzer.const_int_bound(index)
        low, high = bound.min_value, bound.max_value
        return (low, high) if low > bound.NEG_INF and high < bound.POS_INF else None

    def _walks_all(self, statement: Statement) -> bool:
        """Whether the loops of a tile operation's elements walk all that is longer than 1 of its regions."""
        record = statement.tile_op
        assert record is not None
        operands = zip((record.dst, *record.sources), (statement.target, *statement.reads), strict=False)
        return all(set(region.long_dims) <= statement.element_dims(access).keys() for region, access in operands)

    def _analyzer(self, statement: Statement) -> Prover:
        """What knows the ranges of all loops of the kernel, and of a tile operation's elements."""
        if self._known is None:
            self._known = loop_ranges(self._kernel.func.body)
        for loop in statement.loops:
            if loop.kind == "tile":
                self._known.bind(loop.var, ir.Range(0, loop.extent), True)
        return self._known
