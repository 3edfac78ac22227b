"""How far the loops of a local kernel go."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm import tirx

from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.tir.linear import as_expr, vars_of

from .expressions import ValueRewriter
from .shrink import Shrink
from .splits import Split


class LoopExtents:
    """Extents of loops on one device: those over split factors are the tile's, those that depend on data end before
    they begin where that would be padding."""

    def __init__(self, analysis: Analysis, splits: Sequence[Split], shrink: Shrink, values: ValueRewriter):
        self._analysis, self._splits, self._shrink, self._values = analysis, splits, shrink, values

    def extent(self, loop: tirx.For, around: Collection[tirx.Var]) -> tirx.PrimExpr:
        """The extent of a loop inside the loops `around`."""
        known = self._shrink.extents.get(loop.loop_var)
        if known is not None:
            return known
        extent = self._values.rewrite(loop.extent)
        depends_on = self._taints([loop.min, loop.extent])
        for split in self._splits:
            for form in self._analysis.coordinates.forms[split.factor]:
                here = form.terms and form.terms.keys() <= set(around)
                if here and depends_on & form.terms.keys() and not (split.even and self._shrink.fits(form, split)):
                    extent = tirx.if_then_else(as_expr(form) < split.valid, extent, tirx.const(0, extent.dtype))
        return extent

    def _taints(self, exprs: Sequence[tirx.PrimExpr]) -> set[tirx.Var]:
        """The loops that what is loaded in the expressions depends on."""
        kernel, found = self._analysis.kernel, set[tirx.Var]()

        def visit(node: object) -> None:
            if isinstance(node, tirx.BufferLoad):
                access = self._values.access(node)
                found.update(vars_of(node.indices, kernel.binds))
                found.update(
                    () if access is None else self._analysis.taints[self._analysis.coordinates.ranges.of(access)]
                )
            elif isinstance(node, tirx.Var) and node in kernel.binds:
                found.update(self._taints([kernel.binds[node]]))

        for expr in exprs:
            tirx.stmt_functor.post_order_visit(expr, visit)
        return found
