"""Parameters' dims that are indexed by data: tables whose rows are looked up, results that are scattered into; results
that are written at constants; and what of a dim all devices read, wherever they are: `A[3, i]`, one layer of a cache.

Where axes split such a dim, every device does what falls into its tile, and nothing where an index falls into
another's. What is looked up is then there on one device, and neutral on the others: partial. What is scattered lies
where it is. What all read, the devices that have it hand on: what lies between its lowest and its highest place alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tvm import ir, tirx

from mesh_tensor.base.window import EVERYWHERE, Reach, Reaches
from mesh_tensor.tir.linear import Linear, loop_ranges, vars_of
from mesh_tensor.tir.loops import running
from mesh_tensor.tir.nodes import same_expression
from mesh_tensor.tir.prover import Prover, begins_anew

from .bounded_indices import Distance, is_bound_to_loads, is_loaded, only_writes, puts_at_constant, takes_one
from .coordinates import Coordinates
from .factor_derivation import Dim
from .factors import Factor
from .owned_programs import LookedUpProducts, Use, dims_of_rows, owned_programs, row_products
from .partial_values import PartialValues
from .reader import known_uses
from .statements import Access, Kernel, Loop, Statement
from .verdicts import Reduction


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


@dataclass(frozen=True, eq=False)
class Lookup:
    """Dims that are indexed by data, as a factor that no loop walks; and what is partial where they are split."""

    dims: tuple[Dim, ...]
    factor: Factor
    reduction: Reduction


def candidates(kernel: Kernel, coordinates: Coordinates) -> list[Factor]:
    """The dims that may be such, as factors without names; first those of several tables at one place."""
    found = [
        (param, dim)
        for param, dim in coordinates.detached
        if _is_indexed_by_data(kernel, kernel.params[param], dim) or is_at_constants(kernel, kernel.params[param], dim)
    ]
    single = [(place,) for place in found]
    together = [*_at_one_place(kernel, coordinates, found), *dims_of_rows(kernel, found)]
    return [_factor(kernel, dims) for dims in dict.fromkeys((*together, *single))]


def _factor(kernel: Kernel, dims: tuple[Dim, ...]) -> Factor:
    param, dim = dims[0]
    return Factor("", kernel.params[param].shape[dim], dims, {})


def _at_one_place(kernel: Kernel, coordinates: Coordinates, dims: Sequence[Dim]) -> list[tuple[Dim, ...]]:
    """Dims of one length that are looked up at the same place, of several tables: one device makes all that a program
    does of them."""
    groups: list[tuple[tirx.PrimExpr, tirx.PrimExpr, list[Dim]]] = []
    for param, dim in dims:
        buffer = kernel.params[param]
        uses = [(statement, access, dim) for statement, access in known_uses(kernel, buffer)]
        places = [access.indices[dim] for _, access, _ in uses]
        if owned_programs(kernel, coordinates, uses) is None:
            continue
        alike = (
            group
            for place, size, group in groups
            if same_expression(place, places[0]) and same_expression(size, buffer.shape[dim])
        )
        together = next(alike, None)
        if together is None:
            groups.append((places[0], buffer.shape[dim], [(param, dim)]))
        else:
            together.append((param, dim))
    return [tuple(group) for *_, group in groups if len({param for param, _ in group}) == len(group) > 1]


def lookups(kernel: Kernel, coordinates: Coordinates, factors: Sequence[Factor]) -> Iterator[Lookup]:
    """What splitting each of the candidates means of which something is known; a dim is in one of them."""
    taken = set[Dim]()
    for factor in factors:
        found = _lookup(kernel, coordinates, factor) if taken.isdisjoint(factor.dims) else None
        if found is not None:
            taken.update(factor.dims)
            yield found


def _lookup(kernel: Kernel, coordinates: Coordinates, factor: Factor) -> Lookup | None:
    uses = [(s, access, dim) for param, dim in factor.dims for s, access in known_uses(kernel, kernel.params[param])]
    if not uses:
        return None
    if any(access is statement.write for statement, access, _ in uses):
        puts = all(only_writes(s, a) or puts_at_constant(s, a, dim) for s, a, dim in uses)
        return Lookup(factor.dims, factor, Reduction()) if puts else None
    if not all(takes_one(*use) for use in uses):
        return None
    reduction = owned_programs(kernel, coordinates, uses) or _reduction(kernel, coordinates, factor, uses)
    return None if reduction is None else Lookup(factor.dims, factor, reduction)


def _is_indexed_by_data(kernel: Kernel, buffer: tirx.Buffer, dim: int) -> bool:
    """Whether all that uses the parameter is understood, and indexes the dim by what is loaded."""
    uses = known_uses(kernel, buffer)
    if not uses or buffer.dtype == "bool":
        return False
    return all(is_loaded(kernel, s, access, dim) or is_bound_to_loads(kernel, s, access, dim) for s, access in uses)


def is_at_constants(kernel: Kernel, buffer: tirx.Buffer, dim: int) -> bool:
    """Whether all that uses the parameter is understood, and writes at constants of the dim."""
    uses = known_uses(kernel, buffer)
    return bool(uses) and buffer.dtype != "bool" and all(puts_at_constant(s, access, dim) for s, access in uses)


def _reduction(kernel: Kernel, coordinates: Coordinates, factor: Factor, uses: Sequence[Use]) -> Reduction | None:
    """What is partial, as of any factor that is combined over."""
    products = LookedUpProducts(kernel, coordinates, uses)
    blocks: dict[Statement, tuple[Access, ...]] = {product: (block,) for product, block in products.blocks.items()}
    blocks |= row_products(kernel, coordinates, uses) if len(factor.dims) > 1 else {}
    partial = PartialValues(kernel, coordinates, factor, products=blocks)
    statements = dict.fromkeys(statement for statement, *_ in uses)
    problems = [partial.add(statement, statement.op or "sum", ()) for statement in statements]
    if any(problems) or partial.follow() is not None or not products.are_linear(partial):
        return None
    gated = []
    for statement, problem in partial.starts():
        if problem:
            return None
        gated.append(statement)
    if partial.why_not_cut() is not None:
        return None
    if partial.cut is not None and any(statement.unknown for statement in kernel.statements):
        return None  # what such statements leave on chip can't be carried over
    ops, used = partial.ops, products.used(partial)
    return Reduction(ops, {}, tuple(gated), partial.cut, partial.completed, products=used)


def find_windows(kernel: Kernel, coordinates: Coordinates) -> dict[Dim, tuple[Factor | None, Reaches]]:
    """The windows in which dims are read, with the factor from whose positions that is, None where it is the same
    everywhere. Only of parameters that nothing writes: what others hold is exchanged before the kernel runs."""
    found: dict[Dim, tuple[Factor | None, Reaches]] = {}
    fixed = FixedWindows(kernel)
    for param, dim in coordinates.detached:
        is_written = any(statement.writes(kernel.params[param]) for statement in kernel.statements)
        accesses = [] if is_written else known_uses(kernel, kernel.params[param])
        if not accesses or not isinstance(kernel.params[param].shape[dim], tirx.IntImm):
            continue
        factors = coordinates.factors
        reads = [(factor, reaches) for factor in factors if (reaches := _read_from(kernel, factor, accesses, dim))]
        everywhere = fixed.of(accesses, dim)
        if reads or everywhere is not None:
            ways = [*reads, *([(None, everywhere)] if everywhere is not None else [])]
            found[(param, dim)] = min(ways, key=lambda read: read[1].margin)
    return found


def without_wrap(index: tirx.PrimExpr) -> tirx.PrimExpr:
    """The position before it comes in from the other end."""
    return index.a if isinstance(index, tirx.FloorMod) else index


def _read_from(
    kernel: Kernel, factor: Factor, accesses: Sequence[tuple[Statement, Access]], dim: int
) -> Reaches | None:
    """The windows in which the accesses read the dim from positions of the factor, if they are bounded and alike."""
    if factor.blocked is not None or not isinstance(factor.size, tirx.IntImm):
        return None
    wraps = any(_wraps(access, dim) for _, access in accesses)
    reaches, slopes, size = dict[Reach, None](), set[Fraction](), 0
    for statement, access in accesses:
        index, size = access.indices[dim], int(access.buffer.shape[dim])
        found = _reach(kernel, factor, without_wrap(index) if wraps else index, statement)
        if found is None or (
            wraps and not _wraps(access, dim) and not (found == (Fraction(1), Reach(0, 0, 1)) and size == factor.size)
        ):
            return None
        slopes.add(found[0])
        reaches[_nearest(found[1], size) if _wraps(access, dim) else found[1]] = None
    if len(slopes) != 1:
        return None
    (slope,) = slopes
    return Reaches(factor.name, size, slope.numerator, slope.denominator, tuple(reaches), wraps)


def _wraps(access: Access, dim: int) -> bool:
    """Whether a position past the dim's end is one at its start."""
    index = access.indices[dim]
    return isinstance(index, tirx.FloorMod) and isinstance(index.b, tirx.IntImm) and index.b == access.buffer.shape[dim]


