"""Branches that leave the same: blocks that lie inside a dim are copied as a whole, the last one element by element,

    if t < 7: copy(x[t * 4096], staged); for j: block[j] = cast(staged[j])
    else: for j: block[j] = if_then_else(t * 4096 + j < 32000, cast(x[t * 4096 + j]), 0)

where the second way would do for all: said in that way alone, it does not depend on which block comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from tvm import tirx

from mesh_tensor.tir.effects import chosen
from mesh_tensor.tir.nodes import conjuncts, loads, nodes, same_expression
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .contents import Contents, UnknownContent
from .live_ranges import LiveRanges, covers_all
from .reaching import Reaching
from .statements import Access, Kernel, Statement, without_binds
from .supported import safe_buffers


def one_branch(kernel: Kernel) -> tirx.PrimFunc | None:
    """The kernel without first branches in whose place the second ones would do; None if there are none. Views and
    prints are told as they are written."""
    choices = [choice for choice in nodes(kernel.root.body, tirx.IfThenElse) if choice.else_case is not None]
    if not choices or left_views(kernel.func) or prints(kernel.func.body):
        return None
    ranges = LiveRanges(kernel)
    same = {choice for choice in choices if _Branches(kernel, ranges, choice).are_same()}
    if not same:
        return None

    def second(stmt: tirx.IfThenElse) -> tirx.Stmt | None:
        return stmt.else_case if stmt in same else None

    return kernel.func.with_body(tirx.stmt_functor.ir_transform(kernel.func.body, second, None, ["tirx.IfThenElse"]))


class _Branches:
    """The branches of a choice."""

    def __init__(self, kernel: Kernel, ranges: LiveRanges, choice: tirx.IfThenElse) -> None:
        self._kernel, self._ranges, self._condition = kernel, ranges, choice.condition
        self._safe = safe_buffers(kernel.params.values(), kernel.root)
        parts, reaching = conjuncts(choice.condition), Reaching(kernel)
        self._first = [s for s in kernel.statements if all(_is_among(part, s.conditions) for part in parts)]
        self._second = [s for s in kernel.statements if any(_is_not(c, choice.condition) for c in s.conditions)]
        self._contents = Contents(kernel, ranges, reaching, self._known, reaching.writes, lambda condition, place: None)

    def are_same(self) -> bool:
        """Whether the second branch leaves what the first one does where that is taken, and the first one nothing
        else."""
        if loads(self._condition) or nodes(self._condition, tirx.Call) or not self._first or not self._second:
            return False
        writes = [s for s in (*self._first, *self._second) if not isinstance(s.node, tirx.Bind)]
        if any(s.unknown or s.write is None or s.may_be_skipped or s.op is not None for s in writes):
            return False
        if any(self._kernel.is_param(s.target.buffer) for s in writes):
            return False
        others = [s for s in self._second if s.write is not None]
        if len(others) != 1 or not covers_all(others[0], self._kernel):
            return False
        made = [s for s in self._first if s.write is not None and s.writes(others[0].target.buffer)]
        if len(made) != 1 or not covers_all(made[0], self._kernel) or not self._forgets(made[0]):
            return False
        try:
            return self._leave_same(made[0], others[0])
        except UnknownContent:
            return False

    def _forgets(self, made: Statement) -> bool:
        """Whether nothing else that the first branch writes is seen outside of it."""
        written = {self._ranges.of(s.target) for s in self._first if s.write is not None and s is not made}
        inside = set(self._first)
        return all({s for s, _ in (*r.reads, *r.writes)} <= inside for r in written)

    def _known(self, access: Access, reader: Statement) -> tirx.PrimExpr | None:
        if not self._kernel.is_param(access.buffer):
            return None
        if not self._kernel.keeps(access.buffer) or access.buffer in self._safe:
            raise UnknownContent
        return tirx.BufferLoad(access.buffer, access.indices)

    def _leave_same(self, made: Statement, other: Statement) -> bool:
        first, second = self._contents.written(made), without_binds(other.node.value, self._kernel)
        into: dict[tirx.Var, tirx.PrimExpr] = {}
        for form, index in zip(made.target.forms, other.target.indices, strict=True):
            if form is None or (form.variable is None and form.terms):
                return False
            into |= {} if form.variable is None else {form.variable: index}
        analyzer = self._kernel.analyzer
        with analyzer.constraint_scope(other.ranges), analyzer.constraint_scope(self._condition):
            return _are_equal(tirx.stmt_functor.substitute(first, into), second, analyzer)


def _is_among(part: tirx.PrimExpr, conditions: Sequence[tirx.PrimExpr]) -> bool:
    return any(part.same_as(condition) for condition in conditions)


def _is_not(condition: tirx.PrimExpr, other: tirx.PrimExpr) -> bool:
    return isinstance(condition, tirx.Not) and condition.a.same_as(other)


def _are_equal(a: tirx.PrimExpr, b: tirx.PrimExpr, analyzer: Prover) -> bool:
    """Whether two expressions are the same wherever what the analyzer knows holds. What lies outside of a parameter
    reads as 0."""
    choice = chosen(b)
    if choice is None:
        return _with_plain_places(a, analyzer, b)
    open_parts = [part for part in conjuncts(choice[0]) if not analyzer.can_prove(part)]
    for part in open_parts:
        with analyzer.constraint_scope(tirx.Not(part)):
            if number(choice[2]) is None or number(_without_outside(a, analyzer)) != number(choice[2]):
                return False
    with analyzer.constraint_scope(reduce(tirx.And, open_parts, tirx.const(True, "bool"))):
        return _are_equal(a, choice[1], analyzer)


def _without_outside(expr: tirx.PrimExpr, analyzer: Prover) -> tirx.PrimExpr:
    """The expression with 0 for what lies outside of parameters."""

    def outside(load: tirx.BufferLoad) -> tirx.PrimExpr | None:
        places = zip(load.indices, load.buffer.shape, strict=True)
        return tirx.const(0, load.dtype) if any(analyzer.can_prove(at >= size) for at, size in places) else None

    return tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), outside, None, ["tirx.BufferLoad"]).value


def _with_plain_places(a: tirx.PrimExpr, analyzer: Prover, b: tirx.PrimExpr) -> bool:
    def plain(load: tirx.BufferLoad) -> tirx.BufferLoad:
        return tirx.BufferLoad(load.buffer, [analyzer.simplify(index) for index in load.indices])

    def with_plain(expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), plain, None, ["tirx.BufferLoad"]).value

    return same_expression(with_plain(a), with_plain(b))
