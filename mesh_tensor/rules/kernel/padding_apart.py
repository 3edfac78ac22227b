"""What is past a dim's end, counted by itself: of a fragment of 4096 columns for 4000, the others are all the same,

    for j in parallel(4096): squares[j] = (x[j] - mean) * (x[j] - mean)    # x is 0 past its end
    total = sum(squares)

so that one of them tells what all of them come to, and nothing else past the end counts:

    for j in parallel(4096): squares[j] = if_then_else(j < 4000, (x[j] - mean) * (x[j] - mean), 0)
    total = sum(squares); total += 96 * ((0 - mean) * (0 - mean))
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx

from mesh_tensor.base.reductions import reduction
from mesh_tensor.tir.linear import Linear, as_expr, vars_of
from mesh_tensor.tir.nodes import int_or, is_const
from mesh_tensor.tir.rewrite import cast, guarded, neutral_element, parallel_nest, sequence
from mesh_tensor.tir.tile_ops import Reduce
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .contents import Contents, UnknownContent
from .factors import Factor
from .live_ranges import LiveRange
from .normalize import with_own_variables
from .padding import Padding, padding_is_neutral, takes_whole_blocks
from .partial_values import keeps_partial
from .sharding_rule import Analysis
from .statements import Access, Loop, Statement

_COUNTED = ("float32", "float64", "int32", "int64")  # in others a count, or so many times a value, may be none


def padding_apart(analysis: Analysis) -> tirx.PrimFunc | None:
    """The kernel, in which what is past the end of dims that can't be split is counted by itself; None if nothing is
    that counts, or it may not be the same everywhere. Views and prints are told as they are written."""
    kernel, masked, behind = analysis.kernel, dict[tirx.Stmt, tirx.Stmt](), dict[object, list[tirx.Stmt]]()
    if left_views(kernel.func) or prints(kernel.func.body):
        return None
    for update in _updates(analysis):
        try:
            around, rest = update.rest()
        except UnknownContent:
            continue
        masked[update.source.node] = update.masked()
        behind.setdefault(around, []).append(rest)
    if not masked:
        return None

    def change(stmt: tirx.Stmt) -> tirx.Stmt | None:
        rests = behind.get(stmt.loop_var if isinstance(stmt, tirx.For) else stmt)
        return masked.get(stmt) if rests is None else sequence([stmt, *rests])

    kinds = ["tirx.For", "tirx.Evaluate", "tirx.BufferStore"]
    body = tirx.stmt_functor.ir_transform(kernel.func.body, None, change, kinds)
    return with_own_variables(kernel.func.with_body(body))


def _updates(analysis: Analysis) -> Iterator[_Update]:
    """What is combined past the end of dims that can't be split, and counts."""
    kernel, coordinates = analysis.kernel, analysis.coordinates
    for factor in analysis.factors:
        if factor.blocked is None or not int_or(factor.size, 0) or takes_whole_blocks(kernel, factor):
            continue
        for statement in kernel.statements:
            form = coordinates.of_statement(statement).get(factor)
            is_combined = statement.write is not None and statement.op is not None
            if form is None or not is_combined or coordinates.walks(statement.target, factor):
                continue
            if not padding_is_neutral(statement, kernel, coordinates, factor, past_the_end=True):
                yield _Update(analysis, factor, statement, form)


