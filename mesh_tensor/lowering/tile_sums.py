"""Sums with positions in tiles: whether they are global.

On one device tiles start at 0. A sum means the same on many if it has, of every position in a tile, as much as of where
the tile starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.factors import Factor
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Statement
from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.nodes import int_or
from mesh_tensor.tir.tile_position import AXIS, EXTENT, OFFSET, helpers_in

#: The split factors of a kernel, each with its axes of more than one device.
SplitFactors = Mapping[Factor, tuple[str, ...]]

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


class TileSums:
    """What is asked about the sums of one kernel. `walks`: the factor whose positions a loop's variable has part in,
    None for one that may count what a device has without walking any dim."""

    def __init__(
        self,
        analysis: Analysis,
        splits: SplitFactors,
        asked: Mapping[str, Sharding],
        shapes: Mapping[str, tuple],
        walks: Mapping[tirx.Var, Factor | None],
    ):
        self._splits, self._asked, self._shapes, self._walks = splits, asked, shapes, walks
        self._forms, self._prove = analysis.coordinates.forms, analysis.kernel.analyzer.can_prove_equal

    def positions(self, total: Sum) -> dict[Factor | None, Positions]:
        """The positions in a sum, by the factor that their loops walk."""
        found: dict[Factor | None, Positions] = {}
        for term, coefficient in total.terms.items():
            if isinstance(term, tirx.Var):
                found.setdefault(self._walks[term], {})[term] = coefficient
        return found

    def is_global(self, total: Sum, positions: Positions, factor: Factor) -> bool:
        """Whether a sum has, of each position in a tile, as much as of where the tile starts; or of a block's number as
        much as of how many blocks come before the tile."""
        return any(
            self._is_coordinate(total, positions, factor, form) or self._is_block(total, positions, factor, form)
            for form in self._forms[factor]
        )

    def _is_coordinate(self, total: Sum, positions: Positions, factor: Factor, form: Linear) -> bool:
        """Whether the positions are a coordinate, so many times, and the tile's start is there as often."""
        times = positions.get(form.ordered[-1][0], 0)
        if positions != {var: coefficient * times for var, coefficient in form.terms.items()}:
            return False
        return times in (self._offsets(total, factor), self._coordinates(total, factor))

    def _is_block(self, total: Sum, positions: Positions, factor: Factor, form: Linear) -> bool:
        """Whether the position is the number of a block, and the number of blocks before the tile is there as often."""
        outer, step = form.ordered[0]
        if positions.keys() != {outer} or not self.has_whole_blocks(factor, step):
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
            and self.alike(term[1], term[2], factor)
        )

    def _coordinates(self, total: Sum, factor: Factor) -> float | None:
        """The same, for starts that are worked out of the coordinates on the axes."""
        param, dim = factor.dims[0]
        size = self._shapes[param][dim]
        steps = dict(self._asked[param].tile_steps(dim, int_or(size, size)))
        times = {
            total.terms.get((AXIS, axis), 0) / step if isinstance(step, int) and step else None
            for axis, step in steps.items()
            if axis in self._splits[factor]
        }
        return times.pop() if len(times) == 1 else None

    def has_whole_blocks(self, factor: Factor, block: int) -> bool:
        """Whether every tile starts where a block does."""
        param, dim = factor.dims[0]
        steps = self._asked[param].tile_steps(dim, self._shapes[param][dim])
        return all(self._prove(tirx.floormod(tirx.convert(step), block), 0) for _, step in steps)

    def is_valid_test(self, condition: tirx.PrimExpr, difference: Sum) -> bool:
        """Whether a comparison says that a position is (or is not) one of the tile's valid ones."""
        positions = self.positions(difference)
        if len(positions) != 1 or difference.rest:
            return False
        ((factor, own),) = positions.items()
        others = [term for term in difference.terms if isinstance(term, tuple)]
        if factor is None or len(others) != 1 or others[0][0] != EXTENT:
            return False
        ((_, buffer, dim),) = others
        sign = -difference.terms[others[0]]
        forms = [{var: c * sign for var, c in form.terms.items()} for form in self._forms[factor]]
        strict = isinstance(condition, (tirx.LT, tirx.GE) if sign == 1 else (tirx.GT, tirx.LE))
        bound = 0 if strict else sign
        is_order = not isinstance(condition, (tirx.EQ, tirx.NE))
        return is_order and own in forms and difference.const == bound and self.alike(buffer, dim, factor)

    def alike(self, buffer: str, at: int, factor: Factor) -> bool:
        """Whether a buffer's dim is split like those of the factor."""
        param, dim = factor.dims[0]
        sizes = self._shapes[buffer][at], self._shapes[param][dim]
        same_axes = self._asked[buffer].axes_of(at) == self._asked[param].axes_of(dim)
        return same_axes and self._prove(*sizes)


def check_stores(name: str, analysis: Analysis, splits: SplitFactors, asked: Mapping[str, Sharding]) -> None:
    """Devices that hold the same part of a tensor store the same into it. The refusal lists the tensors, and the axes
    along which what is stored into them differs."""
    problems = list(_Stores(analysis, splits, asked).problems())
    if problems:
        refuse(
            problems,
            where=f"kernel {name!r}, written over tiles",
            why="the devices along the axis hold the same part of it",
            fix="let the axis split the buffer, or a dim that is summed into it, or store the same on all devices",
        )


class _Stores:
    def __init__(self, analysis: Analysis, splits: SplitFactors, asked: Mapping[str, Sharding]):
        self.analysis, self.kernel, self.splits, self.asked = analysis, analysis.kernel, splits, asked

    def problems(self) -> Iterator[str]:
        for live_range, axes in self._dependence().items():
            if not live_range.is_param:
                continue
            name = live_range.buffer.name
            for axis in sorted(axes - self._reduced(live_range)):
                if self.asked[name].dim_of(axis) is None:
                    yield f"buffer {name!r} is not split over axis {axis!r}, but what is stored into it depends on it"

    def _dependence(self) -> dict[LiveRange, set[str]]:
        """Per live range, the axes on whose coordinate a helper makes its content depend."""
        ranges = self.analysis.coordinates.ranges
        depends: dict[LiveRange, set[str]] = {live_range: set() for live_range in ranges.all}
        changed = True
        while changed:
            changed = False
            for statement in self.kernel.statements:
                if statement.write is None:
                    continue
                axes = self._axes_in(statement)
                for access in statement.reads:
                    read = ranges.of(access)
                    axes |= depends[read] - self._reduced(read)
                target = depends[ranges.of(statement.write)]
                changed |= not axes <= target
                target |= axes
        return depends

    def _axes_in(self, statement: Statement) -> set[str]:
        """The axes whose coordinate the statement uses itself."""
        indices = [index for access in statement.accesses for index in access.indices]
        exprs = [tirx.Evaluate(expr) for expr in (*statement.values, *statement.bounds, *indices)]
        return {
            helper.axis
            for expr in exprs
            for helper in helpers_in(expr)
            if helper.axis is not None and self._mesh.size(helper.axis) > 1
        }

    @property
    def _mesh(self) -> Mesh:
        return next(iter(self.asked.values())).mesh

    def _reduced(self, live_range: LiveRange) -> set[str]:
        """The axes over which a live range is partial: it is completed before anything else sees it."""
        partial = [factor for factor in self.splits if live_range in self.analysis.reductions[factor].partial]
        return {axis for factor in partial for axis in self.splits[factor]}
