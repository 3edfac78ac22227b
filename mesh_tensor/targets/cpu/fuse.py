"""Loops that follow each other, joined where that changes nothing: blocks are then walked row by row, each row while it
is in the nearest cache, and what one loop leaves for the next stays in registers.

Two loops over the same range become one if, of every buffer that both touch and one writes, iteration v of either
touches only one and the same slice. Parameters may be the same memory: those of one shape and dtype count as one
buffer, others are never joined across a write. Statements in between must have nothing to do with the first loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.memory import strides_of
from mesh_tensor.tir.nodes import expressions, int_or, is_const, loads, nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import inner, sequence, statements, with_inner

from .exprs import FLOAT_FUNCTIONS, VECTORISED, is_pure_index
from .reduce import is_total

_LONG_ROW = CPU.tuning.long_row
_ROW_WORTH_A_SCALAR = CPU.tuning.long_scalar_row


def fuse_loops(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel, with its loops joined; `params` are the data of the kernel's parameters."""
    return _Fuse(params).stmt(_without_single(body))


@dataclass(frozen=True)
class MemoryAccess:
    """An element of a buffer that is read or written."""

    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    writes: bool


def accesses(stmt: tirx.Stmt) -> list[MemoryAccess] | None:
    """All accesses to memory that outlives `stmt`, or None where it does what is not plain loads and stores."""
    found: list[MemoryAccess] = []
    own: set[tirx.Var] = set()
    for part in walk(stmt):
        if isinstance(part, tirx.AllocBuffer):
            own.add(part.buffer.data)
        elif isinstance(part, tirx.BufferStore):
            found.append(MemoryAccess(part.buffer, tuple(part.indices), True))
            found += [access for expr in (part.value, *part.indices) for access in _loads(expr)]
        elif isinstance(part, tirx.For | tirx.IfThenElse):
            found += [access for expr in expressions(part) for access in _loads(expr)]
        elif not isinstance(part, tirx.SeqStmt):
            return None
    return [access for access in found if access.buffer.data not in own]


