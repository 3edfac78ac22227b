"""Loops over rows, each of which is reduced and then used, are two loops:

    for r in range(32): x = load(X[r]); total = sum(x); dX[r] = f(x, total); dW += g(x)

is said as

    for r in range(32): x = load(X[r]); total = sum(x); totals[r] = total
    for r in range(32): x = load(X[r]); dX[r] = f(x, totals[r]); dW += g(x)

so that what the first one reduces can be completed, for all rows at once, before the second one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from tvm import tirx

from mesh_tensor.tir.effects import changes_nothing, leaves_kernel, leaves_loop
from mesh_tensor.tir.loops import is_backward
from mesh_tensor.tir.nodes import int_or, is_const, nodes
from mesh_tensor.tir.rewrite import loop_like, over_elements, sequence, with_other_dims
from mesh_tensor.tir.tile_calls import parse_tile_op
from mesh_tensor.tir.tile_ops import Copy
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .live_ranges import LiveRanges
from .normalize import with_own_variables
from .rounds import copied, reduced_in, uses
from .statements import Kernel, Statement, body_statements, hinted_like

_MOST = 4  # times that one loop is taken apart
_LARGEST = 2**16  # elements of what is reduced in all iterations


def in_two_loops(kernel: Kernel) -> tirx.PrimFunc | None:
    """The kernel, in which loops that use what they reduce are taken apart; None if there are none. Views and prints
    are told in the order in which they are written."""
    if left_views(kernel.func) or prints(kernel.func.body):
        return None
    made, allocated, found = list[tirx.Stmt](), [*kernel.root.alloc_buffers], False
    for stmt in body_statements(kernel.root.body):
        parts = _Fission(kernel, stmt).parts() if isinstance(stmt, tirx.For) else None
        made += [stmt] if parts is None else parts[0]
        allocated += [] if parts is None else parts[1]
        found = found or parts is not None
    if not found:
        return None
    return with_own_variables(kernel.with_body(hinted_like(kernel.root.body, sequence(made)), allocated))


class _Fission:
    """A loop, and its iteration's statements."""

    def __init__(self, kernel: Kernel, loop: tirx.For) -> None:
        self._kernel, self._loop, self._ranges = kernel, loop, LiveRanges(kernel)
        self._stmts = body_statements(loop.body)
        of_node = {statement.node: statement for statement in kernel.statements}
        self._of = {s: [of_node[n] for n in _leaves(s) if n in of_node] for s in self._stmts}
        self._inside = [statement for statement in kernel.statements if loop.loop_var in statement.vars]

    def parts(self) -> tuple[list[tirx.Stmt], list[tirx.Buffer]] | None:
        """The loops, and what is kept between them; None where iterations know of each other, or use nothing."""
        loop = self._loop
        is_plain = loop.kind == tirx.ForKind.SERIAL and is_const(loop.min, 0) and int_or(loop.extent, 0) > 1
        if not is_plain or is_backward(loop) or leaves_loop(loop) or leaves_kernel(loop.body):
            return None
        made, kept, rest = list[tirx.Stmt](), list[tirx.Buffer](), list(self._stmts)
        while len(made) < _MOST and (end := self._first_use(rest)) is not None:
            first, results = rest[:end], list(dict.fromkeys(reduced_in(rest[:end])))
            if not all(map(self._may_be_said_twice, first)) or not self._are_left(first, results):
                break
            of_all = {result: self._of_all(result) for result in results}
            if any(math.prod(int_or(size, _LARGEST) for size in b.shape) > _LARGEST for b in of_all.values()):
                break
            stores = [over_elements(b, partial(self._store, b, into)) for b, into in of_all.items()]
            again = [stmt for stmt in first if not any(stmt in self._writers(b) for b in results)]
            after = [self._of_what_is_kept(stmt, of_all) for stmt in rest[end:]]
            if None in after:
                break
            made.append(self._over([*first, *stores]))
            rest = [*again, *after]
            kept += of_all.values()
        return ([*made, self._over(rest)], kept) if made else None

    def _over(self, stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
        return loop_like(self._loop, self._loop.extent, copied(sequence(stmts)))

    def _first_use(self, stmts: Sequence[tirx.Stmt]) -> int | None:
        for at, stmt in enumerate(stmts):
            if any(uses(stmt, reduced) for reduced in reduced_in(stmts[:at]) if stmt not in self._writers(reduced)):
                return at
        return None

    def _writers(self, buffer: tirx.Buffer) -> list[tirx.Stmt]:
        return [stmt for stmt, statements in self._of.items() if any(s.writes(buffer) for s in statements)]

    def _may_be_said_twice(self, stmt: tirx.Stmt) -> bool:
        """Whether a statement is the same wherever it stands before the others: it writes what its iteration alone
        sees, and reads what no other iteration writes."""
        return all(map(self._is_of_iteration, self._of.get(stmt, [])))

    def _is_of_iteration(self, statement: Statement) -> bool:
        if statement.unknown or statement.may_be_skipped:
            return False
        if (
            statement.write is None
            and not isinstance(statement.node, tirx.Bind)
            and not changes_nothing(statement.node)
        ):
            return False
        for access in statement.accesses:
            live_range = self._ranges.of(access)
            if self._loop.loop_var in {loop.var for loop in live_range.scope}:
                continue
            if any(other.writes(access.buffer) for other in self._inside):
                return False
        return True

    def _are_left(self, first: Sequence[tirx.Stmt], results: Sequence[tirx.Buffer]) -> bool:
        """Whether the first statements make all of the results, whatever the others do: nothing else does."""
        for result in results:
            writers = self._writers(result)
            readers = [stmt for stmt in first if stmt not in writers and uses(stmt, result)]
            if readers or not set(writers) <= set(first) or result not in self._kernel.root.alloc_buffers:
                return False
        return bool(results)

    def _of_all(self, buffer: tirx.Buffer) -> tirx.Buffer:
        shape = [self._loop.extent, *buffer.shape]
        return tirx.decl_buffer(shape, buffer.dtype, f"{buffer.name}_of_all", scope=buffer.scope())

    def _store(self, buffer: tirx.Buffer, into: tirx.Buffer, at: list[tirx.PrimExpr]) -> tirx.Stmt:
        return tirx.BufferStore(into, tirx.BufferLoad(buffer, at), [self._loop.loop_var, *at])

    def _of_what_is_kept(self, stmt: tirx.Stmt, of_all: Mapping[tirx.Buffer, tirx.Buffer]) -> tirx.Stmt | None:
        """A statement that reads what is kept; None where it does so as a block whose dims count."""
        used = {buffer: into for buffer, into in of_all.items() if uses(stmt, buffer)}
        if not used:
            return stmt
        records = [parse_tile_op(node) for node in nodes(stmt, tirx.Evaluate)]
        blocks = [r for r in records if r is not None and not isinstance(r, Copy)]
        if any(region.buffer in used for record in blocks for region in (record.dst, *record.sources)):
            return None
        new = with_other_dims(stmt, used, lambda _, mins, extents: ([self._loop.loop_var, *mins], [1, *extents]))
        if new is not None:
            self._of[new] = self._of.get(stmt, [])
        return new


def _leaves(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    yield from nodes(stmt, tirx.Evaluate, tirx.BufferStore, tirx.Bind)
