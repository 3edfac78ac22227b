"""Tile operations as plain loops.

What lies outside a buffer is never touched: where a block may reach past the end, the loops are clipped (for what is
written) and loads are guarded (for what is read, which is then 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.memory import strides_of
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.regions import Region, deeper
from mesh_tensor.tir.rewrite import neutral_element, sequence
from mesh_tensor.tir.tile_calls import parse_previous
from mesh_tensor.tir.tile_ops import Atomic, Copy, Fill, Gemm, Reduce, Scan, TileOp, Transpose

from .dtypes import compute_dtype
from .exprs import GEMM, Bounds, LoopRange, all_of, cast, combine, const, if_then, loop_nest, map_children, temporary
from .reduce import ReduceLoops


class TileOps:
    """Expands the tile operations of one kernel."""

    def __init__(self, bounds: Bounds, safe_values: dict[tirx.Var, tirx.PrimExpr], kernel: str) -> None:
        self._bounds = bounds
        self._safe_values = safe_values
        self._kernel = kernel
        self._table: dict[type, Callable[..., tirx.Stmt]] = {
            Copy: self._copy,
            Fill: self._fill,
            Gemm: self._gemm,
            Reduce: self._reduce,
            Atomic: self._atomic,
            Scan: self._scan,
            Transpose: self._transpose,
        }

    def expand(self, op: TileOp) -> tirx.Stmt:
        """Plain loops that do what `op` does."""
        return self._table[type(op)](op)

    def _copy(self, op: Copy) -> tirx.Stmt:
        safe = self._safe_values.get(op.src.buffer.data, const(0, op.src.buffer.dtype))
        return self._elementwise(op.src, op.dst, lambda _, value: value, safe)

    def _atomic(self, op: Atomic) -> tirx.Stmt:
        def update(old: tirx.PrimExpr, value: tirx.PrimExpr) -> tirx.PrimExpr:
            return combine(op.reduction, old, value)

        if isinstance(op.value, Region):
            return self._elementwise(op.value, op.dst, update, neutral_element(op.reduction, op.value.buffer.dtype))
        return self._over(op.dst, lambda old: update(old, cast(op.value, op.dst.buffer.dtype)))

    def _fill(self, op: Fill) -> tirx.Stmt:
        value = cast(op.value, op.dst.buffer.dtype)
        return self._over(op.dst, lambda _: value)

    def _over(self, dst: Region, value_of: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> tirx.Stmt:
        """Store `value_of(old value)` to every element of `dst`."""
        loops, indices, conditions = self._walk(dst, [tirx.Var(f"i{d}", "int32") for d in dst.long_dims])
        old = tirx.BufferLoad(dst.buffer, indices)
        store = tirx.BufferStore(dst.buffer, value_of(old), indices)
        return if_then(all_of(conditions), loop_nest(loops, store))

    def _walk(
        self, region: Region, variables: Sequence[tirx.Var]
    ) -> tuple[list[LoopRange], list[tirx.PrimExpr], list[tirx.PrimExpr]]:
        """Loops over the long dims of `region` clipped to its buffer, the indices, and what the other dims ask for."""
        indices = list(region.mins)
        loops: list[LoopRange] = []
        conditions: list[tirx.PrimExpr] = []
        for dim, size in enumerate(region.buffer.shape):
            if dim not in region.long_dims:
                conditions += self._bounds.outside(region.mins[dim], size)
                continue
            var = variables[len(loops)]
            loops.append((var, *self._bounds.clip(region.mins[dim], region.extents[dim], size)))
            indices[dim] = region.mins[dim] + var
        return loops, indices, conditions

    def _elementwise(
        self,
        src: Region,
        dst: Region,
        update: Callable[[tirx.PrimExpr, tirx.PrimExpr], tirx.PrimExpr],
        outside: tirx.PrimExpr,
    ) -> tirx.Stmt:
        """`dst[...] = update(dst[...], cast(src[...]))` for every element; what is outside `src` reads as `outside`."""
        src, dst = self._paired(src, dst)
        variables = [tirx.Var(f"i{d}", "int32") for d in range(len(dst.long_dims))]
        loops, dst_indices, conditions = self._walk(dst, variables)
        src_loops, src_indices, src_conditions = self._walk(src, variables)

        def nest(value: tirx.PrimExpr) -> tirx.Stmt:
            new = update(tirx.BufferLoad(dst.buffer, dst_indices), cast(value, dst.buffer.dtype))
            return loop_nest(loops, tirx.BufferStore(dst.buffer, new, dst_indices))

        load = tirx.BufferLoad(src.buffer, src_indices)
        covered, element = list(src_conditions), list(src_conditions)
        for (var, begin, end), (_, src_begin, src_end) in zip(loops, src_loops, strict=True):
            if not self._bounds.proves(src_begin <= begin):
                covered.append(src_begin <= begin)
                element.append(src_begin <= var)
            if not self._bounds.proves(end <= src_end):
                covered.append(end <= src_end)
                element.append(var < src_end)
        whole = all_of(covered)
        body = nest(load)
        if whole is not None:
            guarded = tirx.Select(all_of(element), load, cast(outside, src.buffer.dtype))
            body = tirx.IfThenElse(whole, body, nest(guarded))
        return if_then(all_of(conditions), body)

    def _paired(self, src: Region, dst: Region) -> tuple[Region, Region]:
        """Both with the extents of the one that is deeper in the memory hierarchy, as TileLang takes them."""
        if len(src.long_dims) != len(dst.long_dims):
            refuse(
                f"a block of {_describe(src)} can't be paired with a block of {_describe(dst)}",
                where=f"kernel '{self._kernel}'",
                why="they differ in the number of dims longer than 1",
                fix="copy regions whose shapes agree, dims of extent 1 aside",
            )
        if deeper(src, dst) is src:
            return src, _with_long_extents(dst, src)
        return _with_long_extents(src, dst), dst

    def _transpose(self, op: Transpose) -> tirx.Stmt:
        rows, columns = op.src.mins[-2:], op.src.extents[-2:]
        i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
        self._bounds.loop(i, const(0, "int32"), columns[0])
        self._bounds.loop(j, const(0, "int32"), columns[1])
        src = [*op.src.mins[:-2], rows[0] + i, rows[1] + j]
        dst = [*op.dst.mins[:-2], op.dst.mins[-2] + j, op.dst.mins[-1] + i]
        store = tirx.BufferStore(op.dst.buffer, cast(self._load(op.src.buffer, src), op.dst.buffer.dtype), dst)
        guarded = if_then(all_of(self._bounds.guard(op.dst.buffer, dst)), store)
        zero = const(0, "int32")
        return loop_nest([(j, zero, columns[1]), (i, zero, columns[0])], guarded)

    def _load(self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        load = tirx.BufferLoad(buffer, list(indices))
        guard = all_of(self._bounds.guard(buffer, indices))
        return load if guard is None else tirx.Select(guard, load, const(0, buffer.dtype))

    def _reduce(self, op: Reduce) -> tirx.Stmt:
        return ReduceLoops(op, self._bounds, self._load).build()

    def _scan(self, op: Scan) -> tirx.Stmt:
        variables = [tirx.Var(f"i{d}", "int32") for d in range(len(op.src.extents))]
        zero, along = const(0, "int32"), op.src.extents[op.dim]
        for var, extent in zip(variables, op.src.extents, strict=True):
            self._bounds.loop(var, zero, extent)
        place: list[tirx.PrimExpr] = list(variables)
        if op.reverse:
            place[op.dim] = along - 1 - variables[op.dim]
        dtype = compute_dtype(op.dst.buffer.dtype)
        total = temporary("total", dtype)
        src = [start + at for start, at in zip(op.src.mins, place, strict=True)]
        dst = [start + at for start, at in zip(op.dst.mins, place, strict=True)]
        running = tirx.BufferLoad(total, [zero])
        step = sequence(
            [
                tirx.BufferStore(
                    total, combine(op.reduction, running, cast(self._load(op.src.buffer, src), dtype)), [zero]
                ),
                tirx.BufferStore(op.dst.buffer, cast(running, op.dst.buffer.dtype), dst),
            ]
        )
        start = tirx.BufferStore(total, neutral_element(op.reduction, dtype), [zero])
        row = sequence([tirx.AllocBuffer(total), start, loop_nest([(variables[op.dim], zero, along)], step)])
        outer = [(v, zero, e) for d, (v, e) in enumerate(zip(variables, op.src.extents, strict=True)) if d != op.dim]
        return loop_nest(outer, row)

    def _gemm(self, op: Gemm) -> tirx.Stmt:
        for region in (op.a, op.b, op.dst):
            if not all(self._inside(region, dim) for dim in range(len(region.extents))):
                refuse(
                    f"T.gemm over {_describe(region)} reaches past the buffer",
                    where=f"kernel '{self._kernel}'",
                    fix="copy the block to a shared buffer first: T.copy fills what lies outside with 0",
                )
        m, n = op.dst.extents[-2:]
        k = op.a.extents[-2] if op.trans_a else op.a.extents[-1]
        a_strides = strides_of(op.a.buffer)[-2:]
        b_strides = strides_of(op.b.buffer)[-2:]
        a_m, a_k = reversed(a_strides) if op.trans_a else a_strides
        b_k, b_n = reversed(b_strides) if op.trans_b else b_strides
        c_m, c_n = strides_of(op.dst.buffer)[-2:]
        pointers = [tirx.address_of(tirx.BufferLoad(r.buffer, list(r.mins))) for r in (op.a, op.b, op.dst)]
        name = GEMM + "_".join(r.buffer.dtype for r in (op.a, op.b, op.dst))
        sizes = [cast(e, "int64") for e in (m, n, k, a_m, a_k, b_k, b_n, c_m, c_n)]
        call = tirx.call_extern("void", name, *pointers, *sizes, const(op.clears, "int32"))
        return tirx.Evaluate(call)

    def _inside(self, region: Region, dim: int) -> bool:
        start, extent, size = region.mins[dim], region.extents[dim], region.buffer.shape[dim]
        return self._bounds.proves(start >= 0) and self._bounds.proves(start + extent <= size)


def _with_long_extents(region: Region, base: Region) -> Region:
    extents = list(region.extents)
    for dim, base_dim in zip(region.long_dims, base.long_dims, strict=True):
        extents[dim] = base.extents[base_dim]
    return Region(region.buffer, region.mins, tuple(extents))


def _describe(region: Region) -> str:
    return f"'{region.buffer.name}' ({', '.join(str(e) for e in region.extents)})"


def update_before_use(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with the old values of atomics in variables. Those that are not always computed, such as one in an arm
    of `T.if_then_else`, stay."""
    kinds = [f"tirx.{kind}" for kind in ("BufferStore", "Bind", "Evaluate", "IfThenElse")]
    return func.with_body(tirx.stmt_functor.ir_transform(func.body, None, _hoisted, kinds))


