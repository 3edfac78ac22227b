"""What of a local kernel may not be the same on the devices that run it: what depends on where a device stands, or on
tensors of which each device has a part of its own.

Everything that a statement writes differs if anything that it takes does, or what says whether it runs; memory that
differs somewhere differs everywhere, whatever is written to it before or after. What calls give of which nothing is
known differs, and so does what is added up in no fixed order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tvm import tirx

from .effects import (
    INTRINSICS,
    LEAVES_ITERATION,
    LEAVES_KERNEL,
    NO_EFFECT,
    OF_A_PROGRAM,
    POINTERS,
    is_break,
    op_name,
    pointers,
    written,
)
from .nodes import loads, nodes
from .tile_position import CALLED

_THREAD = "tl.launch_thread_idx"
_SAME = (INTRINSICS.keys() | NO_EFFECT | OF_A_PROGRAM | POINTERS | {_THREAD}) - CALLED.keys()
_LEAVES = LEAVES_ITERATION | LEAVES_KERNEL


def differing(body: tirx.Stmt, apart: Iterable[tirx.Var]) -> set[tirx.Var]:
    """The variables, and the memory (as the variables of buffers' data), that may differ between devices if those that
    are `apart` do."""
    found, before = set(apart), -1
    while len(found) > before:
        before = len(found)
        _Walk(body, found).visit(body, differs=False)
    return found


def depends(exprs: Iterable[tirx.PrimExpr], found: Collection[tirx.Var]) -> bool:
    """Whether any of the expressions may be something else on another device, if all that was `found` may."""
    for expr in exprs:
        if any(var in found for var in ([expr] if isinstance(expr, tirx.Var) else nodes(expr, tirx.Var))):
            return True
        if any(load.buffer.data in found for load in loads(expr)):
            return True
        if any(op_name(call) not in _SAME or "atomic" in op_name(call) for call in nodes(expr, tirx.Call)):
            return True
    return False


@dataclass(frozen=True, eq=False)
class _Walk:
    """A walk over what is in `body`; `found` grows by what is written there."""

    body: tirx.Stmt
    found: set[tirx.Var]

    def visit(self, stmt: tirx.Stmt, *, differs: bool) -> None:
        """`differs`: whether devices may differ in whether, or how often, they run it."""
        if isinstance(stmt, tirx.SeqStmt):
            for child in stmt.seq:
                self.visit(child, differs=differs)
            return
        inner = [child for child in _inside(stmt) if child is not None]
        differs = differs or depends(deciding(stmt), self.found)
        if isinstance(stmt, tirx.For) and differs:
            self.found.add(stmt.loop_var)
        elif isinstance(stmt, tirx.SBlockRealize):
            pairs = zip(stmt.block.iter_vars, stmt.iter_values, strict=True)
            self.found.update(at.var for at, value in pairs if depends([value], self.found))
        for child in inner:
            self.visit(child, differs=differs)
        if not inner:
            self._run(stmt, differs)

    def _run(self, stmt: tirx.Stmt, differs: bool) -> None:
        """A statement that holds no others."""
        if isinstance(stmt, (tirx.AllocBuffer, tirx.DeclBuffer, tirx.AssertStmt)):
            return
        known = isinstance(stmt, (tirx.BufferStore, tirx.Bind, tirx.Evaluate))
        if known and not differs and not depends(_taken(stmt), self.found):
            return
        self.found.update(pointers(stmt), (buffer.data for buffer in written(stmt)))
        if isinstance(stmt, tirx.Bind):
            self.found.add(stmt.var)
        leaves = isinstance(stmt, tirx.Evaluate) and (is_break(stmt) or op_name(stmt.value) in _LEAVES)
        if leaves or not known:
            accesses = nodes(self.body, tirx.BufferLoad, tirx.BufferStore)
            self.found.update((access.buffer.data for access in accesses), nodes(self.body, tirx.Var))


def _taken(stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
    return [stmt.value, *(stmt.indices if isinstance(stmt, tirx.BufferStore) else ())]


def deciding(stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
    """What says whether, and how often, a statement runs what it holds."""
    if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
        return [stmt.condition]
    if isinstance(stmt, tirx.SBlockRealize):
        return [stmt.predicate]
    return [stmt.min, stmt.extent] if isinstance(stmt, tirx.For) else []


def _inside(stmt: tirx.Stmt) -> list[tirx.Stmt | None]:
    """What a statement holds, if it is one that may hold others and that is all of it."""
    if isinstance(stmt, tirx.IfThenElse):
        return [stmt.then_case, stmt.else_case]
    if isinstance(stmt, tirx.SBlockRealize):
        return [stmt.block]
    is_plain_block = isinstance(stmt, tirx.SBlock) and stmt.init is None and not len(stmt.match_buffers)
    return [stmt.body] if is_plain_block or isinstance(stmt, (tirx.For, tirx.While, tirx.AttrStmt)) else []
