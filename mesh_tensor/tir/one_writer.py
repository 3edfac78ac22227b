"""Kernels in which one of several devices writes what is in a position, and the others 0: stores that the others may
as well leave out; and what of a local kernel may not be the same on the devices that run it.

That holds of `buffer[i] = if_then_else(here, value, 0)`, if on one device, and no other, it is `here`, and if nothing
else is ever written to the position: a later zero would count no more.

What differs is what depends on where a device stands, or on tensors of which each device has a part of its own.
Everything that a statement writes differs if anything that it takes does, or what says whether it runs; memory that
differs somewhere differs everywhere, whatever is written to it before or after. What calls give of which nothing is
known differs, and so does what is added up in no fixed order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm import arith, ir, tirx
from tvm.arith.iter_affine_map import IterMapLevel

from mesh_tensor.base.dtypes import is_float

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
from .linear import vars_of
from .nodes import expressions, loads, nodes, same_expression, used
from .prover import Prover
from .rewrite import inner, number, rewritten
from .tile_position import CALLED

#: Where a device stands: the coordinates that a local kernel takes.
_At = Mapping[tirx.Var, int]


def left_to_one(
    func: tirx.PrimFunc, buffer: tirx.Buffer, devices: Sequence[_At], apart: Sequence[tirx.Buffer]
) -> tirx.PrimFunc | None:
    """The local kernel without the zeros that it writes to `buffer` on all of the `devices` but one; None if it isn't
    proved that each position is written by one of them, once. `apart`: the tensors that are not the same on all of
    the devices."""
    store = _only_use(func.body, buffer)
    if store is None or not isinstance(store.value, tirx.Call) or op_name(store.value) != "tirx.if_then_else":
        return None
    here, value, otherwise = store.value.args
    around = _around(func.body, store)
    if number(otherwise) != 0 or around is None or not _is_written_once(func, store, around):
        return None
    coordinates = {var for at in devices for var in at}
    differ = differing(func.body, coordinates | {tensor.data for tensor in apart})
    elsewhere = [*store.indices, *(expr for stmt in around for expr in deciding(stmt))]
    if depends(elsewhere, differ) or depends([here], differ - coordinates) or not _is_of_one(here, devices):
        return None

    def skip(stmt: tirx.BufferStore) -> tirx.Stmt | None:
        if not stmt.buffer.same_as(buffer):
            return None
        return tirx.IfThenElse(here, tirx.BufferStore(stmt.buffer, _with_zero(value), stmt.indices), None)

    return rewritten(func, skip, tirx.BufferStore)


def _with_zero(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """What the sum with zeros is, to the last bit: of -0.0 it is 0.0. (TVM takes `value + 0` for `value`.)"""
    if not is_float(value.dtype):
        return value
    zero = tirx.const(0, value.dtype)
    return tirx.if_then_else(tirx.EQ(value, zero), zero, value)


def _only_use(body: tirx.Stmt, buffer: tirx.Buffer) -> tirx.BufferStore | None:
    """The one store that is all that a kernel does with a buffer's memory."""
    found = [store for store in nodes(body, tirx.BufferStore) if store.buffer.data.same_as(buffer.data)]
    is_read = any(load.buffer.data.same_as(buffer.data) for load in loads(body))
    is_passed = any(var.same_as(buffer.data) for var in nodes(body, tirx.Var))
    plain = len(found) == 1 and not is_read and not is_passed and found[0].buffer.same_as(buffer)
    return found[0] if plain else None


def _around(stmt: tirx.Stmt, store: tirx.Stmt) -> list[tirx.Stmt] | None:
    """The statements around a store, outermost first; None if it isn't in there, or only as long as data says so."""
    if stmt.same_as(store):
        return []
    for child in () if isinstance(stmt, tirx.While) else inner(stmt):
        found = _around(child, store)
        if found is not None:
            return [stmt, *found]
    return None


