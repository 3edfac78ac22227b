"""What statements read, as expressions of what is read elsewhere: where one statement wrote it all, what that wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.tir.effects import chosen
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import loads, same_expression
from mesh_tensor.tir.regions import Region
from mesh_tensor.tir.rewrite import cast
from mesh_tensor.tir.tile_ops import Copy, Fill

from .live_ranges import LiveRange, LiveRanges, reaches_all
from .reaching import Reaching
from .statements import Access, Kernel, Statement, without_binds


class UnknownContent(Exception):
    """What is read is no expression of what is known."""


@dataclass(frozen=True, eq=False)
class Contents:
    """`known`: what an access of a statement reads, if that is not to be looked for in what was written; it may raise
    `UnknownContent`. `writers`: what may have written what a statement sees of a live range. `truth`: whether a
    condition holds where a statement is, None if that is not known."""

    kernel: Kernel
    ranges: LiveRanges
    reaching: Reaching
    known: Callable[[Access, Statement], tirx.PrimExpr | None]
    writers: Callable[[LiveRange, Statement], list[Statement]]
    truth: Callable[[tirx.PrimExpr, Statement], bool | None]
    _active: list[Statement] = field(default_factory=list)

    def read(self, access: Access, reader: Statement) -> tirx.PrimExpr:
        """What a statement reads, in its variables."""
        if any(loads(index) for index in access.indices):
            raise UnknownContent
        known = self.known(access, reader)
        if known is not None:
            return known
        writer = self.writer(access, reader)
        value, into = self.written(writer), dict[tirx.Var, tirx.PrimExpr]()
        for form, index in zip(writer.target.forms, access.indices, strict=True):
            if form is None or (form.variable is None and form.terms):
                raise UnknownContent
            into |= {} if form.variable is None else {form.variable: index}
        if any(var in writer.vars and var not in into and var not in reader.vars for var in vars_of([value], {})):
            raise UnknownContent
        return tirx.stmt_functor.substitute(value, into)

    def writer(self, access: Access, reader: Statement) -> Statement:
        """The statement that wrote what another one reads, whatever was there before."""
        *before, writer = self.writers(self.ranges.of(access), reader) or [reader]
        order = self.kernel.statements.index
        alike = [c for c in reader.conditions if not loads(c)]
        runs = all(any(c.same_as(other) for other in alike) or self.truth(c, writer) for c in writer.conditions)
        if not runs or writer in self._active or not self.reaching.is_before(writer, reader):
            raise UnknownContent
        if not reaches_all(writer, self.kernel) or any(order(other) > order(writer) for other in before):
            raise UnknownContent
        return writer

    def written(self, writer: Statement) -> tirx.PrimExpr:
        """What a statement leaves in its target, in its variables."""
        self._active.append(writer)
        record, dtype = writer.tile_op, writer.target.buffer.dtype
        if isinstance(record, Copy):
            value = cast(self.read(writer.reads[0], writer), dtype)
        elif isinstance(record, Fill) and not isinstance(record.value, Region):
            value = cast(self.value(record.value, writer), dtype)
        elif isinstance(writer.node, tirx.BufferStore):
            value = self.value(writer.node.value, writer)
        else:
            raise UnknownContent
        self._active.pop()
        return value

    def value(self, expr: tirx.PrimExpr, place: Statement) -> tirx.PrimExpr:
        """An expression of a statement: what it chooses, of what it reads."""

        def decided(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
            choice = chosen(node)
            truth = None if choice is None else self.truth(choice[0], place)
            return None if choice is None or truth is None else in_all(choice[1] if truth else choice[2])

        def in_all(part: tirx.PrimExpr) -> tirx.PrimExpr:
            kinds = ["tirx.Select", "tirx.Call"]
            return tirx.stmt_functor.ir_transform(tirx.Evaluate(part), decided, None, kinds).value

        expr = in_all(self._without_binds(expr, place))
        read = loads(expr)
        found = {load: self.read(_access(load, place), place) for load in read}
        return tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), None, found.get, ["tirx.BufferLoad"]).value

    def _without_binds(self, expr: tirx.PrimExpr, place: Statement) -> tirx.PrimExpr:
        """The expression with what variables are bound to, if that is still the same where the statement is."""
        plain = without_binds(expr, self.kernel)
        if plain.same_as(expr):
            return expr
        before = self.kernel.statements[: self.kernel.statements.index(place)]
        first = next((at for at, s in enumerate(before) if isinstance(s.node, tirx.Bind) and s.vars <= place.vars), 0)
        if any(s.writes(load.buffer) for s in before[first:] for load in loads(plain)):
            raise UnknownContent
        return plain


def _access(load: tirx.BufferLoad, place: Statement) -> Access:
    for access in (*place.reads, *(place.accesses[:1] if place.op is not None else ())):
        if access.buffer.same_as(load.buffer) and all(map(same_expression, access.indices, load.indices)):
            return access
    raise UnknownContent
