"""How each factor combines: parallel, a reduction, or nothing that may be split.

Splitting a factor leaves a *partial* value wherever something is combined over it. This module finds those values,
follows them through statements that keep them partial (copies, further combining with the same operation), and finds
the first use that needs the whole value: the kernel is cut there. Whatever would depend on how coordinates are grouped
into blocks, on their order, or on how often a loop runs, blocks the factor or asks for tiles of whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx

from . import tile_ops
from .factors import Coordinates, Factor
from .linear import Linear, vars_of
from .live_ranges import LiveRange
from .padding import padding_is_neutral, takes_whole_blocks
from .statements import Access, Kernel, Statement, used_vars
from .values import is_neutral

#: Combining a value with itself changes nothing: such reductions need not count their start once.
IDEMPOTENT = ("max", "min", "bitand", "bitor")


class Blocked(Exception):
    """The factor (of a split, if it is known which) can't be split; the message is the reason."""

    def __init__(self, reason: str, factor: Factor | None = None):
        super().__init__(reason)
        self.factor = factor


@dataclass(eq=False)
class Reduction:
    """What splitting a factor leaves partial.

    `partial`: live ranges with the operation that completes them. `updates`: the statements that combine over the
    factor, with their coordinate in it (padding must be neutral there). `gated`: statements whose contribution must
    count on one device only. `cut`: the top-level statement before which the partial values must be completed, None if
    only outputs are partial. `masked`: False where padding that a block reaches past the tile's end is known to be
    neutral."""

    partial: dict[LiveRange, str] = field(default_factory=dict)
    updates: dict[Statement, Linear] = field(default_factory=dict)
    gated: list[Statement] = field(default_factory=list)
    cut: int | None = None
    masked: bool = True

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.partial.values()))