class _Update:
    """A statement that combines what is past the end of a factor's dim.

    `source`: what makes it, the statement itself or the store of what it reduces. `last`: the statement that combines
    what all blocks of the factor come to."""

    def __init__(self, analysis: Analysis, factor: Factor, statement: Statement, form: Linear) -> None:
        self._kernel, self._coordinates, self._factor = analysis.kernel, analysis.coordinates, factor
        self._padding = Padding(analysis.kernel, analysis.coordinates, factor, past_the_end=True)
        self._order = {statement: at for at, statement in enumerate(analysis.kernel.statements)}
        self._statement, self._form = statement, form
        self._kept: list[tuple[tirx.Buffer, Statement]] = []
        ranges, reaching = analysis.coordinates.ranges, self._padding.reaching
        self._contents = Contents(analysis.kernel, ranges, reaching, self._known, self._writers, self._padding.truth)
        self.source = self.last = statement

    def masked(self) -> tirx.Stmt:
        """The source, in which nothing past the end counts."""
        inside = as_expr(self._coordinates.of_statement(self.source)[self._factor]) < self._factor.size
        store = self.source.node
        if self.source is self._statement:
            return guarded(store, [inside])
        record = self._statement.tile_op
        assert record is not None
        neutral = neutral_element(str(record.reduction), store.buffer.dtype)
        return tirx.BufferStore(store.buffer, tirx.if_then_else(inside, store.value, neutral), store.indices)

    def rest(self) -> tuple[object, tirx.Stmt]:
        """What combines all that is past the end, and the loop, by its variable, or the statement behind which it does.

        Raises `UnknownContent` where it isn't the same everywhere, or not where the last statement is, too."""
        count, value = self._count(), self._one()
        value = self._in_last(value)
        loops = self._inner_loops()
        self._check(value, loops)
        target = self.last.target
        record, dtype = reduction(self.last.operation), target.buffer.dtype
        counted = record.name == "sum" and dtype in _COUNTED
        if not counted and not (record.idempotent and record.operands == "ordered"):
            raise UnknownContent
        value = cast(value, dtype) * tirx.const(count, dtype) if counted else cast(value, dtype)
        load = tirx.BufferLoad(target.buffer, target.indices)
        store = tirx.BufferStore(target.buffer, getattr(tirx, record.tir)(load, value), target.indices)
        fresh = {loop.var: tirx.Var(loop.var.name, loop.var.dtype) for loop in loops}
        store = tirx.stmt_functor.substitute(store, fresh)
        return self._around(), parallel_nest([*fresh.values()], [loop.extent for loop in loops], store)

    def _count(self) -> int:
        """How many positions the statement combines that are past the end."""
        extents = {loop.var: loop for loop in self._statement.loops}
        total = 1
        for var, step in self._form.ordered[::-1]:
            loop = extents[var]
            if step != total or not is_const(loop.min, 0):
                raise UnknownContent
            total *= int_or(loop.extent, 0)
        of_factor = {loop.var for loop in self._statement.loops if loop.var in self._factor.roles}
        if self._form.const or of_factor != set(self._form.terms) or total <= int(self._factor.size):
            raise UnknownContent
        return total - int(self._factor.size)

    # -- what is past the end ------------------------------------------------------------------------------------------

    def _one(self) -> tirx.PrimExpr:
        """What is at one position past the end, in the statement's variables."""
        statement, record = self._statement, self._statement.tile_op
        if statement.conditions or statement.may_be_skipped or statement.subtracts:
            raise UnknownContent
        if isinstance(statement.node, tirx.BufferStore):
            return self._contents.value(statement.values[0], statement)
        if not isinstance(record, Reduce):
            raise UnknownContent
        value = self._contents.read(statement.reads[0], statement)
        self.source = self._contents.writer(statement.reads[0], statement)
        live_range = self._coordinates.ranges.of(statement.reads[0])
        others = (user for user, _ in live_range.reads if user is not statement)
        seen = any(self.source in self._padding.reaching.writes(live_range, user) for user in others)
        if seen or not isinstance(self.source.node, tirx.BufferStore):
            raise UnknownContent
        return tirx.abs(value) if reduction(str(record.reduction)).magnitudes else value

    def _known(self, access: Access, reader: Statement) -> tirx.PrimExpr | None:
        """What a statement past the end reads of parameters, and of what no part of is past the end."""
        if not self._coordinates.walks(access, self._factor):
            self._kept.append((access.buffer, reader))
            return tirx.BufferLoad(access.buffer, access.indices)
        places = [self._coordinates.of_access(access, dim) for dim in range(len(access.indices))]
        here = self._coordinates.of_statement(reader)[self._factor]
        if any(place is not None and place[0] is self._factor and not place[1].same_as(here) for place in places):
            raise UnknownContent
        if not self._kernel.is_param(access.buffer):
            return None
        if access.buffer in self._padding.safe:
            raise UnknownContent
        return tirx.const(0, access.buffer.dtype)

    def _writers(self, live_range: LiveRange, reader: Statement) -> list[Statement]:
        """What may have written what a statement past the end reads."""
        written = [s for s in self._padding.reaching.writes(live_range, reader) if not self._padding.is_skipped(s)]
        if not all(self._coordinates.walks(writer.target, self._factor) for writer in written):
            raise UnknownContent
        return written

    # -- where it is combined ------------------------------------------------------------------------------------------

    def _in_last(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """The value in the variables of the statement that combines what all blocks come to: of one that combines what
        a block comes to, the statement that hands that on."""
        live_range = self._coordinates.ranges.of(self._statement.target)
        scope = {loop.var for loop in live_range.scope}
        if not scope & self._factor.roles.keys():
            return value
        if len(live_range.reads) != 1:
            raise UnknownContent
        (self.last, access), op = live_range.reads[0], self._statement.operation
        blocks = {loop.var for loop in self.last.loops if loop.var in self._factor.roles}
        hands_on = self.last.op == op and keeps_partial(self.last, access, op) and blocks <= scope
        if not hands_on or self.last.conditions or self.last.may_be_skipped or self.last.tile_op is not None:
            raise UnknownContent
        into = dict[tirx.Var, tirx.PrimExpr]()
        for form, index in zip(self._statement.target.forms, access.indices, strict=True):
            if form is None or (form.variable is None and form.terms):
                raise UnknownContent
            into |= {} if form.variable is None else {form.variable: index}
        return tirx.stmt_functor.substitute(value, into)

    def _outer(self) -> int:
        """Where, among the loops of the last statement, those begin that walk the factor, or its target."""
        for at, loop in enumerate(self.last.loops):
            if loop.var in self._factor.roles or loop.kind in ("parallel", "tile"):
                return at
        raise UnknownContent

    def _around(self) -> object:
        loop = self.last.loops[self._outer()]
        return self.last.node if loop.kind == "tile" else loop.var

    def _inner_loops(self) -> list[Loop]:
        outer = self.last.loops[self._outer()]
        if outer.kind == "grid" or (outer.kind != "tile" and outer.node is None):
            raise UnknownContent
        inner = [loop for loop in self.last.loops[self._outer() :] if loop.var not in self._factor.roles]
        if not all(is_const(loop.min, 0) and isinstance(loop.extent, tirx.IntImm) for loop in inner):
            raise UnknownContent
        return inner

    def _check(self, value: tirx.PrimExpr, inner: list[Loop]) -> None:
        """That the value is the same past the end as behind the loops, and the statement runs once in each of these."""
        last, outer = self._order[self.last], self._outer()
        around = [loop for loop in self.last.loops[:outer] if loop.var not in self._factor.roles]
        known = {loop.var for loop in (*around, *inner)}
        used = vars_of([value, *self.last.target.indices], self._kernel.binds)
        if any(var in self._kernel.loops and var not in known for var in used):
            raise UnknownContent
        if any(loop.kind == "tile" and loop.var not in used for loop in inner):
            raise UnknownContent
        for buffer, reader in self._kept:
            for writer in (s for s in self._kernel.statements if s.writes(buffer)):
                again = (set(writer.loops) & set(self.last.loops)) - set(reader.loops)
                of_blocks = {x.var for x in set(writer.loops) & set(self.last.loops)} & self._factor.roles.keys()
                if again or of_blocks or self._order[reader] <= self._order[writer] <= last:
                    raise UnknownContent
