"""`T.alloc_reducer`: sums (and more) that threads make parts of, and that are complete once they are finalized; and
operations that are made of others: what each stands for, in statements that everything understands.

What a reducer means is said by plain statements on a buffer of scope `local.reducer`: a fill, updates, a copy to where
it ends. Everything but a GPU's code generator goes by these; for that one they become a reducer again.

An operation that has a function in `COMPOUND` needs nothing anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.reductions import REDUCTIONS

from .effects import op_name
from .nodes import function_name, nodes
from .regions import Region
from .rewrite import block_like, exchange_buffers, neutral_element, parallel_nest, sequence, tile_op, with_args
from .tile_calls import parse_tile_op
from .tile_ops import Copy, Fill, Gemm

_SCOPE = "local.reducer"
_INFO, _OLD_INFO = "reducer_info_v2", "reducer_info"
_INIT, _UPDATE = "tl.tileop.reducer_init", "tl.reducer_update"
_FINALIZE, _OLD_FINALIZE = "tl.tileop.finalize_reducer_v2", "tl.tileop.finalize_reducer"
_COMBINED: dict[str, Callable[[tirx.PrimExpr, tirx.PrimExpr], tirx.PrimExpr]] = {
    "sum": lambda a, b: a + b,
    "max": tirx.max,
    "min": tirx.min,
    "bitand": lambda a, b: a & b,
    "bitor": lambda a, b: a | b,
    "bitxor": lambda a, b: a ^ b,
}
_OPS = {(r.tir if r.tir[0].isupper() else f"tirx.{r.tir}"): op for op, r in REDUCTIONS.items() if op in _COMBINED}


def has_reducers(func: tirx.PrimFunc) -> bool:
    """Whether a kernel has reducers, in either form."""
    return any(b.scope() == _SCOPE for block in nodes(func.body, tirx.SBlock) for b in block.alloc_buffers)


def without_reducers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with fills, updates and copies for what it does with reducers. Refused where a reducer is read, or
    stored to, by anything else."""
    ops = {
        data: str(info["op"])
        for block in nodes(func.body, tirx.SBlock)
        for data, info in block.annotations.get(_INFO, {}).items()
    }

    def plain(stmt: tirx.Evaluate) -> tirx.Stmt | None:
        call, name = stmt.value, op_name(stmt.value)
        if name == _FINALIZE:
            return tile_op("copy", *call.args[:2])
        if name not in (_INIT, _UPDATE):
            return None
        load = call.args[0] if name == _UPDATE else call.args[0].args[0]
        op = ops[load.buffer.data]
        if name == _UPDATE:
            return tirx.BufferStore(load.buffer, _COMBINED[op](load, call.args[1]), load.indices)
        start = call.args[1] if len(call.args) > 1 else neutral_element(op, load.buffer.dtype)
        return tile_op("fill", call.args[0], start)

    _check_uses(func)
    body = tirx.stmt_functor.ir_transform(func.body, None, plain, ["tirx.Evaluate"])
    if not body.same_as(func.body):
        func = func.with_body(tirx.stmt_functor.ir_transform(body, None, _without_info, ["tirx.SBlock"]))
    return _without_older(func)