class FactorAnalysis:
    """Checks one factor against every statement; fills `factor.blocked`, `factor.aligned` and its Reduction."""

    def __init__(self, kernel: Kernel, coordinates: Coordinates, factor: Factor, taints: dict[LiveRange, set]):
        self.kernel, self.coordinates, self.factor, self.taints = kernel, coordinates, factor, taints
        self.vars = set(factor.roles)
        self.block_partial: dict[LiveRange, tuple[str, frozenset]] = {}
        self.contributions: dict[LiveRange, list[Statement]] = {}
        self.direct: dict[Statement, Linear] = {}
        self.accounted: dict[Statement, set] = {}
        self.lanes: set[LiveRange] = set()

    def run(self) -> Reduction:
        if self.factor.blocked is None:
            try:
                return self._analyse()
            except Blocked as error:
                self.factor.blocked = str(error)
        return Reduction()

    def _analyse(self) -> Reduction:
        self._check_ranges()
        forms = {s: self._coordinate(s) for s in self.kernel.statements}
        for statement, form in forms.items():
            if statement.unknown:
                raise Blocked(f"{statement.unknown} is not understood")
            self._check_untyped_indices(statement)
            if form is not None:
                self._with_coordinate(statement, form)
        uses = self._propagate()
        for statement, form in forms.items():
            if form is None:
                self._check_values(statement, None)
            self._check_repeats(statement, form)
        reduction = Reduction({r: op for r, (op, o) in self.block_partial.items() if not o}, self.direct)
        reduction.gated = self._find_gated()
        reduction.cut = self._find_cut(uses)
        self._check_padding(reduction)
        return reduction

    def _range(self, access: Access) -> LiveRange:
        return self.coordinates.ranges.of(access)

    def _coordinate(self, statement: Statement) -> Linear | None:
        """The statement's coordinate: that of the buffers it touches, or that of the loops around it."""
        form = self.coordinates.of_statement(statement).get(self.factor)
        return self.coordinates.around(statement, self.factor) if form is None else form

    def _check_ranges(self) -> None:
        """A buffer that holds the whole factor shrinks with it, so all its live ranges must agree on that."""
        whole: dict[tuple[tirx.Buffer, int], set[bool]] = {}
        for live_range in self.coordinates.ranges.all:
            if live_range.is_param or not (live_range.reads or live_range.writes):
                continue
            for dim in range(len(live_range.buffer.shape)):
                entry = self.coordinates.of_node((live_range, dim))
                holds = entry is not None and entry[0] is self.factor and not entry[1].terms
                whole.setdefault((live_range.buffer, dim), set()).add(holds)
        for (buffer, dim), kinds in whole.items():
            if len(kinds) > 1:
                raise Blocked(f"{buffer.name} dim {dim} holds the whole dim in one place and something else in another")

    def _check_untyped_indices(self, statement: Statement) -> None:
        """On-chip dims without a coordinate may not be indexed by the factor's loops, but for lanes of an
        accumulator."""
        for access in statement.accesses:
            live_range = self._range(access)
            for dim, index in enumerate(access.indices):
                if live_range.is_param or self.coordinates.of_access(access, dim) is not None:
                    continue
                if not vars_of([index], self.kernel.binds) & self.vars:
                    continue
                if access is statement.write and statement.op is not None:
                    self.lanes.add(live_range)
                else:
                    raise Blocked(f"{access.buffer.name} dim {dim} is indexed by {index}, which depends on the block")

    def _with_coordinate(self, statement: Statement, form: Linear) -> None:
        self._check_values(statement, form)
        write = statement.write
        if write is None or self._walks_factor(write):
            return
        scope = {loop.var for loop in self._range(write).scope}
        if set(form.terms) <= scope:
            return
        if statement.op is None:
            if not self._is_same_everywhere(statement):
                raise Blocked(
                    f"{_describe(statement)} keeps one of many coordinates' values: no reduction is known for it"
                )
            return
        if self._starts_anew(statement, form, scope):
            if self._is_same_everywhere(statement):
                return
            raise Blocked(
                f"{_describe(statement)} starts anew in every block of it and keeps the last block's value only"
            )
        self._add_partial(self._range(write), statement.op, frozenset(v for v in form.terms if v in scope), statement)
        self.accounted.setdefault(statement, set()).update(form.terms)
        self.direct[statement] = form

    def _starts_anew(self, statement: Statement, form: Linear, scope: set[tirx.Var]) -> bool:
        """Whether some loop of the coordinate gives the target a new start in every iteration, and only the last
        counts."""
        carried = self._range(statement.target).carried
        return any(
            v not in scope and not self._runs_once(v) and (statement.fresh or v not in carried) for v in form.terms
        )

    def _runs_once(self, var: tirx.Var) -> bool:
        """Whether one run of a statement takes all values of the variable, or there is only one."""
        loop = self.kernel.loops[var]
        return loop.kind == "tile" or self.kernel.analyzer.can_prove_equal(loop.extent, 1)

    def _is_same_everywhere(self, statement: Statement) -> bool:
        """A store of a value that is the same at every coordinate of the factor, and not carried from one to the
        next."""
        return not self._tainted(statement) & self.vars and not self._range(statement.target).carried & self.vars

    def _tainted(self, statement: Statement) -> set[tirx.Var]:
        """The loop variables that what the statement writes may depend on, but for what was there before."""
        return used_vars(statement, self.kernel) | {v for a in statement.reads for v in self.taints[self._range(a)]}

    def _walks_factor(self, access: Access) -> bool:
        entries = (self.coordinates.of_access(access, dim) for dim in range(len(access.indices)))
        return any(entry is not None and entry[0] is self.factor for entry in entries)

    def _check_values(self, statement: Statement, form: Linear | None) -> None:
        """Where loop variables are values, only the coordinate may count, or tiles must be whole blocks."""
        bounds = [e for loop in statement.loops for e in (loop.min, loop.extent) if not isinstance(e, tirx.IntImm)]
        for expr in [*statement.values, *bounds, *self._detached_indices(statement)]:
            used = vars_of([expr], self.kernel.binds) & self.vars
            if used and not (form is not None and self._depends_on_coordinate_only(expr, form)):
                names = ", ".join(sorted(v.name for v in used))
                self.factor.aligned = self.factor.aligned or f"{names} is used as a value in {expr}"

    def _detached_indices(self, statement: Statement) -> list[tirx.PrimExpr]:
        return [
            index
            for access in statement.accesses
            if self._range(access).is_param
            for dim, index in enumerate(access.indices)
            if self.coordinates.of_access(access, dim) is None
        ]

    def _depends_on_coordinate_only(self, expr: tirx.PrimExpr, form: Linear) -> bool:
        """expr(v + 1, i - coefficient) == expr(v, i) for every outer loop v and the innermost loop i."""
        *outer, (inner, coefficient) = form.ordered
        used = vars_of([expr], self.kernel.binds) & self.vars
        if coefficient != 1 or not used <= set(form.terms) or inner not in used:
            return False
        skeleton = _without_loads(expr)
        for var, step in outer:
            shifted = tirx.stmt_functor.substitute(skeleton, {var: var + 1, inner: inner - step})
            if not self.kernel.analyzer.can_prove_equal(shifted, skeleton):
                return False
        return True

    def _add_partial(self, live_range: LiveRange, op: str, outer: frozenset, statement: Statement) -> bool:
        known = self.block_partial.setdefault(live_range, (op, outer))
        if known != (op, outer):
            raise Blocked(f"{live_range.buffer.name} is combined by {known[0]} and by {op} over the same dim")
        contributions = self.contributions.setdefault(live_range, [])
        if statement in contributions:
            return False
        contributions.append(statement)
        return True

    def _propagate(self) -> list[tuple[Statement, LiveRange]]:
        """Follow partial values through statements that keep them partial; returns the uses that don't."""
        changed = True
        while changed:
            changed, uses = False, []
            for statement in self.kernel.statements:
                for access in statement.reads:
                    live_range = self._range(access)
                    if live_range not in self.block_partial:
                        continue
                    op, outer = self.block_partial[live_range]
                    self._check_complete(statement, live_range)
                    if not keeps_partial(statement, access, op) or self._walks_factor(statement.target):
                        uses.append((statement, live_range))
                        continue
                    target = self._range(statement.target)
                    scope = {loop.var for loop in target.scope}
                    inner = frozenset(v for v in outer if v in scope)
                    if (statement.op is None or statement.fresh) and inner != outer:
                        raise Blocked(f"{_describe(statement)} keeps the last block's value only")
                    changed |= self._add_partial(target, op, inner, statement)
                    self.accounted.setdefault(statement, set()).update(outer)
        uses += self._other_updates()
        for statement, live_range in uses:
            op, outer = self.block_partial[live_range]
            if outer:
                raise Blocked(
                    f"{_describe(statement)} uses the {op} of one block of it ({live_range.buffer.name}) before all "
                    "blocks are combined"
                )
        self._check_lanes()
        return uses

    def _other_updates(self) -> list[tuple[Statement, LiveRange]]:
        """Updates of a partial value with another operation: they use the whole value."""
        return [
            (statement, live_range)
            for live_range, (op, _) in self.block_partial.items()
            for statement, _ in live_range.writes
            if statement.op not in (None, op) and not statement.fresh
        ]

    def _check_complete(self, statement: Statement, live_range: LiveRange) -> None:
        """A use inside the factor's loop that still adds to the value sees what came before it, in order."""
        scope = {loop.var for loop in live_range.scope}
        own = {loop.var for loop in statement.loops}
        for contribution in self.contributions[live_range]:
            if any(x.var in own and x.var in self.vars and x.var not in scope for x in contribution.loops):
                raise Blocked(
                    f"{_describe(statement)} uses {live_range.buffer.name} inside the loop that is still adding to it"
                )

    def _check_lanes(self) -> None:
        """An accumulator's lanes mean something only summed up, or if blocks stay as they are."""
        for live_range in self.lanes:
            op = self.block_partial.get(live_range, ("", None))[0]
            for statement, access in live_range.reads:
                kept = keeps_partial(statement, access, op) and statement.op == op
                if not kept and self.factor.aligned is None:
                    self.factor.aligned = f"{live_range.buffer.name} keeps one value per position in a block"

    def _check_repeats(self, statement: Statement, form: Linear | None) -> None:
        """A statement inside loops of the factor that are not its coordinate runs once per block: it must not
        notice."""
        if statement.write is None:
            return
        own = set() if form is None else set(form.terms)
        around = {loop.var for loop in statement.loops if loop.var in self.vars and loop.kind != "tile"} - own
        live_range = self._range(statement.write)
        around -= self.accounted.get(statement, set())
        if around <= {loop.var for loop in live_range.scope}:
            return
        contributes = statement in self.contributions.get(live_range, ())
        if statement.op is not None and not statement.fresh and not (contributes and statement.op in IDEMPOTENT):
            raise Blocked(f"{_describe(statement)} counts the blocks of it")
        same = not self._tainted(statement) & around if contributes else self._is_same_everywhere(statement)
        if not same:
            raise Blocked(f"{_describe(statement)} carries a value from one block of it to the next")

    def _find_gated(self) -> list[Statement]:
        gated = []
        for live_range, (op, outer) in self.block_partial.items():
            for statement, _ in live_range.writes:
                if op in IDEMPOTENT or statement in self.contributions[live_range] or is_neutral(statement, op):
                    continue
                if outer:
                    raise Blocked(
                        f"{_describe(statement)} starts every block of it with a value that would count again"
                    )
                gated.append(statement)
        return gated

    def _find_cut(self, uses: list[tuple[Statement, LiveRange]]) -> int | None:
        for statement, live_range in uses:
            last = max(s.top for s in self.contributions[live_range])
            if statement.top <= last:
                raise Blocked(
                    f"{_describe(statement)} needs the whole value of {live_range.buffer.name} inside the loop that "
                    "computes it"
                )
        return min((statement.top for statement, _ in uses), default=None)

    def _check_padding(self, reduction: Reduction) -> None:
        """Positions past the dim's end that the kernel's own blocks reach must not count, or the kernel means them."""
        reduction.masked = not self._padding_is_neutral(past_the_end=False)
        if takes_whole_blocks(self.kernel, self.factor) or self._padding_is_neutral(past_the_end=True):
            return
        raise Blocked(
            f"blocks of {self.factor.block} reach past its end ({self.factor.size}), and what is there counts"
        )

    def _padding_is_neutral(self, *, past_the_end: bool) -> bool:
        return all(
            padding_is_neutral(s, self.kernel, self.coordinates, self.factor, past_the_end=past_the_end)
            for s in self.direct
        )


