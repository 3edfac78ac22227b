"""Bring a kernel into the form that analysis and rewriting expect.

Negative places are those from a dim's end; index bindings are inlined; regions have constant extents where they can;
accesses through views become accesses to what they are views of; compound operations become what they are made of; grid
loops that walk two dims at once become two loops, and so do loops that do something every n iterations; loops that end
early go on, and do nothing; iterations and programs that are given up become conditions; what a print is made of
becomes one statement; rows on chip that nothing depends on go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from tvm import ir, tirx

from mesh_tensor.annotations.annotate import INFO_ATTR, MESH_ATTR
from mesh_tensor.base.recent import made_once
from mesh_tensor.tir.double_loops import unfuse, with_intervals
from mesh_tensor.tir.effects import leaves_kernel, leaves_loop, op_name, pointers, written
from mesh_tensor.tir.linear import loop_ranges
from mesh_tensor.tir.loops import forward, lengthen
from mesh_tensor.tir.nodes import is_const, loads, nodes, used
from mesh_tensor.tir.plain_statements import (
    with_places_from_the_end,
    with_plain_blocks,
    with_plain_conditions,
    with_values_in_place,
    with_wide_counters,
    without_early_exits,
    without_idle_guards,
)
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.reducers import parts_of, without_reducers
from mesh_tensor.tir.regions import Region
from mesh_tensor.tir.rewrite import call_like, loop_like, number, rewritten, sequence, with_indices
from mesh_tensor.tir.tile_calls import parse_tile_op
from mesh_tensor.tir.tile_ops import Fill
from mesh_tensor.tir.tile_position import as_helper
from mesh_tensor.tir.user_reports import mark_prints
from mesh_tensor.tir.views import resolve_views

from .padded_blocks import narrow
from .statements import body_statements
from .whole_numbers import refuse_division_by_0, refuse_overflow

ANALYSES = 64  # of what a kernel is, whatever its layout, that are kept


def normalize(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, in which every index is an expression of loop variables, every one of which is of one loop, and
    no memory goes by two names; it is not annotated.

    Raises:
        MeshTensorError: a buffer is in no memory that is known, a view is not understood, or integers are divided by 0.
    """
    return _normalized(_Source(func.without_attr(INFO_ATTR).without_attr(MESH_ATTR)))


class _Source:
    """A kernel whatever is annotated: annotating it leaves body and parameters as they are."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func

    def __hash__(self) -> int:
        return hash(self.func.body)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Source):
            return NotImplemented
        a, b = self.func, other.func
        same = a.body.same_as(b.body) and a.params.same_as(b.params) and a.buffer_map.same_as(b.buffer_map)
        return same and ir.structural_equal(a.attrs, b.attrs) and ir.structural_equal(a.ret_type, b.ret_type)


@made_once(ANALYSES)
def _normalized(source: _Source) -> tirx.PrimFunc:
    refuse_division_by_0(source.func)
    func = with_places_from_the_end(with_own_variables(source.func))
    func = without_early_exits(with_plain_blocks(with_plain_conditions(with_wide_counters(func))))
    func = without_reducers(rewritten(func, parts_of, tirx.Evaluate))
    func = without_idle_guards(with_values_in_place(_inline_bindings(func)))
    refuse_overflow(func)
    func = _with_plain_extents(with_plain_single_dims(func))
    func = with_early_fills(with_intervals(func))
    return narrow(lengthen(forward(unfuse(resolve_views(mark_prints(func))))))


def with_own_variables(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """What was made by rewriting may have a statement, or a variable, in two places."""
    unnamed = func if func.attrs and "global_symbol" in func.attrs else func.with_attr("global_symbol", "main")
    body = tirx.transform.ConvertSSA()(ir.IRModule({"main": unnamed}))["main"].body
    return func if body.same_as(func.body) else func.with_body(body)


def _with_plain_extents(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`x[k * 64 : (k + 1) * 64]` is 64 long: the extents of regions are constants where they can be."""
    analyzer = Prover()

    def plain(call: tirx.Call) -> tirx.Call | None:
        if op_name(call) != "tl.region" or all(isinstance(extent, tirx.IntImm) for extent in call.args[2:]):
            return None
        extents = [analyzer.simplify(extent) for extent in call.args[2:]]
        return call_like(call, [*call.args[:2], *extents])

    return rewritten(func, plain, tirx.Call)


