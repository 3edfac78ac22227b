"""`T.im2col` as a loop over elements: the block of a convolution's matrix of patches, taken from the image."""

from __future__ import annotations

from tvm import ir, tirx

from .tile_ops import region

_NAMES = ("tl.tileop.im2col", "tl.tileop.c2d_im2col")


def im2col_loops(stmt: tirx.Stmt) -> tirx.Stmt | None:
    """The loops that `T.im2col(image, block, m_step, k_step, kernel, stride, dilation, padding)` stands for; None for
    any other statement.

    Row m of the matrix is a pixel of the result; column k is a place in the kernel and a channel, the channel fastest.
    What is outside the image is 0."""
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    if not isinstance(call, tirx.Call) or not isinstance(call.op, ir.Op) or call.op.name not in _NAMES:
        return None
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
    body: tirx.Stmt = tirx.BufferStore(block.buffer, value, at)
    for var, extent in ((j, block.extents[-1]), (i, block.extents[-2])):
        body = tirx.For(var, 0, extent, tirx.ForKind.PARALLEL, body)
    return body
