"""What a loop nest touches: every load and store, with the loops around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from mesh_tensor.tir.effects import changes_nothing
from mesh_tensor.tir.nodes import loads, nodes
from mesh_tensor.tir.regions import Region
from mesh_tensor.tir.tile_calls import parse_previous, parse_tile_op
from mesh_tensor.tir.tile_ops import Atomic
from mesh_tensor.tir.user_reports import is_print


@dataclass(frozen=True)
class NestLoop:
    """A loop: the id of its variable; first value and extent, where they are constants."""

    var: int
    low: int | None
    extent: int | None


@dataclass(frozen=True)
class Touch:
    """An access of a buffer: which element, whether it writes, inside which loops."""

    data: int
    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    writes: bool
    loops: tuple[NestLoop, ...]


@dataclass
class Nest:
    """Every access in a nest; the variables that it defines (`inner`), the bounds of those that are loops', the
    definitions of those that are bound to expressions without loads."""

    touches: list[Touch] = field(default_factory=list)
    binds: dict[int, tirx.PrimExpr] = field(default_factory=dict)
    inner: set[int] = field(default_factory=set)
    bounds: dict[int, tuple[tirx.PrimExpr, ...]] = field(default_factory=dict)

    @property
    def written(self) -> set[int]:
        """The buffers (by the ids of their data) that the nest writes."""
        return {t.data for t in self.touches if t.writes}

    def changes(self, exprs: Iterable[tirx.PrimExpr]) -> bool:
        """Whether expressions may have several values while the nest runs."""
        written = self.written
        return any(
            hash(node) in self.inner if isinstance(node, tirx.Var) else hash(node.buffer.data) in written
            for expr in exprs
            for node in nodes(expr, tirx.Var, tirx.BufferLoad)
        )

    def is_atom(self, expr: tirx.PrimExpr) -> bool:
        """Whether a linear form may have `expr` as a variable: a loop's variable, or what stays the same."""
        if isinstance(expr, tirx.Var):
            return hash(expr) in self.bounds or hash(expr) not in self.inner
        return not self.changes([expr])


class _InOrder(Exception):
    """The nest has something that can't run over lanes."""


def read_nest(root: tirx.For) -> Nest | None:
    """What the nest touches, or None if it has statements that can only run in order."""
    nest = Nest()
    try:
        _visit(root, (), nest)
    except _InOrder:
        return None
    return nest


def _visit(stmt: tirx.Stmt, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    visit = _VISITORS.get(type(stmt))
    if visit is None:
        raise _InOrder
    visit(stmt, loops, nest)


def _visit_for(stmt: tirx.For, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    low = _integer(stmt.min)
    loop = NestLoop(hash(stmt.loop_var), low, None if low is None else _integer(stmt.extent))
    for bound in (stmt.min, stmt.extent):
        _reads(bound, loops, nest)
    nest.inner.add(loop.var)
    nest.bounds[loop.var] = (stmt.min, stmt.extent)
    _visit(stmt.body, (*loops, loop), nest)


def _visit_seq(stmt: tirx.SeqStmt, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    for child in stmt.seq:
        _visit(child, loops, nest)


def _visit_if(stmt: tirx.IfThenElse, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    _reads(stmt.condition, loops, nest)
    _visit(stmt.then_case, loops, nest)
    if stmt.else_case is not None:
        _visit(stmt.else_case, loops, nest)


def _visit_bind(stmt: tirx.Bind, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    _reads(stmt.value, loops, nest)
    nest.inner.add(hash(stmt.var))
    if not loads(stmt.value):
        nest.binds[hash(stmt.var)] = stmt.value


def _visit_store(stmt: tirx.BufferStore, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    for expr in (stmt.value, *stmt.indices):
        _reads(expr, loops, nest)
    nest.touches.append(Touch(hash(stmt.buffer.data), stmt.buffer, tuple(stmt.indices), True, loops))


def _visit_evaluate(stmt: tirx.Evaluate, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    if isinstance(stmt.value, tirx.IntImm) or changes_nothing(stmt):
        return
    op = parse_tile_op(stmt)
    if not is_element_update(op):
        raise _InOrder
    assert isinstance(op, Atomic)
    for expr in (op.value, *op.dst.mins):
        _reads(expr, loops, nest)
    nest.touches.append(Touch(hash(op.dst.buffer.data), op.dst.buffer, op.dst.mins, True, loops))


def _visit_attr(stmt: tirx.AttrStmt, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    if is_print(stmt):
        raise _InOrder
    _visit(stmt.body, loops, nest)


_VISITORS: dict[type, Callable[[Any, tuple[NestLoop, ...], Nest], None]] = {
    tirx.For: _visit_for,
    tirx.SeqStmt: _visit_seq,
    tirx.IfThenElse: _visit_if,
    tirx.Bind: _visit_bind,
    tirx.BufferStore: _visit_store,
    tirx.Evaluate: _visit_evaluate,
    tirx.AttrStmt: _visit_attr,
}


def is_element_update(op: object) -> bool:
    """Whether a tile operation is an atomic update of one element with an expression."""
    return isinstance(op, Atomic) and not isinstance(op.value, Region) and not op.dst.long_dims


def _reads(expr: tirx.PrimExpr, loops: tuple[NestLoop, ...], nest: Nest) -> None:
    for load in loads(expr):
        nest.touches.append(Touch(hash(load.buffer.data), load.buffer, tuple(load.indices), False, loops))
    nest.inner.update(hash(let.var) for let in nodes(expr, tirx.Let))
    if nodes(expr, tirx.Ramp, tirx.Broadcast) or any(parse_previous(c) is not None for c in nodes(expr, tirx.Call)):
        raise _InOrder


def _integer(expr: tirx.PrimExpr) -> int | None:
    return int(expr.value) if isinstance(expr, tirx.IntImm) else None