def _inline_bindings(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Inline numbers, `x = by * 64 + i` bindings that load nothing, and `x = scores[i, label[i]]` that look up what
    nothing writes."""
    bound: dict[tirx.Var, tirx.PrimExpr] = {}
    binds = nodes(func.body, tirx.Bind)
    loaded = {bind.var for bind in binds if nodes(bind.value, tirx.BufferLoad)}
    changed, pointed = {*written(func.body)}, pointers(func.body)
    kept = {b for b in func.buffer_map.values() if b not in changed and b.data not in pointed}
    for bind in binds:
        if number(bind.value) is not None or _is_index(bind.value) or _is_lookup(bind.value, kept, loaded):
            bound[bind.var] = tirx.stmt_functor.substitute(bind.value, bound)
    if not bound:
        return func
    drop = set(bound)

    def remove(node: object) -> object:
        return tirx.Evaluate(0) if isinstance(node, tirx.Bind) and node.var in drop else None

    body = tirx.stmt_functor.ir_transform(func.body, None, remove, ["tirx.Bind"])
    return func.with_body(_without_noops(tirx.stmt_functor.substitute(body, bound)))


def _is_index(value: tirx.PrimExpr) -> bool:
    """Integer arithmetic that reads no memory and calls nothing but conversions and the helpers for tiles."""
    if not value.dtype.startswith(("int", "uint", "bool")):
        return False
    calls = [call for call in nodes(value, tirx.Call) if op_name(call) != "tirx.if_then_else"]
    return not nodes(value, tirx.BufferLoad) and all(as_helper(call) is not None for call in calls)


def _is_lookup(value: tirx.PrimExpr, kept: Set[tirx.Buffer], loaded: Set[tirx.Var]) -> bool:
    """Whether a value loads what data say of parameters that nothing writes."""
    read = loads(value)
    places = [index for load in read for index in load.indices]
    by_data = any(loads(index) or not loaded.isdisjoint(tirx.analysis.undefined_vars(index)) for index in places)
    return by_data and all(load.buffer in kept for load in read)


def _without_noops(body: tirx.Stmt) -> tirx.Stmt:
    def clean(node: tirx.SeqStmt) -> tirx.Stmt | None:
        kept = [s for s in node.seq if not (isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm))]
        return None if len(kept) == len(node.seq) else sequence(kept)

    return tirx.stmt_functor.ir_transform(body, None, clean, ["tirx.SeqStmt"])


def with_plain_single_dims(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`KV[b, head // 16]` of one head is `KV[b, 0]` where there are 16: the loop over heads walks no dim of it. Where
    blocks start is left: a block of 16 rows walks the only one, too. `X[T.min(b * 16 + i, 63)]` is `X[b * 16 + i]`
    where no block goes on behind 63."""
    analyzer, loops = Prover(), list(nodes(func.body, tirx.For))
    times = Counter(loop.loop_var for loop in loops)
    for loop in loops:
        if times[loop.loop_var] == 1:
            analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    blocks = {c.args[0]: list(c.args[2:]) for c in nodes(func.body, tirx.Call) if op_name(c) == "tl.region"}

    def plain(node: tirx.BufferLoad | tirx.BufferStore) -> tirx.BufferLoad | tirx.BufferStore | None:
        if node.predicate is not None:
            return None
        extents = blocks.get(node, [tirx.IntImm("int32", 1)] * len(node.indices))
        places = zip(node.indices, node.buffer.shape, extents, strict=True)
        indices = [
            _unclamped(_plain(i, size, analyzer) if is_const(extent, 1) else i, analyzer) for i, size, extent in places
        ]
        if all(new.same_as(old) for new, old in zip(indices, node.indices, strict=True)):
            return None
        return with_indices(node, indices)

    return rewritten(func, plain, tirx.BufferLoad, tirx.BufferStore)


def _plain(index: tirx.PrimExpr, size: tirx.PrimExpr, analyzer: Prover) -> tirx.PrimExpr:
    is_single = is_const(size, 1) and not isinstance(index, (tirx.IntImm, tirx.Ramp))
    return tirx.IntImm(index.dtype, 0) if is_single and analyzer.can_prove_equal(index, 0) else index


def _unclamped(index: tirx.PrimExpr, analyzer: Prover) -> tirx.PrimExpr:
    """The index without limits that it never reaches."""
    if not nodes(index, tirx.Min, tirx.Max):
        return index

    def chosen(node: tirx.Min | tirx.Max) -> tirx.PrimExpr | None:
        for one, other in ((node.a, node.b), (node.b, node.a)):
            if analyzer.can_prove(one <= other if isinstance(node, tirx.Min) else one >= other):
                return one
        return None

    return tirx.stmt_functor.ir_transform(tirx.Evaluate(index), None, chosen, ["tirx.Min", "tirx.Max"]).value


def with_early_fills(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, in which loops that find a buffer filled, and leave it filled, fill it themselves; what a loop's
    first iteration fills is filled before the loop."""
    if not any(_filled(stmt) for stmt in nodes(func.body, tirx.Evaluate)):
        return func
    func = _with_fills_before_loops(func)

    def rotated(node: tirx.SeqStmt) -> tirx.Stmt | None:
        made: list[tirx.Stmt] = []
        for stmt in node.seq:
            made += _rotated(stmt, made) if isinstance(stmt, tirx.For) else [stmt]
        return None if len(made) == len(node.seq) else sequence(made)

    return rewritten(func, rotated, tirx.SeqStmt)


def _with_fills_before_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`for k: if k == 0: fill(acc); acc += ...` as `fill(acc)`, then `for k: acc += ...`."""
    analyzer = loop_ranges(func.body)

    def hoisted(loop: tirx.For) -> tirx.Stmt | None:
        is_serial = loop.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED) and loop.thread_binding is None
        if not is_serial or leaves_loop(loop) or leaves_kernel(loop.body):
            return None
        stmts = body_statements(loop.body)
        first = [stmt for at, stmt in enumerate(stmts) if _fills_first(stmt, loop, stmts[:at])]
        if not first or not analyzer.can_prove(loop.extent >= 1):
            return None
        rest = [stmt for stmt in stmts if stmt not in first]
        body = sequence(rest or [tirx.Evaluate(0)])
        return sequence([*(stmt.then_case for stmt in first), loop_like(loop, loop.extent, body, start=loop.min)])

    return rewritten(func, hoisted, tirx.For)


def _fills_first(stmt: tirx.Stmt, loop: tirx.For, before: list[tirx.Stmt]) -> bool:
    """Whether a statement fills a buffer in the loop's first iteration alone, in which nothing uses it before."""
    if not isinstance(stmt, tirx.IfThenElse) or stmt.else_case is not None or not isinstance(stmt.condition, tirx.EQ):
        return False
    buffer, (a, b) = _filled(stmt.then_case), (stmt.condition.a, stmt.condition.b)
    if buffer is None or _last_use(before, buffer) is not None:
        return False
    return any(
        var.same_as(loop.loop_var) and ir.structural_equal(first, loop.min, map_free_vars=False)
        for var, first in ((a, b), (b, a))
    )


def _rotated(loop: tirx.For, before: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """The loop, with its last fills at the start and behind it, where what stands before it ends with them, too."""
    if not isinstance(loop.body, tirx.SeqStmt) or leaves_loop(loop) or leaves_kernel(loop):
        return [loop]
    stmts, fills = list(loop.body.seq), list[tirx.Stmt]()
    for fill in [stmt for stmt in stmts if _filled(stmt)]:
        buffer = _filled(fill)
        since = _last_use(before, buffer)
        if _last_use(stmts, buffer) is fill and since is not None and ir.structural_equal(since, fill):
            stmts.remove(fill)
            fills.append(fill)
    if not fills:
        return [loop]
    return [loop_like(loop, loop.extent, sequence([*fills, *stmts]), start=loop.min), *fills]


def _filled(stmt: tirx.Stmt) -> tirx.Buffer | None:
    """The buffer on chip all of which the statement fills with a constant."""
    record = parse_tile_op(stmt) if isinstance(stmt, tirx.Evaluate) else None
    if not isinstance(record, Fill) or isinstance(record.value, Region) or record.dst.buffer.scope() == "global":
        return None
    if nodes(tirx.Evaluate(record.value), tirx.Var, tirx.BufferLoad):
        return None
    return record.dst.buffer if record.dst.is_whole else None


def _last_use(stmts: list[tirx.Stmt], buffer: tirx.Buffer) -> tirx.Stmt | None:
    """The last statement that may read or write the buffer's memory, through views, too."""
    return next((stmt for stmt in reversed(stmts) if buffer.data in used(stmt)), None)
