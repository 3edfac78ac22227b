"""Positions in a kernel over tiles: where they may be more than indices into tiles.

On one device such a kernel is over the whole tensor, and so a loop's position is the global one. On many it is that in
a device's tile. Both mean the same element as the index of a dim that is split like the one that the loop walks; as a
value, in a loop's bounds, or as the index of anything else, a position only keeps its meaning if the author added where
the tile starts (`get_tile_offset`), or compares it with what there is of the tile (`get_tile_extent`).
What the author adds is taken at its word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.reductions import reduction
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.factors import Factor
from mesh_tensor.rules.kernel.padding import is_inside, padding_is_neutral
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Access, Loop, Statement, describe
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.tile_position import as_helper, helpers_in, text_of

from .tile_sums import SplitFactors, Sum, TileSums

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


def check_positions(
    name: str, analysis: Analysis, splits: SplitFactors, asked: Mapping[str, Sharding], shapes: Mapping[str, tuple]
) -> None:
    """Every position in the kernel means the same on all meshes. The refusal lists the loops whose position is used
    otherwise."""
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


class _Check:
    def __init__(
        self, analysis: Analysis, splits: SplitFactors, asked: Mapping[str, Sharding], shapes: Mapping[str, tuple]
    ):
        self.analysis, self.kernel, self.asked, self.shapes = analysis, analysis.kernel, asked, shapes
        self.split = splits
        walks: dict[tirx.Var, Factor | None] = {var: factor for factor in splits for var in factor.roles}
        self.walks = {**walks, **self._detached_loops()}
        self.sums = TileSums(analysis, splits, asked, shapes, self.walks)

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
        for factor in self.split:
            if factor.lanes is not None and not self.sums.has_whole_blocks(factor, factor.block):
                (param, dim), tile = factor.dims[0], self.kernel.analyzer.simplify(factor.size)
                tiles = f"tiles of {tile} in {param}[{dim}]"
                yield f"{factor.lanes}, and {tiles} are not whole blocks of {factor.block}"

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
                    expr, statement, f"{describe(statement)} uses the position as a value in {text_of(expr)}"
                )
            for loop in statement.loops:
                for expr in (loop.min, loop.extent):
                    what = f"the bounds of loop {loop.var.name} depend on the position: {text_of(expr)}"
                    yield from self._expr(expr, statement, what)
                yield from self._extents(loop)
            for access in statement.accesses:
                yield from self._indices(access, statement)
            yield from self._counted(statement)
        bound = {s.node.var for s in self.kernel.statements if isinstance(s.node, tirx.Bind)}
        for var, value in self.kernel.binds.items():
            if var not in bound:
                yield from self._expr(value, None, f"{var.name} = {text_of(value)}")

    def _indices(self, access: Access, statement: Statement) -> Iterator[str]:
        """Whole dims are indexed with global positions."""
        for dim, index in enumerate(access.indices):
            if not self.kernel.is_param(access.buffer) or self.analysis.coordinates.of_access(access, dim) is not None:
                continue
            text = f"{access.buffer.name} dim {dim} is indexed by {text_of(index)}, and is not split alike"
            yield from self._expr(index, statement, text)

    def _counted(self, statement: Statement) -> Iterator[str]:
        """What programs add to a tensor that don't walk any dim depends on how many there are."""
        if (
            statement.op is None
            or reduction(statement.op).idempotent
            or not self.kernel.is_param(statement.target.buffer)
        ):
            return
        for loop in statement.loops:
            if loop.var in self.walks and self.walks[loop.var] is None:
                yield f"loop {loop.var.name} walks no dim: {describe(statement)} counts how often it runs"

    def _extents(self, loop: Loop) -> Iterator[str]:
        """A loop that goes as far as a tile is valid walks a dim that is split like it."""
        factor = self.walks.get(loop.var)
        for helper in helpers_in(tirx.Evaluate(loop.extent)):
            if factor is not None and helper.is_extent and not self.sums.alike(*helper.place, factor):
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
            if not self.sums.is_valid_test(expr, difference) and not self._is_bounds_test(expr, statement):
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
        for factor, positions in self.sums.positions(total).items():
            if factor is None or not self.sums.is_global(total, positions, factor):
                problems += positions

    def _is_bounds_test(self, condition: tirx.PrimExpr, statement: Statement | None) -> bool:
        """Whether the condition is the same at every position inside the whole dims, and so inside all tiles."""
        if statement is None:
            return False
        forms = self.analysis.coordinates.of_statement(statement)
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
