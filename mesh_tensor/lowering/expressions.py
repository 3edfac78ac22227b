"""Expressions in local view: coordinates that are values become global, loads past the tile's end read 0."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx

from mesh_tensor.base.window import Window
from mesh_tensor.rules.kernel.lookups import without_wrap
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Access, Statement
from mesh_tensor.tir.effects import thread_indices
from mesh_tensor.tir.nodes import DIVISIONS, loads, nodes
from mesh_tensor.tir.prover import Prover

from .splits import Shrink, Split


class ValueRewriter:
    """Rewrites expressions of one kernel."""

    def __init__(self, analysis: Analysis, splits: Sequence[Split], shrink: Shrink):
        self.analysis, self.kernel, self.shrink = analysis, analysis.kernel, shrink
        self.splits = {s.factor: s for s in splits}
        self.offsets = self._find_offsets(splits)
        self.block_offsets = self._find_offsets([s for s in splits if s.factor.aligned is not None])
        self.accesses = {_key(access): access for statement in self.kernel.statements for access in statement.accesses}
        self._ragged = any(not split.even or shrink.overruns(split) for split in splits)
        self._ranges: Prover | None = None

    def rewrite(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """The expression with split loops' variables at global coordinates, but for the indices of tiles."""
        return self._rewrite(expr, self.offsets)

    def _rewrite(self, expr: tirx.PrimExpr, offsets: dict[tirx.Var, tirx.PrimExpr]) -> tirx.PrimExpr:
        if isinstance(expr, (tirx.IntImm, tirx.FloatImm, tirx.StringImm)):
            return expr
        placeholders: dict[tirx.Var, tirx.PrimExpr] = {}

        def hide(node: tirx.BufferLoad) -> tirx.PrimExpr:
            var = tirx.Var("load", node.dtype)
            placeholders[var] = self._load(node)
            return var

        skeleton = replace_outer_loads(expr, hide)
        skeleton = tirx.stmt_functor.substitute(skeleton, offsets)
        return tirx.stmt_functor.substitute(skeleton, placeholders) if placeholders else skeleton

    def indices(self, access: Access) -> list[tirx.PrimExpr]:
        """An access's indices: local in the dims that tiles split, global values in dims that are needed whole. In an
        on-chip dim that no factor walks, blocks are global and positions in them stay what they are."""
        return [self._index(access, dim) for dim in range(len(access.indices))]

    def _index(self, access: Access, dim: int) -> tirx.PrimExpr:
        index = access.indices[dim]
        if self.analysis.coordinates.of_access(access, dim) is not None:
            return index
        if not self.kernel.is_param(access.buffer):
            return self._rewrite(index, self.block_offsets)
        window, split = self.window(access, dim), self.lookup(access, dim)
        if split is not None:
            return self.kernel.analyzer.simplify(self._rewrite(index, self.offsets) - split.offset)
        if window is None:
            return self._rewrite(index, self.offsets)
        position = self._rewrite(without_wrap(index) if window.wraps else index, self.offsets)
        place = position - self._window_start(access, dim, window)
        if window.wraps:  # whichever way around it was reached
            place = tirx.floormod(place, access.buffer.shape[dim])
        return self.kernel.analyzer.simplify(place)

    def window(self, access: Access, dim: int) -> Window | None:
        """What a device has of a parameter's dim, where that is a window."""
        is_param = bool(self.shrink.windows) and self.kernel.is_param(access.buffer)
        return self.shrink.windows.get((access.buffer.name, dim)) if is_param else None

    def lookup(self, access: Access, dim: int) -> Split | None:
        """The split of a parameter's dim that is indexed by data, here or wherever it is used, or written at
        constants."""
        of = access.buffer.name, dim
        if not self.kernel.is_param(access.buffer):
            return None
        factor = self.analysis.lookups.get(of)
        if factor is None and access.forms[dim] is None:
            factor = self.analysis.factor_of(*of)
        return None if factor is None else self.splits.get(factor)

    def owned(self, statement: Statement, of: Split | None = None) -> list[tirx.PrimExpr]:
        """Conditions under which this device has what the statement looks up in split dims, or in those of one split;
        what lies outside of them the first device has."""
        found: dict[tuple, tirx.PrimExpr] = {}
        for access in statement.reads:
            for dim, index in enumerate(access.indices):
                split = self.lookup(access, dim)
                if split is not None and of in (None, split) and (split, *_key(access)) not in found:
                    at = self._rewrite(index, self.offsets)
                    inside = tirx.And(at >= split.offset, at < split.offset + split.valid)
                    outside = tirx.Or(at < 0, at >= split.size)
                    found[(split, *_key(access))] = tirx.Or(inside, tirx.And(split.is_first, outside))
        return list(found.values())

    def _window_start(self, access: Access, dim: int, window: Window) -> tirx.PrimExpr:
        factor, _ = self.analysis.windows[(access.buffer.name, dim)]
        if factor is None:
            return tirx.IntImm("int32", window.first)
        start = self.splits[factor].offset * window.stride
        return (start if window.per == 1 else tirx.floordiv(start, window.per)) + window.first

    def guards(self, access: Access) -> list[tirx.PrimExpr]:
        """Conditions under which a parameter's access stays inside the tile, where that is not certain.

        TileLang guards what a kernel's own ragged blocks reach; the local kernel says so itself."""
        found = []
        for dim, index in enumerate(access.indices):
            entry = self.analysis.coordinates.of_access(access, dim)
            if entry is None:
                window, looked_up = self.window(access, dim), self.lookup(access, dim)
                size = access.buffer.shape[dim] if window is None else window.length
                size = size if looked_up is None else looked_up.valid
                found += self._outside(self._index(access, dim), size)
                continue
            split = self.splits.get(entry[0])
            size = access.buffer.shape[dim] if split is None else split.tile
            if not self.kernel.analyzer.can_prove(self.shrink.coverage(entry[1]) <= size):
                found.append(index < size)
        return found

    def placed(self, access: Access) -> list[tirx.PrimExpr]:
        """Conditions under which this device has the places of a parameter that a tile operation writes to."""
        splits = [(dim, split) for dim in range(len(access.indices)) if (split := self.lookup(access, dim)) is not None]
        return [bound for dim, split in splits for bound in self._outside(self._index(access, dim), split.valid)]

    def _outside(self, index: tirx.PrimExpr, size: tirx.PrimExpr) -> list[tirx.PrimExpr]:
        """The bounds that an index into a whole dim may break, for some values of the loops' variables."""
        return [bound for bound in (index >= 0, index < size) if not self._on_all_devices(bound)]

    def uncertain(self, condition: tirx.PrimExpr) -> tirx.PrimExpr | None:
        """What of a condition, which is rewritten, may not hold on some device; None if it always holds."""
        if isinstance(condition, tirx.And):
            parts = [part for part in map(self.uncertain, (condition.a, condition.b)) if part is not None]
            return None if not parts else parts[0] if len(parts) == 1 else tirx.And(*parts)
        return None if self.splits and self._on_all_devices(condition) else condition

    def _on_all_devices(self, condition: tirx.PrimExpr) -> bool:
        """Whether it holds for all values of the loops' variables and the devices' coordinates."""
        if self._ranges is None:
            self._ranges = Prover()
            for split in self.splits.values():
                for axis in split.axes:
                    here, count = split.coordinates[axis], split.coordinates.mesh.size(axis)
                    self._ranges.bind(here, ir.Range(0, count))
            for loop in self.kernel.loops.values():
                extent = self.shrink.extents.get(loop.var, self.rewrite(loop.extent))
                self._ranges.bind(loop.var, ir.Range.from_min_extent(self.rewrite(loop.min), extent))
            for var, threads in thread_indices(self.kernel.func).items():
                self._ranges.bind(var, ir.Range(0, threads))
        return self._ranges.can_prove(condition)

    def access(self, load: tirx.BufferLoad) -> Access | None:
        """What the analysis knows of a load in the kernel."""
        return self.accesses.get(_key(load))

    def _load(self, load: tirx.BufferLoad) -> tirx.PrimExpr:
        access = self.access(load)
        if access is None:
            return load
        buffer = self.shrink.buffer(load.buffer)
        value: tirx.PrimExpr = tirx.BufferLoad(buffer, self.indices(access))
        guards = self.guards(access) if self.kernel.is_param(load.buffer) else self._guards_on_chip(access)
        for condition in guards:
            value = tirx.if_then_else(condition, value, tirx.const(0, load.dtype))
        return value

    def _guards_on_chip(self, access: Access) -> list[tirx.PrimExpr]:
        """Conditions under which a load from an on-chip buffer stays inside it, if it is at a place that is loaded:
        what is loaded past a tile's end is no place."""
        if not self._ragged:
            return []
        loaded = [dim for dim, index in enumerate(access.indices) if contains_load(index)]
        return [c for dim in loaded for c in self._outside(self._index(access, dim), access.buffer.shape[dim])]

    def _find_offsets(self, splits: Sequence[Split]) -> dict[tirx.Var, tirx.PrimExpr]:
        """What to substitute for loop variables that are values.

        Where only the coordinate counts, its innermost variable carries the offset. Where blocks count, tiles are whole
        blocks, and the outermost variable is shifted by the blocks before."""
        offsets: dict[tirx.Var, tirx.PrimExpr] = {}
        for split in splits:
            for form in sorted(self.analysis.coordinates.forms[split.factor], key=lambda form: len(form.terms)):
                if form.terms.keys() & offsets.keys():
                    continue  # a loop that runs once, in a block of one: the other loop of it carries the offset
                outer, step = form.ordered[0]
                inner, _ = form.ordered[-1]
                if split.factor.aligned is not None:
                    blocks = split.offset if step == 1 else tirx.floordiv(split.offset, step)
                    offsets[outer] = _shifted(outer, blocks)
                else:
                    offsets[inner] = _shifted(inner, split.offset)
        return offsets


def _shifted(var: tirx.Var, offset: tirx.PrimExpr) -> tirx.PrimExpr:
    """The variable at its place behind an offset, which is of the dtype that sizes have; it keeps its own."""
    place = var + offset
    return place if place.dtype == var.dtype else place.astype(var.dtype)


def _key(access: Access | tirx.BufferLoad) -> tuple:
    return (access.buffer, *access.indices)


def replace_outer_loads(expr: tirx.PrimExpr, replace) -> tirx.PrimExpr:
    """Exchange the outermost loads of an expression (loads inside a load's index go with it)."""

    def visit(node: object) -> object:
        return replace(node) if isinstance(node, tirx.BufferLoad) else None

    result = tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), visit, None, ["tirx.BufferLoad"])
    return result.value


def contains_load(expr: tirx.PrimExpr) -> bool:
    """Whether the expression reads memory."""
    return bool(loads(expr))


def has_trap(expr: tirx.PrimExpr) -> bool:
    """Whether evaluating the expression on garbage could stop the program: integer division by something loaded."""
    divisions = nodes(expr, *DIVISIONS)
    return any(d.dtype.startswith(("int", "uint")) and not isinstance(d.b, tirx.IntImm) for d in divisions)