def walk(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """`stmt` and the statements in it, in order."""
    yield stmt
    for child in inner(stmt):
        yield from walk(child)


def uses_in(where: tirx.Stmt) -> Iterator[tirx.BufferLoad | tirx.BufferStore | tirx.Var]:
    """The accesses and the variables, statement by statement: what is part of several statements is found in each; what
    is the same object twice in one expression, once."""
    for part in walk(where):
        for expr in expressions(part):
            yield from nodes(expr, tirx.BufferLoad, tirx.Var)
        if isinstance(part, tirx.BufferStore):
            yield part


def contiguous(indices: tuple[tirx.PrimExpr, ...], var: tirx.Var) -> bool:
    """Whether the elements of neighbouring values of `var` are neighbours in memory."""
    if not indices:
        return False
    *outer, last = indices
    return offset(last, var, {var}) is not None and not any(uses(index, var) for index in outer)


def uses(expr: tirx.PrimExpr, var: tirx.Var) -> bool:
    """Whether `var` is in `expr`."""
    return any(var.same_as(found) for found in tirx.analysis.undefined_vars(expr))


def bytes_of_step(access: MemoryAccess, var: tirx.Var) -> int:
    """How far apart the elements of neighbouring values of `var` are; -1 where that isn't constant."""
    distance = 0
    for index, stride in zip(access.indices, strides_of(access.buffer), strict=True):
        distance = distance + (substitute(index, {var: var + 1}) - index) * stride
    return int_or(Prover().simplify(distance), -1) * itemsize(access.buffer.dtype) if access.indices else -1


def _loads(expr: tirx.PrimExpr) -> list[MemoryAccess]:
    return [MemoryAccess(load.buffer, tuple(load.indices), False) for load in loads(expr)]


def offset(index: tirx.PrimExpr, var: tirx.Var, bound: set[tirx.Var]) -> tirx.PrimExpr | None:
    """`index - var`, if that is the same whatever the variables in `bound` are."""
    if not is_pure_index(index) or index.dtype != var.dtype:
        return None
    rest = Prover().simplify(index - var)
    return None if bound.intersection(tirx.analysis.undefined_vars(rest)) else rest


class _Fuse:
    def __init__(self, params: frozenset[tirx.Var]) -> None:
        self._params = params

    def stmt(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            return sequence(self._sequence(statements(stmt)))
        return with_inner(stmt, self.stmt)

    def _sequence(self, parts: list[tirx.Stmt]) -> list[tirx.Stmt]:
        kept: list[tirx.Stmt] = []
        for part in parts:
            place = self._partner(kept, part) if isinstance(part, tirx.For) else None
            kept.append(part if place is None else _joined(kept.pop(place), part))
        return [self.stmt(part) for part in kept]

    def _partner(self, before: list[tirx.Stmt], loop: tirx.For) -> int | None:
        """Which of the statements before `loop` is a loop that may move down to it and be joined with it."""
        mine = accesses(loop)
        if mine is None:
            return None
        for place in range(len(before) - 1, -1, -1):
            if isinstance(before[place], tirx.For) and self._joinable(before[place], loop, mine):
                theirs = accesses(before[place]) or []
                passed = [accesses(stmt) for stmt in before[place + 1 :]]
                return place if all(p is not None and not self._conflict(theirs, p) for p in passed) else None
            if accesses(before[place]) is None:
                return None
        return None

    def _conflict(self, first: list[MemoryAccess], second: list[MemoryAccess]) -> bool:
        return any((a.writes or b.writes) and same_memory(a, b, self._params) for a in first for b in second)

    def _joinable(self, first: tirx.For, second: tirx.For, mine: list[MemoryAccess]) -> bool:
        if not (_same_range(first, second) and _worthwhile(first, second)):
            return False
        theirs = accesses(first)
        if theirs is None:
            return False
        bound = {part.loop_var for loop in (first, second) for part in walk(loop) if isinstance(part, tirx.For)}
        return not any(
            (a.writes or b.writes)
            and same_memory(a, b, self._params)
            and not in_step(a, first.loop_var, b, second.loop_var, bound)
            for a in theirs
            for b in mine
        )


def same_memory(a: MemoryAccess, b: MemoryAccess, params: frozenset[tirx.Var]) -> bool:
    """Whether both may be of the same memory; `params` are the data of the kernel's parameters."""
    return a.buffer.data.same_as(b.buffer.data) or {a.buffer.data, b.buffer.data} <= params


def in_step(a: MemoryAccess, a_var: tirx.Var, b: MemoryAccess, b_var: tirx.Var, bound: set[tirx.Var]) -> bool:
    """Whether the same iteration of both loops touches the same slice along some dim, and no other iteration does."""
    x, y = a.buffer, b.buffer
    pairs = [*zip(x.shape, y.shape, strict=False), *zip(x.strides, y.strides, strict=False)]
    same_form = x.dtype == y.dtype and len(x.shape) == len(y.shape) and len(x.strides) == len(y.strides)
    if not x.same_as(y) and not (same_form and not x.data.same_as(y.data) and all(_equal(*pair) for pair in pairs)):
        return False
    for i, j in zip(a.indices, b.indices, strict=True):
        left, right = offset(i, a_var, bound), offset(j, b_var, bound)
        if left is not None and right is not None and _equal(left, right):
            return True
    return False


def _equal(a: tirx.PrimExpr, b: tirx.PrimExpr) -> bool:
    return a.dtype == b.dtype and Prover().can_prove_equal(a, b)


def _same_range(first: tirx.For, second: tirx.For) -> bool:
    ends = (first.min, second.min), (first.extent, second.extent)
    plain = first.step is None and second.step is None
    return plain and all(is_pure_index(a) and is_pure_index(b) and _equal(a, b) for a, b in ends)


def _worthwhile(first: tirx.For, second: tirx.For) -> bool:
    """Rows have to be long: short ones are better left to the compiler, which then works on several at once."""
    rows = [_row_lengths(loop) for loop in (first, second)]
    if not any(rows):
        return _vectorises(first) and _vectorises(second)
    least = _LONG_ROW if all(rows) else _ROW_WORTH_A_SCALAR
    return all(length >= least for lengths in rows for length in lengths)


def _row_lengths(loop: tirx.For) -> list[int]:
    """The numbers of iterations of the loops in `loop` that hold no other; 0 where it isn't constant."""
    inner = [part for part in walk(loop.body) if isinstance(part, tirx.For)]
    last = [part for part in inner if not any(isinstance(p, tirx.For) for p in walk(part.body))]
    return [int(part.extent) if isinstance(part.extent, tirx.IntImm) else 0 for part in last if not _of_lanes(part)]


def _of_lanes(loop: tirx.For) -> bool:
    """Whether the loop only starts or ends a reduction."""
    return all(access.buffer.name == "totals" for access in accesses(loop.body) or [])


def _vectorises(loop: tirx.For) -> bool:
    """Whether compilers are known to vectorise the loop: everything is read and written in order, or is a total."""
    var = loop.loop_var
    for part in statements(loop.body):
        if not isinstance(part, tirx.BufferStore) or not _plain(part.value):
            return False
        if not contiguous(tuple(part.indices), var) and not is_total(part, var):
            return False
        for load in _loads(part.value):
            if load.buffer.same_as(part.buffer):
                in_order = all(map(_equal, load.indices, part.indices))
            else:
                in_order = contiguous(load.indices, var) or not any(uses(index, var) for index in load.indices)
            if not in_order:
                return False
    return True


def _plain(value: tirx.PrimExpr) -> bool:
    calls = nodes(value, tirx.Call)
    return not nodes(value, tirx.Select) and all(FLOAT_FUNCTIONS.get(op_name(c)) in VECTORISED for c in calls)


def _without_single(stmt: tirx.Stmt) -> tirx.Stmt:
    """`stmt` without loops of one iteration, so that dims of extent 1 are in nobody's way."""
    loop = with_inner(stmt, _without_single)
    is_single = isinstance(loop, tirx.For) and is_const(loop.extent, 1) and is_pure_index(loop.min)
    # Where there are other statements than plain ones, one of them may be a `break`.
    return substitute(loop.body, {loop.loop_var: loop.min}) if is_single and accesses(loop) is not None else loop


def _joined(first: tirx.For, second: tirx.For) -> tirx.For:
    body = substitute(second.body, {second.loop_var: first.loop_var})
    return with_inner(first, lambda mine: sequence([*statements(mine), *statements(body)]))