def _is_written_once(func: tirx.PrimFunc, store: tirx.BufferStore, around: Sequence[tirx.Stmt]) -> bool:
    """Whether no two iterations of the loops around a store write to one position."""
    ranges = {
        loop.loop_var: ir.Range.from_min_extent(loop.min, loop.extent) for loop in around if isinstance(loop, tirx.For)
    }
    if any(loads(index) for index in store.indices) or not vars_of(store.indices, {}) <= {*ranges, *func.params}:
        return False
    if any(vars_of([part], {}) & ranges.keys() or loads(part) for r in ranges.values() for part in (r.min, r.extent)):
        return False
    found = arith.detect_iter_map(list(store.indices), ranges, check_level=IterMapLevel.Bijective)
    return bool(found.indices)


def _is_of_one(here: tirx.PrimExpr, devices: Sequence[_At]) -> bool:
    """Whether a condition holds on one of the devices, and on no other, whatever is loaded in it, if that is the same
    on all. Floats are left out: NaN is neither below a bound nor not."""
    coordinates = {var for at in devices for var in at}
    if nodes(here, tirx.Call) or any(vars_of(load.indices, {}) & coordinates for load in loads(here)):
        return False
    if any(is_float(part.dtype) for part in nodes(here, tirx.PrimExpr)):
        return False
    known: list[tuple[tirx.BufferLoad, tirx.Var]] = []

    def opaque(load: tirx.BufferLoad) -> tirx.PrimExpr:
        for other, var in known:
            if same_expression(load, other):
                return var
        known.append((load, tirx.Var("loaded", load.dtype)))
        return known[-1][1]

    condition = tirx.stmt_functor.ir_transform(tirx.Evaluate(here), None, opaque, ["tirx.BufferLoad"]).value
    on = [
        tirx.stmt_functor.substitute(condition, {var: tirx.IntImm(var.dtype, place) for var, place in at.items()})
        for at in devices
    ]
    analyzer, anywhere = Prover(), on[0]
    for other in on[1:]:
        anywhere = tirx.Or(anywhere, other)
    apart = (tirx.Not(tirx.And(one, other)) for n, one in enumerate(on) for other in on[:n])
    return all(map(analyzer.can_prove, (anywhere, *apart)))


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
        is_block = isinstance(stmt, tirx.SBlockRealize)
        is_plain = not is_block or (stmt.block.init is None and not len(stmt.block.match_buffers))
        parts = inner(stmt) if is_plain else []
        differs = differs or depends(deciding(stmt), self.found)
        if isinstance(stmt, tirx.For) and differs:
            self.found.add(stmt.loop_var)
        elif is_block:
            pairs = zip(stmt.block.iter_vars, stmt.iter_values, strict=True)
            self.found.update(at.var for at, value in pairs if depends([value], self.found))
        for child in parts:
            self.visit(child, differs=differs)
        if not parts:
            self._run(stmt, differs)

    def _run(self, stmt: tirx.Stmt, differs: bool) -> None:
        """A statement that holds no others."""
        if isinstance(stmt, (tirx.AllocBuffer, tirx.DeclBuffer, tirx.AssertStmt)):
            return
        known = isinstance(stmt, (tirx.BufferStore, tirx.Bind, tirx.Evaluate))
        if known and not differs and not depends(expressions(stmt), self.found):
            return
        self.found.update(pointers(stmt), (buffer.data for buffer in written(stmt)))
        if isinstance(stmt, tirx.Bind):
            self.found.add(stmt.var)
        leaves = isinstance(stmt, tirx.Evaluate) and (is_break(stmt) or op_name(stmt.value) in _LEAVES)
        if leaves or not known:
            self.found.update(used(self.body))


def deciding(stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
    """What says whether, and how often, a statement runs what it holds."""
    if isinstance(stmt, tirx.SBlockRealize):
        return [stmt.predicate]
    return expressions(stmt) if isinstance(stmt, (tirx.IfThenElse, tirx.While, tirx.For)) else []
