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
from typing import Any

from tvm import tirx

from ..errors import refuse
from ..propagation import tile_extent
from ..rules.factors import Factor
from ..rules.linear import Linear, vars_of
from ..rules.padding import is_inside, padding_is_neutral
from ..rules.sharding_rule import Analysis
from ..rules.statements import Access, Loop, Statement, describe
from ..rules.values import IDEMPOTENT
from ..sharding import Sharding
from ..tile_helpers import AXIS, EXTENT, OFFSET, as_helper, helpers_in

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_NUMBERS = (tirx.IntImm, tirx.FloatImm)
#: Dtypes that hold a position as it is.
_WIDE = ("int32", "int64", "float32", "float64")
_PARTS: dict[tuple[type, ...], tuple[str, ...]] = {
    (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod): ("a", "b"),
    (tirx.Min, tirx.Max, tirx.And, tirx.Or): ("a", "b"),
    (tirx.Not,): ("a",),
    (tirx.Cast, tirx.Broadcast): ("value",),
    (tirx.Select,): ("condition", "true_value", "false_value"),
    (tirx.Ramp,): ("base", "stride"),
    (tirx.StringImm,): (),
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
    problems = [*check.unlike(), *check.lanes(), *check.overruns(), *check.uses()]
    if problems:
        refuse(
            list(dict.fromkeys(problems)),
            where=f"kernel {name!r}, written over tiles",
            why="a position in a kernel over tiles is that in one device's tile",
            fix="write the global position, `get_tile_offset(buffer)[dim] + position` (or with mesh_axis_index(axis)); "
            "for a bounds test compare with `get_tile_extent(buffer)[dim]`",
        )


#: How often loops' variables are in a sum.
Positions = dict[tirx.Var, float]


@dataclass(frozen=True)
class Sum:
    """`sum(coefficient * term) + const`, where terms are loops' variables and the helpers' keys (with the divisor of
    `offset // divisor` as one more element). `rest`: there is more in it that is neither."""

    terms: Mapping[Any, float] = field(default_factory=dict)
    const: float = 0
    rest: bool = False

    def __add__(self, other: Sum) -> Sum:
        terms = {t: self.terms.get(t, 0) + other.terms.get(t, 0) for t in (*self.terms, *other.terms)}
        return Sum({t: c for t, c in terms.items() if c}, self.const + other.const, self.rest or other.rest)

    def scaled(self, by: float) -> Sum:
        """The sum, so many times."""
        return Sum({t: c * by for t, c in self.terms.items() if by}, self.const * by, self.rest)


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

    def overruns(self) -> Iterator[str]:
        """Blocks that reach past the end on one device, where what is there counts, even if they fill the tiles."""
        for factor in self.split:
            param, dim = factor.dims[0]
            size = self.shapes[param][dim]
            if self.kernel.analyzer.can_prove_equal(tirx.floormod(tirx.convert(size), factor.block), 0):
                continue
            for statement in self.analysis.reductions[factor].updates:
                if not padding_is_neutral(statement, self.kernel, self.analysis.coordinates, factor, past_the_end=True):
                    yield (
                        f"on one device blocks of {factor.block} reach past the end of {param}[{dim}] ({size}), and "
                        f"{describe(statement)} counts what is there"
                    )

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
            if factor is not None and helper.is_extent and not self._alike(*helper.place, factor):
                yield f"loop {loop.var.name} walks {self._dim(factor)}, but goes as far as {helper}"

    def _expr(self, expr: tirx.PrimExpr, statement: Statement | None, what: str) -> Iterator[str]:
        if isinstance(expr, int):
            return
        problems: list[tirx.Var] = []
        self._close(self._sum(expr, statement, problems), problems)
        by_factor: dict[Factor | None, list[str]] = {}
        for var in dict.fromkeys(problems):
            by_factor.setdefault(self.walks[var], []).append(var.name)
        for factor, names in by_factor.items():
            loops = f"loop {names[0]} walks" if len(names) == 1 else f"loops {', '.join(names)} walk"
            if factor is None:
                yield f"{loops} no dim, which could tell whether that is only as far as a tile: {what}"
            else:
                yield f"{loops} {self._dim(factor)}, split over {', '.join(self.split[factor])}: {what}"

    def _sum(self, expr: tirx.PrimExpr, statement: Statement | None, problems: list[tirx.Var]) -> Sum:
        """The expression as a sum. Positions inside of its terms have to be global by themselves; those that aren't are
        added to `problems`."""
        helper = as_helper(expr)
        if helper is not None:
            return Sum({helper.key: 1})
        if isinstance(expr, tirx.Var):
            return Sum({expr: 1}) if expr in self.walks else Sum(rest=True)
        if isinstance(expr, _NUMBERS):
            return Sum(const=expr.value)
        if isinstance(expr, tirx.Cast) and expr.dtype in _WIDE:
            return self._sum(expr.value, statement, problems)
        if isinstance(expr, (tirx.Add, tirx.Sub)):
            right = self._sum(expr.b, statement, problems)
            return self._sum(expr.a, statement, problems) + right.scaled(1 if isinstance(expr, tirx.Add) else -1)
        if isinstance(expr, tirx.Mul) and isinstance(expr.b, _NUMBERS):
            return self._sum(expr.a, statement, problems).scaled(expr.b.value)
        if isinstance(expr, tirx.FloorDiv) and isinstance(expr.b, tirx.IntImm) and (start := as_helper(expr.a)):
            return Sum({(*start.key, int(expr.b)): 1})
        self._term(expr, statement, problems)
        return Sum(rest=True)

    def _term(self, expr: tirx.PrimExpr, statement: Statement | None, problems: list[tirx.Var]) -> None:
        """Close what an expression is made of that is no sum."""
        if isinstance(expr, tirx.BufferLoad):
            return  # its indices are those of an access
        if isinstance(expr, _COMPARISONS):
            difference = self._sum(expr.a, statement, problems) + self._sum(expr.b, statement, problems).scaled(-1)
            if not self._is_valid_test(expr, difference) and not self._is_bounds_test(expr, statement):
                self._close(difference, problems)
            return
        parts = _parts(expr)
        if parts is None:
            problems += sorted(vars_of([expr], {}) & self.walks.keys(), key=lambda var: var.name)
            return
        for part in parts:
            self._close(self._sum(part, statement, problems), problems)

    def _close(self, total: Sum, problems: list[tirx.Var]) -> None:
        """Note the positions in a sum that are not global."""
        for factor, positions in self._positions(total).items():
            if factor is None or not self._is_global(total, positions, factor):
                problems += positions

    def _positions(self, total: Sum) -> dict[Factor | None, Positions]:
        found: dict[Factor | None, Positions] = {}
        for term, coefficient in total.terms.items():
            if isinstance(term, tirx.Var):
                found.setdefault(self.walks[term], {})[term] = coefficient
        return found

    def _is_global(self, total: Sum, positions: Positions, factor: Factor) -> bool:
        """Whether a sum has, of each position in a tile, as much as of where the tile starts; or of a block's number as
        much as of how many blocks come before the tile."""
        return any(
            self._is_coordinate(total, positions, factor, form) or self._is_block(total, positions, factor, form)
            for form in self.analysis.coordinates.forms[factor]
        )

    def _is_coordinate(self, total: Sum, positions: Positions, factor: Factor, form: Linear) -> bool:
        times = positions.get(form.ordered[-1][0], 0)
        if positions != {var: coefficient * times for var, coefficient in form.terms.items()}:
            return False
        return times in (self._offsets(total, factor), self._coordinates(total, factor))

    def _is_block(self, total: Sum, positions: Positions, factor: Factor, form: Linear) -> bool:
        outer, step = form.ordered[0]
        if positions.keys() != {outer} or not self._has_whole_blocks(factor, step):
            return False
        return positions[outer] == self._offsets(total, factor, step)

    def _offsets(self, total: Sum, factor: Factor, *divided: int) -> float:
        """How often the start of the factor's tiles is in the sum, divided by the step or not."""
        return sum(
            coefficient
            for term, coefficient in total.terms.items()
            if isinstance(term, tuple)
            and term[0] == OFFSET
            and term[3:] == divided
            and self._alike(term[1], term[2], factor)
        )

    def _coordinates(self, total: Sum, factor: Factor) -> float | None:
        """The same, for starts that are worked out of the coordinates on the axes."""
        param, dim = factor.dims[0]
        steps = dict(self.asked[param].tile_steps(dim, _plain(self.shapes[param][dim])))
        times = {
            total.terms.get((AXIS, axis), 0) / step if isinstance(step, int) and step else None
            for axis, step in steps.items()
            if axis in self.split[factor]
        }
        return times.pop() if len(times) == 1 else None

    def _has_whole_blocks(self, factor: Factor, block: int) -> bool:
        """Whether every tile starts where a block does."""
        param, dim = factor.dims[0]
        steps = self.asked[param].tile_steps(dim, self.shapes[param][dim])
        prove = self.kernel.analyzer.can_prove_equal
        return all(prove(tirx.floormod(tirx.convert(step), block), 0) for _, step in steps)

    def _is_valid_test(self, condition: tirx.PrimExpr, difference: Sum) -> bool:
        """Whether a comparison says that a position is (or is not) one of the tile's valid ones."""
        positions = self._positions(difference)
        if len(positions) != 1 or difference.rest:
            return False
        ((factor, own),) = positions.items()
        others = [term for term in difference.terms if isinstance(term, tuple)]
        if factor is None or len(others) != 1 or others[0][0] != EXTENT:
            return False
        ((_, buffer, dim),) = others
        sign = -difference.terms[others[0]]
        forms = [{var: c * sign for var, c in form.terms.items()} for form in self.analysis.coordinates.forms[factor]]
        strict = isinstance(condition, (tirx.LT, tirx.GE) if sign == 1 else (tirx.GT, tirx.LE))
        bound = 0 if strict else sign
        is_order = not isinstance(condition, (tirx.EQ, tirx.NE))
        return is_order and own in forms and difference.const == bound and self._alike(buffer, dim, factor)

    def _alike(self, buffer: str, at: int, factor: Factor) -> bool:
        """Whether a buffer's dim is split like those of the factor."""
        param, dim = factor.dims[0]
        sizes = self.shapes[buffer][at], self.shapes[param][dim]
        same_axes = self.asked[buffer].axes_of(at) == self.asked[param].axes_of(dim)
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


def _parts(expr: tirx.PrimExpr) -> list[tirx.PrimExpr] | None:
    """What an expression is made of, None if it is of a kind that is not known here."""
    if isinstance(expr, tirx.Call):
        return list(expr.args)
    names = next((names for kind, names in _PARTS.items() if isinstance(expr, kind)), None)
    return None if names is None else [getattr(expr, name) for name in names]


def _text(expr: tirx.PrimExpr) -> str:
    return " ".join(str(expr).split())


def _plain(size: object) -> object:
    return int(size) if isinstance(size, tirx.IntImm) else size