def _hoisted(stmt: tirx.Stmt) -> tirx.Stmt | None:
    before: list[tirx.Stmt] = []

    def taken(expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return _taken(expr, before)

    new = _REBUILD[type(stmt)](stmt, taken)
    alone = isinstance(new, tirx.Evaluate) and isinstance(new.value, tirx.Var)
    return sequence(before if alone else [*before, new]) if before else None


_REBUILD: dict[type, Callable[..., tirx.Stmt]] = {
    tirx.BufferStore: lambda s, f: tirx.BufferStore(s.buffer, f(s.value), [f(index) for index in s.indices]),
    tirx.Bind: lambda s, f: tirx.Bind(s.var, f(s.value)),
    tirx.Evaluate: lambda s, f: tirx.Evaluate(f(s.value)) if parse_previous(s.value) else s,
    tirx.IfThenElse: lambda s, f: tirx.IfThenElse(f(s.condition), s.then_case, s.else_case),
}


def _taken(expr: tirx.PrimExpr, before: list[tirx.Stmt]) -> tirx.PrimExpr:
    """The expression with the atomics in it replaced by variables, which `before` sets."""
    atomic = parse_previous(expr)
    if atomic is not None:
        return _previous(atomic, before)
    if isinstance(expr, (tirx.And, tirx.Or, tirx.Select, tirx.Let)) or op_name(expr) == "tirx.if_then_else":
        return expr
    if not any(parse_previous(call) for call in nodes(expr, tirx.Call)):
        return expr
    return map_children(expr, lambda child: _taken(child, before))


def _previous(atomic: Atomic, before: list[tirx.Stmt]) -> tirx.PrimExpr:
    assert isinstance(atomic.value, tirx.PrimExpr)
    place = tirx.BufferLoad(atomic.dst.buffer, [_taken(index, before) for index in atomic.dst.mins])
    value = cast(_taken(atomic.value, before), place.dtype)
    previous = tirx.Var("previous", place.dtype)
    before.append(tirx.Bind(previous, place))
    before.append(tirx.BufferStore(place.buffer, combine(atomic.reduction, previous, value), place.indices))
    return previous
