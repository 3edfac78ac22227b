"""Kernels in which one of several devices writes what is in a position, and the others 0: stores that the others may
as well leave out.

That holds of `buffer[i] = if_then_else(here, value, 0)`, if on one device, and no other, it is `here`, and if nothing
else is ever written to the position: a later zero would count no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import arith, ir, tirx
from tvm.arith.iter_affine_map import IterMapLevel

from mesh_tensor.base.dtypes import is_float

from .differing import deciding, depends, differing
from .effects import op_name
from .linear import vars_of
from .nodes import loads, nodes, same_expression
from .prover import Prover
from .rewrite import number

#: Where a device stands: the coordinates that a local kernel takes.
_At = Mapping[tirx.Var, int]
_FRAMES = (tirx.SeqStmt, tirx.AttrStmt, tirx.SBlock, tirx.SBlockRealize)


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

    body = tirx.stmt_functor.ir_transform(func.body, None, skip, ["tirx.BufferStore"])
    return func.with_body(body)


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


def _around(stmt: tirx.Stmt, inner: tirx.Stmt) -> list[tirx.Stmt] | None:
    """The statements around `inner`, outermost first; None if it isn't in there, or they are of other kinds than loops
    and conditions."""
    if stmt.same_as(inner):
        return []
    if isinstance(stmt, tirx.IfThenElse):
        children = [stmt.then_case] if stmt.else_case is None else [stmt.then_case, stmt.else_case]
    elif isinstance(stmt, tirx.SeqStmt):
        children = list(stmt.seq)
    elif isinstance(stmt, tirx.SBlockRealize):
        children = [stmt.block]
    elif isinstance(stmt, (tirx.For, *_FRAMES)):
        children = [stmt.body]
    else:
        return None
    for child in children:
        found = _around(child, inner)
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