def keeps_partial(statement: Statement, access: Access, op: str) -> bool:
    """Whether the statement, given a partial value for `access`, leaves one that the same reduction completes."""
    write, record = statement.write, statement.tile_op
    if write is None or write.buffer.dtype != access.buffer.dtype or access not in statement.reads[:1]:
        return False
    if statement.op not in (None, op):
        return False
    if isinstance(record, (tile_ops.Copy, tile_ops.Transpose)):
        return True
    if isinstance(record, tile_ops.Reduce):
        return record.op == op
    if isinstance(record, tile_ops.Atomic) and isinstance(record.value, tile_ops.Region):
        return True
    if record is not None and not isinstance(record, tile_ops.Atomic):
        return False
    value = statement.values[0] if statement.values else None
    return isinstance(value, tirx.BufferLoad) and value.buffer.same_as(access.buffer)


def find_taints(kernel: Kernel, coordinates: Coordinates) -> dict[LiveRange, set]:
    """For every live range, the loop variables that its content may depend on."""
    ranges = coordinates.ranges
    taints: dict[LiveRange, set] = {r: set() for r in ranges.all}
    changed = True
    while changed:
        changed = False
        for statement in kernel.statements:
            if statement.write is None:
                continue
            target = taints[ranges.of(statement.write)]
            size = len(target)
            target |= used_vars(statement, kernel)
            for access in statement.reads:
                target |= taints[ranges.of(access)]
            changed |= len(target) > size
    return taints


def _without_loads(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """The expression with every load replaced by a fresh variable: their indices are looked at as accesses."""
    loads: list[tirx.BufferLoad] = []
    tirx.stmt_functor.post_order_visit(expr, lambda n: loads.append(n) if isinstance(n, tirx.BufferLoad) else None)
    if not loads:
        return expr

    def replace(node: object) -> object:
        return tirx.Var("loaded", node.dtype) if isinstance(node, tirx.BufferLoad) else None

    body = tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), None, replace, ["tirx.BufferLoad"])
    return body.value


def _describe(statement: Statement) -> str:
    record = statement.tile_op
    if record is not None:
        return f"T.{type(record).__name__.lower()} into {statement.target.buffer.name}"
    if statement.write is not None:
        return f"the store to {statement.write.buffer.name}"
    return "a statement"
