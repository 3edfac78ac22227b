"""Reductions in steps of as many elements as there are totals, with memory asked for before it is needed.

`for i: totals[i % LANES] += x[i]` becomes `for chunk: for lane: totals[lane] += x[chunk * LANES + lane]`, which
compilers vectorise. A kernel over rows computes and waits for memory in turns; so each step of such a loop, unless it
uses memory outside of blocks itself, also asks for what the loops beside it read of the next row, and write of this
one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from mesh_tensor.tir.rewrite import sequence, statements, with_inner

from .exprs import PREFETCH, const, is_pure_index, loop_nest
from .fuse import MemoryAccess, accesses, contiguous, walk
from .reduce import LANES, is_total

_PREFETCHED = ("float16", "bfloat16", "float32", "float64")
_ZERO = const(0, "int32")


def step_by_lanes(body: tirx.Stmt, params: frozenset[tirx.Var]) -> tirx.Stmt:
    """`body`, a re-targeted kernel, with its reductions in steps; `params` are the data of the kernel's parameters."""
    siblings = statements(body)
    return sequence([_one(place, siblings, params) for place in range(len(siblings))])


def _one(place: int, siblings: Sequence[tirx.Stmt], params: frozenset[tirx.Var]) -> tirx.Stmt:
    stmt = siblings[place]
    if not isinstance(stmt, tirx.For) or not _has_totals(stmt):
        return with_inner(stmt, lambda body: step_by_lanes(body, params))
    return _steps(stmt, [] if _rows(stmt, stmt, params) else _wanted(place, siblings, params))


def _wanted(place: int, siblings: Sequence[tirx.Stmt], params: frozenset[tirx.Var]) -> list[MemoryAccess]:
    """What is worth asking for during the loop at `place`."""
    loop = siblings[place]
    written = [a for other in siblings[place + 1 :] for a in _rows(other, loop, params) if a.writes]
    read = [a for other in siblings[:place] for a in _rows(other, loop, params) if not a.writes]
    return [*written, *(_next_row(access) for access in read if len(access.indices) > 1)]


def _has_totals(loop: tirx.For) -> bool:
    if not isinstance(loop.extent, tirx.IntImm) or getattr(loop.min, "value", -1) != 0 or loop.step is not None:
        return False
    parts = statements(loop.body)
    return any(isinstance(part, tirx.BufferStore) and is_total(part, loop.loop_var) for part in parts)


def _rows(other: tirx.Stmt, loop: tirx.For, params: frozenset[tirx.Var]) -> list[MemoryAccess]:
    """What `other`, a loop as long as `loop`, accesses of the kernel's parameters one element after the other, in terms
    of `loop`'s variable; at places that are known without it: what they are read from may be guarded there."""
    if not isinstance(other, tirx.For) or int(loop.extent) != getattr(other.extent, "value", -1):
        return []
    inner = {part.loop_var for part in walk(other.body) if isinstance(part, tirx.For)}
    return [
        MemoryAccess(a.buffer, tuple(substitute(i, {other.loop_var: loop.loop_var}) for i in a.indices), a.writes)
        for a in accesses(other) or []
        if a.buffer.data in params
        and a.buffer.dtype in _PREFETCHED
        and contiguous(a.indices, other.loop_var)
        and all(is_pure_index(i) and inner.isdisjoint(tirx.analysis.undefined_vars(i)) for i in a.indices)
    ]


def _next_row(access: MemoryAccess) -> MemoryAccess:
    *outer, row, column = access.indices
    return MemoryAccess(access.buffer, (*outer, row + 1, column), access.writes)


def _steps(loop: tirx.For, prefetched: Sequence[MemoryAccess]) -> tirx.Stmt:
    chunk, lane = tirx.Var("chunk", "int32"), tirx.Var("lane", "int32")
    whole, rest = divmod(int(loop.extent), LANES)

    def at(position: tirx.PrimExpr, node: tirx.Stmt) -> tirx.Stmt:
        return substitute(node, {loop.loop_var: position})

    body = _in_lane(loop, lane)
    requests = [at(chunk * LANES, _prefetch(access)) for access in prefetched]
    step = loop_nest([(lane, _ZERO, const(LANES, "int32"))], at(chunk * LANES + lane, body))
    steps = loop_nest([(chunk, _ZERO, const(whole, "int32"))], sequence([*requests, step]))
    if not rest:
        return steps
    return sequence([steps, loop_nest([(lane, _ZERO, const(rest, "int32"))], at(lane + whole * LANES, body))])


def _in_lane(loop: tirx.For, lane: tirx.Var) -> tirx.Stmt:
    """The body of `loop` with `lane` for `loop_var % LANES`."""

    def replace(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
        is_lane = node.a.same_as(loop.loop_var) and getattr(node.b, "value", None) == LANES
        return lane if is_lane else None

    return ir_transform(loop.body, None, replace, ["tirx.FloorMod"])


def _prefetch(access: MemoryAccess) -> tirx.Stmt:
    address = tirx.address_of(tirx.BufferLoad(access.buffer, list(access.indices)))
    name = PREFETCH + access.buffer.dtype
    return tirx.Evaluate(tirx.call_extern("void", name, address, const(access.writes, "int32")))
