"""Scalars that a kernel computes before a cut and uses after it: what they are made of is still there, so they are
computed again.

That is what a program looks up before its loop: a group's first row, the group that a block of rows belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Statement, body_statements
from mesh_tensor.tir.nodes import loads, nodes
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.user_reports import is_print


@dataclass(frozen=True, eq=False)
class Again:
    """The statements that compute scalars once more, in their order, and the on-chip `buffers` that a workspace need
    not carry then."""

    stmts: list[tirx.Stmt]
    buffers: list[tirx.Buffer]


def computed_again(analysis: Analysis, at: int, copies: Sequence[tirx.Stmt], live: Collection[tirx.Buffer]) -> Again:
    """What computes, after a cut before statement `at`, the scalars that `copies`, which are repeated there, and the
    statements from `at` on take from before: those that programs bind, and those of the `live` on-chip buffers that can
    be computed again.

    Raises Blocked for what is bound from something that the kernel writes."""
    after = body_statements(analysis.kernel.root.body)[at:]
    names = {var for stmt in (*copies, *after) for var in nodes(stmt, tirx.Var)}
    read = {load.buffer for stmt in after for load in loads(stmt)}
    scalars = [b for b in live if is_scalar(analysis, b)]
    filled = {b for b in scalars if b in read and is_computed_again(analysis, at, b)}
    filled |= {load.buffer for copy in copies for load in loads(copy) if is_scalar(analysis, load.buffer)}
    found = _Search(analysis, at, names, set(filled))
    if found.why is not None:
        raise Blocked(f"{found.why} is loaded before the point where the kernel would be cut")
    return Again(found.stmts, [*filled, *(b for b in scalars if b not in read)])


def is_computed_again(analysis: Analysis, at: int, scalar: tirx.Buffer) -> bool:
    """Whether statements before `at` that may be repeated give the scalar what it holds there."""
    return is_scalar(analysis, scalar) and _Search(analysis, at, set(), {scalar}).why is None


def is_scalar(analysis: Analysis, buffer: tirx.Buffer) -> bool:
    """Whether it is one number on chip."""
    return any(buffer.same_as(b) for b in analysis.kernel.on_chip) and all(number(size) == 1 for size in buffer.shape)


class _Search:
    """Back from the cut, over what the `names` and `scalars` are made of: all that wrote them before they were used."""

    def __init__(self, analysis: Analysis, at: int, names: set[tirx.Var], scalars: set[tirx.Buffer]):
        self.analysis, self.names, self.scalars = analysis, names, scalars
        self.stmts: list[tirx.Stmt] = []
        self.why: str | None = None  # what cannot be computed again
        whole = body_statements(analysis.kernel.root.body)
        for top in range(at - 1, -1, -1):
            self._visit(whole[top], [s for s in analysis.kernel.statements if s.top == top])

    def _visit(self, stmt: tirx.Stmt, inside: Sequence[Statement]) -> None:
        if any(s.writes(buffer) for s in inside for buffer in self.scalars):
            self._take(stmt, inside)
            return
        for statement in reversed(inside):
            if _is_of_program(statement) and statement.node.var in self.names:
                self._take(statement.node, [statement])

    def _take(self, stmt: tirx.Stmt, inside: Sequence[Statement]) -> None:
        """The statement runs again, if what it does is to compute scalars, of what is the same then."""
        for statement in inside:
            if is_print(statement.node) or statement.unknown or statement.may_be_skipped or self._is_part(statement):
                self.why = self.why or _name(statement)
            for buffer in _written(statement):
                self._needs(buffer, statement)
            for access in statement.reads:
                self._needs(access.buffer, statement)
        self.names |= set(nodes(stmt, tirx.Var))
        self.stmts.insert(0, stmt)

    def _is_part(self, statement: Statement) -> bool:
        """Whether devices may have parts of it: its loops walk what an axis may split, and the sum is of all."""
        own = {loop.var for loop in statement.loops if loop.kind != "grid"}
        return any(not own.isdisjoint(f.roles) for f in self.analysis.factors if f.blocked is None)

    def _needs(self, buffer: tirx.Buffer, statement: Statement) -> None:
        if is_scalar(self.analysis, buffer):
            self.scalars.add(buffer)
        elif not self.analysis.kernel.is_param(buffer) or self.analysis.written(str(buffer.name)):
            self.why = self.why or _name(statement)


def _is_of_program(statement: Statement) -> bool:
    """Whether it binds a scalar of a whole program."""
    is_bind = isinstance(statement.node, tirx.Bind) and not statement.conditions
    return is_bind and all(loop.kind == "grid" for loop in statement.loops)


def _written(statement: Statement) -> list[tirx.Buffer]:
    return [*statement.may_write, *([] if statement.write is None else [statement.write.buffer])]


def _name(statement: Statement) -> str:
    if isinstance(statement.node, tirx.Bind):
        return str(statement.node.var.name)
    return next((str(buffer.name) for buffer in _written(statement)), "a scalar")
