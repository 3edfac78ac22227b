"""Positions in a kernel over tiles: where they may be more than indices into tiles.

On one device such a kernel is over the whole tensor, and so a loop's position is the global one. On many it is that in
a device's tile. Both mean the same element as the index of a dim that is split like the one that the loop walks; as a
value, in a loop's bounds, or as the index of anything else, a position only keeps its meaning if the author added where
the tile starts (`get_tile_offset`), or compares it with what there is of the tile (`get_tile_extent`).
What the author adds is taken at its word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tvm import tirx

from ..errors import refuse
from ..propagation import tile_extent
from ..rules.factors import Factor
from ..rules.linear import Linear, vars_of
from ..rules.padding import is_inside
from ..rules.sharding_rule import Analysis
from ..rules.statements import Access, Loop, Statement, describe
from ..rules.values import IDEMPOTENT
from ..sharding import Sharding
from ..tile_helpers import TileHelper, as_helper, helpers_in

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_SUMS = (tirx.Add, tirx.Sub)
_EXTREMES = (tirx.Min, tirx.Max)
_QUOTIENTS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
_NUMBERS = (tirx.IntImm, tirx.FloatImm, tirx.StringImm)
_PARTS: dict[type | tuple[type, ...], tuple[str, ...]] = {
    (*_QUOTIENTS, tirx.Mul, tirx.And, tirx.Or): ("a", "b"),
    tirx.Not: ("a",),
    tirx.Select: ("condition", "true_value", "false_value"),
    tirx.Ramp: ("base", "stride"),
    tirx.Broadcast: ("value",),
    _NUMBERS: (),
}

#: The split factors of a kernel, each with its axes of more than one device.
SplitFactors = Mapping[Factor, tuple[str, ...]]


def check_positions(
    name: str, analysis: Analysis, splits: SplitFactors, asked: Mapping[str, Sharding], shapes: Mapping[str, tuple]
) -> None:
    """Every position in the kernel means the same on all meshes.

    Raises:
        MeshTensorError: lists the loops whose position is used otherwise.
    """
    check = _Check(analysis, splits, asked, shapes)
    problems = [*check.unlike(), *check.lanes(), *check.uses()]
    if problems:
        refuse(
            list(dict.fromkeys(problems)),
            where=f"kernel {name!r}, written over tiles",
            why="a position in a kernel over tiles is that in one device's tile",
            fix="write the global position, `get_tile_offset(buffer)[dim] + position` (or with mesh_axis_index(axis)); "
            "for a bounds test compare with `get_tile_extent(buffer)[dim]`",
        )


@dataclass
class _Found:
    """In a sum or a comparison: the loops whose positions no helper has made global, and the helpers."""

    loops: set[tirx.Var] = field(default_factory=set)
    helpers: list[TileHelper] = field(default_factory=list)

    def __add__(self, other: _Found) -> _Found:
        return _Found(self.loops | other.loops, [*self.helpers, *other.helpers])


class _Check:
    def __init__(
        self, analysis: Analysis, splits: SplitFactors, asked: Mapping[str, Sharding], shapes: Mapping[str, tuple]
    ):
        self.analysis, self.kernel, self.asked, self.shapes = analysis, analysis.kernel, asked, shapes
        self.split = splits
        walks: dict[tirx.Var, Factor | None] = {var: factor for factor in splits for var in factor.roles}
        self.walks = {**walks, **self._detached_loops()}

    def _detached_loops(self) -> dict[tirx.Var, None]:
        """Loops that walk no dim but may count tiles: those of the grid, and those as long as a tile."""
        with_roles = {var for factor in self.analysis.factors for var in factor.roles}
        return {
            loop.var: None for loop in self.kernel.loops.values() if loop.var not in with_roles and self._counts(loop)
        }

    def _counts(self, loop: Loop) -> bool:
        prove = self.kernel.analyzer.can_prove_equal
        if not self.split or prove(loop.extent, 1):
            return False
        return loop.kind == "grid" or any(prove(loop.extent, factor.size) for factor in self.split)

    # -- what is walked together ---------------------------------------------------------------------------------------

    def unlike(self) -> Iterator[str]:
        """Dims whose tiles are as long, and which are walked together, but which aren't."""
        for factor in self.split:
            (first, at), *others = factor.dims
            for param, dim in others:
                sizes = self.shapes[first][at], self.shapes[param][dim]
                if not self.kernel.analyzer.can_prove_equal(*sizes):
                    yield (
                        f"{first} dim {at} ({sizes[0]}) and {param} dim {dim} ({sizes[1]}) are walked together, but "
                        "only their tiles are equally long"
                    )

    def lanes(self) -> Iterator[str]:
        """Values per position in a block, where blocks don't start where they would on one device."""
        for factor, axes in self.split.items():
            param, dim = factor.dims[0]
            sizes = [self.asked[param].mesh.size(axis) for axis in axes]
            tiles = [tile_extent(self.shapes[param][dim], sizes[: n + 1]) for n in range(len(sizes))]
            whole = all(
                self.kernel.analyzer.can_prove_equal(tirx.floormod(tirx.convert(tile), factor.block), 0)
                for tile in tiles
            )
            if factor.lanes is not None and not whole:
                tile = f"tiles of {tiles[-1]} in {param}[{dim}]"
                yield f"{factor.lanes}, and {tile} are not whole blocks of {factor.block}"

    # -- positions -----------------------------------------------------------------------------------------------------

    def uses(self) -> Iterator[str]:
        """The positions that are not global where they would have to be."""
        for statement in self.kernel.statements:
            for expr in statement.values:
                yield from self._expr(
                    expr, statement, f"{describe(statement)} uses the position as a value in {_text(expr)}"
                )
            for loop in statement.loops:
                for expr in (loop.min, loop.extent):
                    what = f"the bounds of loop {loop.var.name} depend on the position: {_text(expr)}"
                    yield from self._expr(expr, statement, what)
                yield from self._extents(loop)
            for access in statement.accesses:
                yield from self._indices(access, statement)
            yield from self._counted(statement)
        bound = {s.node.var for s in self.kernel.statements if isinstance(s.node, tirx.Bind)}
        for var, value in self.kernel.binds.items():
            if var not in bound:
                yield from self._expr(value, None, f"{var.name} = {_text(value)}")

    def _indices(self, access: Access, statement: Statement) -> Iterator[str]:
        """Whole dims are indexed with global positions."""
        for dim, index in enumerate(access.indices):
            if not self.kernel.is_param(access.buffer) or self.analysis.coordinates.of_access(access, dim) is not None:
                continue
            text = f"{access.buffer.name} dim {dim} is indexed by {_text(index)}, and is not split alike"
            yield from self._expr(index, statement, text)

    def _counted(self, statement: Statement) -> Iterator[str]:
        """What programs add to a tensor that don't walk any dim depends on how many there are."""
        if statement.op is None or statement.op in IDEMPOTENT or not self.kernel.is_param(statement.target.buffer):
            return
        for loop in statement.loops:
            if loop.var in self.walks and self.walks[loop.var] is None:
                yield f"loop {loop.var.name} walks no dim: {describe(statement)} counts how often it runs"

    def _extents(self, loop: Loop) -> Iterator[str]:
        """A loop that goes as far as a tile is valid walks a dim that is split like it."""
        factor = self.walks.get(loop.var)
        for helper in helpers_in(tirx.Evaluate(loop.extent)):
            if factor is not None and helper.is_extent and not self._alike(helper, factor):
                yield f"loop {loop.var.name} walks {self._dim(factor)}, but goes as far as {helper}"

    def _expr(self, expr: tirx.PrimExpr, statement: Statement | None, what: str) -> Iterator[str]:
        if isinstance(expr, int):
            return
        problems: list[tirx.Var] = []
        self._close(self._scan(expr, statement, problems), problems)
        by_factor: dict[Factor | None, list[str]] = {}
        for var in dict.fromkeys(problems):
            by_factor.setdefault(self.walks[var], []).append(var.name)
        for factor, names in by_factor.items():
            loops = f"loop {names[0]} walks" if len(names) == 1 else f"loops {', '.join(names)} walk"
            if factor is None:
                yield f"{loops} no dim, which could tell whether that is only as far as a tile: {what}"
            else:
                yield f"{loops} {self._dim(factor)}, split over {', '.join(self.split[factor])}: {what}"

    def _scan(self, expr: tirx.PrimExpr, statement: Statement | None, problems: list[tirx.Var]) -> _Found:
        """What is in a sum or comparison that is still open; what is not, has been noted in `problems`."""
        helper = as_helper(expr)
        if helper is not None:
            return _Found(helpers=[helper])
        if isinstance(expr, tirx.Var):
            return _Found({expr} if expr in self.walks else set())
        if isinstance(expr, tirx.BufferLoad):
            return _Found()  # its indices are those of an access
        if isinstance(expr, tirx.Cast):
            return self._scan(expr.value, statement, problems)
        if isinstance(expr, (*_SUMS, *_COMPARISONS, *_EXTREMES)) or _is_multiple(expr):
            both = self._scan(expr.a, statement, problems) + self._scan(expr.b, statement, problems)
            if isinstance(expr, _COMPARISONS):
                if not self._is_bounds_test(expr, statement):
                    self._close(both, problems)
                return _Found()
            return self._closed(both, problems) if isinstance(expr, _EXTREMES) else both
        inner = _parts(expr)
        if inner is None:
            return self._closed(_Found(vars_of([expr], {}) & self.walks.keys()), problems)
        parts = [self._scan(part, statement, problems) for part in inner]
        for part in parts:
            self._close(part, problems)
        helpers = [h for part in parts for h in part.helpers] if isinstance(expr, (*_QUOTIENTS, tirx.Mul)) else []
        return _Found(helpers=helpers)

    def _closed(self, found: _Found, problems: list[tirx.Var]) -> _Found:
        self._close(found, problems)
        return _Found(helpers=found.helpers)

    def _close(self, found: _Found, problems: list[tirx.Var]) -> None:
        problems += sorted((v for v in found.loops if not self._is_global(v, found.helpers)), key=lambda v: v.name)

    def _is_global(self, var: tirx.Var, helpers: list[TileHelper]) -> bool:
        factor = self.walks[var]
        if factor is None:
            return bool(helpers)
        axes = {helper.axis for helper in helpers}
        return set(self.split[factor]) <= axes or any(self._alike(helper, factor) for helper in helpers)

    def _alike(self, helper: TileHelper, factor: Factor) -> bool:
        """Whether the helper is that of a dim which is split like those of the factor."""
        if helper.axis is not None:
            return False
        (buffer, at), (param, dim) = helper.place, factor.dims[0]
        same_axes = self.asked[buffer].axes_of(at) == self.asked[param].axes_of(dim)
        sizes = self.shapes[buffer][at], self.shapes[param][dim]
        return same_axes and self.kernel.analyzer.can_prove_equal(*sizes)

    def _is_bounds_test(self, condition: tirx.PrimExpr, statement: Statement | None) -> bool:
        """Whether the condition is the same at every position inside the whole dims, and so inside all tiles."""
        if statement is None:
            return False
        forms: dict[Factor, Linear] = self.analysis.coordinates.of_statement(statement)
        inside = []
        for factor, form in forms.items():
            param, dim = factor.dims[0]
            inside.append((form, self.shapes[param][dim]))
        return is_inside(condition, inside, self.kernel) or is_inside(tirx.Not(condition), inside, self.kernel)

    def _dim(self, factor: Factor) -> str:
        param, dim = factor.dims[0]
        return f"the tile of {param}[{dim}]"


def _is_multiple(expr: tirx.PrimExpr) -> bool:
    """A product with a number or a size."""
    return isinstance(expr, tirx.Mul) and any(
        isinstance(part, (tirx.IntImm, tirx.FloatImm)) for part in (expr.a, expr.b)
    )


def _parts(expr: tirx.PrimExpr) -> list[tirx.PrimExpr] | None:
    """What an expression is made of, None if it is of a kind that is not known here."""
    if isinstance(expr, tirx.Call):
        return list(expr.args)
    names = next((names for kind, names in _PARTS.items() if isinstance(expr, kind)), None)
    return None if names is None else [getattr(expr, name) for name in names]


def _text(expr: tirx.PrimExpr) -> str:
    return " ".join(str(expr).split())