def _without_older(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """TileLang's older form is a fragment with ordinary updates, which is finalized in place: from its fill to there,
    it is a buffer of its own that was a reducer."""
    if not any(op_name(call) == _OLD_FINALIZE for call in nodes(func.body, tirx.Call)):
        return func
    made: dict[tirx.Buffer, tirx.Buffer] = {}

    def renamed(seq: tirx.SeqStmt) -> tirx.Stmt | None:
        stmts = list(seq.seq)
        for end, stmt in enumerate(stmts):
            if not isinstance(stmt, tirx.Evaluate) or op_name(stmt.value) != _OLD_FINALIZE:
                continue
            region = stmt.value.args[0]
            buffer = region.args[0].buffer
            starts = [at for at, other in enumerate(stmts[:end]) if _fills(other, buffer)]
            if starts and buffer not in made:
                new = made[buffer] = tirx.decl_buffer(buffer.shape, buffer.dtype, f"{buffer.name}_parts", scope=_SCOPE)
                stmts[starts[-1] : end] = [exchange_buffers(s, {buffer: new}) for s in stmts[starts[-1] : end]]
                stmts[end] = tile_op("copy", exchange_buffers(tirx.Evaluate(region), {buffer: new}).value, region)
        return tirx.SeqStmt(stmts) if any(a is not b for a, b in zip(stmts, seq.seq, strict=True)) else None

    def holding(block: tirx.SBlock) -> tirx.SBlock | None:
        new = [made[b] for b in block.alloc_buffers if b in made]
        kept = {key: value for key, value in block.annotations.items() if key != _OLD_INFO}
        return block_like(block, block.body, [*block.alloc_buffers, *new], annotations=kept) if new else None

    body = tirx.stmt_functor.ir_transform(func.body, None, renamed, ["tirx.SeqStmt"])
    return func.with_body(tirx.stmt_functor.ir_transform(body, None, holding, ["tirx.SBlock"]))


def _fills(stmt: tirx.Stmt, buffer: tirx.Buffer) -> bool:
    record = parse_tile_op(stmt)
    return isinstance(record, Fill) and record.dst.buffer.same_as(buffer)


def as_reducers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel for a GPU: what it does with buffers that were reducers is done with reducers again. Refused where
    such a buffer is used in a way in which reducers can't."""
    if not has_reducers(func):
        return func
    ops: dict[tirx.Buffer, str] = {}

    def as_reducer(stmt: tirx.Stmt) -> tirx.Stmt | None:
        if isinstance(stmt, tirx.BufferStore):
            return _update(stmt, ops) if stmt.buffer.scope() == _SCOPE else None
        record = parse_tile_op(stmt)
        if isinstance(record, Fill) and record.dst.buffer.scope() == _SCOPE:
            place, value = stmt.value.args[:2]
            same = value.dtype == record.dst.buffer.dtype
            return tile_op("reducer_init", place, value if same else tirx.Cast(record.dst.buffer.dtype, value))
        if isinstance(record, Copy) and record.src.buffer.scope() == _SCOPE:
            return tile_op("finalize_reducer_v2", *stmt.value.args[:2])
        return None

    kinds = ["tirx.BufferStore", "tirx.Evaluate"]
    body = tirx.stmt_functor.ir_transform(func.body, None, as_reducer, kinds)
    body = tirx.stmt_functor.ir_transform(body, None, _one_start, ["tirx.IfThenElse"])

    def informed(block: tirx.SBlock) -> tirx.SBlock | None:
        info = {b.data: {"op": ops.get(b, "sum")} for b in block.alloc_buffers if b.scope() == _SCOPE}
        return _with_annotations(block, {**block.annotations, _INFO: info}) if info else None

    func = func.with_body(tirx.stmt_functor.ir_transform(body, None, informed, ["tirx.SBlock"]))
    _check_uses(func)
    return func


def _update(stmt: tirx.BufferStore, ops: dict[tirx.Buffer, str]) -> tirx.Stmt:
    value = stmt.value
    op = _OPS.get(op_name(value) or type(value).__name__)
    a, b = (value.args if isinstance(value, tirx.Call) else (value.a, value.b)) if op is not None else (None, None)
    here = tirx.BufferLoad(stmt.buffer, stmt.indices)
    if op is None or not ir.structural_equal(a, here) or ops.setdefault(stmt.buffer, op) != op:
        return stmt
    return tirx.Evaluate(tirx.call_intrin("handle", ir.Op.get(_UPDATE), a, b))


def _one_start(stmt: tirx.IfThenElse) -> tirx.Stmt | None:
    """A reducer starts at one place: at one of two values, where it started at either."""
    branches = [stmt.then_case, stmt.else_case]
    calls = [branch.value for branch in branches if isinstance(branch, tirx.Evaluate)]
    if len(calls) < len(branches) or any(op_name(call) != _INIT for call in calls):
        return None
    (region, value), (other, otherwise) = (call.args[:2] for call in calls)
    if not ir.structural_equal(region, other, map_free_vars=False):
        return None
    return tile_op("reducer_init", region, tirx.if_then_else(stmt.condition, value, otherwise))


def _check_uses(func: tirx.PrimFunc) -> None:
    """Raises where a reducer is used by anything but its own operations."""
    allowed = {_INIT: 1, _UPDATE: 1, _FINALIZE: 1}
    proper: list[tirx.BufferLoad] = []
    for call in nodes(func.body, tirx.Call):
        if op_name(call) in allowed:
            first = call.args[0]
            proper.append(first if isinstance(first, tirx.BufferLoad) else first.args[0])
    uses = [node.buffer for node in nodes(func.body, tirx.BufferLoad, tirx.BufferStore) if node not in proper]
    if wrong := sorted({str(b.name) for b in uses if b.scope() == _SCOPE}):
        refuse(
            [
                f"reducer {name!r} is used by more than reducer_init, reducer_update and finalize_reducer"
                for name in wrong
            ],
            where=f"kernel {function_name(func)!r}",
            why="what it holds before it is finalized is made of parts that threads have",
            fix="finalize it into a fragment, and use that",
        )


def _without_info(block: tirx.SBlock) -> tirx.SBlock | None:
    kept = {key: value for key, value in block.annotations.items() if key != _INFO}
    return None if len(kept) == len(block.annotations) else _with_annotations(block, kept)


def _with_annotations(block: tirx.SBlock, annotations: dict[str, object]) -> tirx.SBlock:
    return block_like(block, block.body, block.alloc_buffers, annotations=annotations)


def parts_of(stmt: tirx.Stmt) -> tirx.Stmt | None:
    """What the statement stands for; None for one that is not made of others."""
    if not isinstance(stmt, tirx.Evaluate):
        return None
    parts = _COMPOUND.get(op_name(stmt.value))
    return None if parts is None else parts(stmt)


def _im2col(stmt: tirx.Evaluate) -> tirx.Stmt:
    """`T.im2col(image, block, m_step, k_step, kernel, stride, dilation, padding)`, a block of a convolution's matrix of
    patches, as a loop over its elements.

    Row m of the matrix is a pixel of the result; column k is a place in the kernel and a channel, the channel fastest.
    What is outside the image is 0."""
    call = stmt.value
    image, block = Region.of(call.args[0]), Region.of(call.args[1])
    m_step, k_step, kernel, stride, dilation, padding = call.args[2:8]
    i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    m, k = m_step * block.extents[-2] + i, k_step * block.extents[-1] + j
    images, height, width, channels = image.buffer.shape

    def results(size: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.floordiv(size + 2 * padding - (kernel - 1) * dilation - 1, stride) + 1

    across, both = results(width), results(height) * results(width)
    n, c = tirx.floordiv(m, both), tirx.floormod(k, channels)
    y = tirx.floordiv(tirx.floormod(m, both), across) * stride + tirx.floordiv(k, kernel * channels) * dilation
    x = tirx.floormod(m, across) * stride + tirx.floormod(tirx.floordiv(k, channels), kernel) * dilation
    y, x = y - padding, x - padding
    inside = tirx.all(n < images, y >= 0, y < height, x >= 0, x < width)
    value = tirx.if_then_else(inside, tirx.BufferLoad(image.buffer, [n, y, x, c]), tirx.const(0, image.buffer.dtype))
    at = [*block.mins[:-2], block.mins[-2] + i, block.mins[-1] + j]
    if block.buffer.dtype != image.buffer.dtype:
        value = tirx.Cast(block.buffer.dtype, value)
    return parallel_nest([i, j], block.extents[-2:], tirx.BufferStore(block.buffer, value, at))


def _gemm(stmt: tirx.Evaluate) -> tirx.Stmt | None:
    """`gemm(..., clear_accum=condition)` as `if condition: fill(C, 0)`, then `gemm`; into tensor memory, which nothing
    fills, as one product or the other."""
    if len(stmt.value.args) <= 9:
        return None  # which is refused where it is parsed
    accumulator, clear = stmt.value.args[2], stmt.value.args[9]
    if isinstance(clear, tirx.IntImm):
        return None
    if op_name(stmt.value) == "tl.tileop.tcgen05_gemm":
        clearing, adding = (
            with_args(stmt, [*stmt.value.args[:9], tirx.const(clears, "bool"), *stmt.value.args[10:]])
            for clears in (True, False)
        )
        return tirx.IfThenElse(clear, clearing, adding)
    fill = tile_op("fill", accumulator, tirx.const(0, accumulator.args[0].dtype))
    args = [*stmt.value.args[:9], tirx.const(False, "bool"), *stmt.value.args[10:]]
    return sequence([tirx.IfThenElse(clear, fill, None), with_args(stmt, args)])


def _atomic_vector(width: int) -> Callable[[tirx.Evaluate], tirx.Stmt | None]:
    """`atomic_addx2(dst, values)`, `atomic_addx4`: as many atomic additions along the last dim. They are aligned, so
    that rows of a multiple of their width hold them whole; others are not taken apart."""

    def parts(stmt: tirx.Evaluate) -> tirx.Stmt | None:
        dst, src = (pointer.args[0] for pointer in stmt.value.args[:2])
        row = dst.buffer.shape[-1]
        if not isinstance(row, tirx.IntImm) or int(row) % width:
            return None
        return sequence([_atomic_element(dst, src, lane) for lane in range(width)])

    return parts


def _atomic_element(dst: tirx.BufferLoad, src: tirx.BufferLoad, lane: int) -> tirx.Stmt:
    to, value = (tirx.BufferLoad(b.buffer, [*b.indices[:-1], b.indices[-1] + lane]) for b in (dst, src))
    value = value if value.dtype == to.dtype else tirx.Cast(to.dtype, value)
    pointer = tirx.call_intrin("handle", ir.Op.get("tl.access_ptr"), to, 1, 3)
    return tirx.Evaluate(tirx.call_intrin("handle", ir.Op.get("tl.atomic_add_elem_op"), pointer, value))


_COMPOUND = {
    "tl.tileop.im2col": _im2col,
    "tl.tileop.c2d_im2col": _im2col,
    **dict.fromkeys(Gemm.calls, _gemm),
    "tl.atomic_addx2_elem_op": _atomic_vector(2),
    "tl.atomic_addx4_elem_op": _atomic_vector(4),
}