def _nearest(reach: Reach, size: int) -> Reach:
    """The same positions of a dim that goes around, as near to where they are read from as may be: of 8, 7 on is 1
    back."""
    around = (reach.low + reach.high + size) // (2 * size) * size if size else 0
    return replace(reach, low=reach.low - around, high=reach.high - around)


def _reach(kernel: Kernel, factor: Factor, index: tirx.PrimExpr, statement: Statement) -> tuple[Fraction, Reach] | None:
    """The slope in which an index follows the factor, and how far it is from there."""
    loops = {loop.var: _running(loop) for loop in statement.loops}
    if _mentioned(index, loops, kernel).isdisjoint(factor.roles):
        return None
    terms = {loop.var: factor.roles[loop.var] for loop in statement.loops if loop.var in factor.roles}
    form = Linear(terms)
    distance = Distance(form, int(factor.size) - 1, loops, kernel.analyzer)
    found = distance.best(index)
    if found is None:
        return None
    slope, bounds = found
    low = math.ceil(bounds.low)  # from the position before a fraction of one, and an index is none
    high = math.floor(bounds.high) if slope.denominator == 1 else math.ceil(bounds.high)
    return slope, Reach(low, high, min(terms.values()))


def _running(loop: Loop) -> Loop:
    """The iterations of a loop that do something."""
    found = None if loop.node is None else running(loop.node)
    return loop if found is None else Loop(loop.var, found[0], found[1] - found[0], loop.kind, loop.node)


def _mentioned(index: tirx.PrimExpr, loops: Mapping[tirx.Var, Loop], kernel: Kernel) -> set[tirx.Var]:
    """The loops' variables that an index depends on, by way of the bounds of loops, too."""
    todo, found = [index], set[tirx.Var]()
    while todo:
        for var in vars_of([todo.pop()], kernel.binds) - found:
            found.add(var)
            if var in loops:
                todo += [e for e in (loops[var].min, loops[var].extent) if not isinstance(e, (int, tirx.IntImm))]
    return found
