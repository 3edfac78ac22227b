"""Operations that are made of others: what each stands for, in statements that everything understands.

An operation that has a function here needs nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx

from .effects import op_name
from .rewrite import parallel_nest, sequence, tile_op, with_args
from .tile_ops import region


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
    image, block = region(call.args[0]), region(call.args[1])
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
    """`gemm(..., clear_accum=condition)` as `if condition: fill(C, 0)`, then `gemm`."""
    accumulator, clear = stmt.value.args[2], stmt.value.args[9]
    if isinstance(clear, tirx.IntImm):
        return None
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
    "tl.tileop.gemm": _gemm,
    "tl.atomic_addx2_elem_op": _atomic_vector(2),
    "tl.atomic_addx4_elem_op": _atomic_vector(4),
}
