"""Gradients of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from tvm import relax

from mesh_tensor.rules.operator.fft import FFT
from mesh_tensor.rules.operator.linear_algebra import GROUPED

from .table import Backward, Gradient, differentiated, gradient

op = relax.op


@gradient("matmul")
def matmul(b: Backward) -> Sequence[Gradient]:
    """d A = d C @ B^T, d B = A^T @ d C; batch dims that were broadcast are summed."""
    left, right = b.call.inputs
    if min(left.ndim, right.ndim) < 2:
        return differentiated(b)
    found: list[Gradient] = [None, None]
    if b.wanted[1]:  # first: where it takes all of d, the other one takes that, too
        found[1] = _of_weight(b) if right.ndim == 2 else _of_right(b)
    if b.wanted[0]:
        found[0] = b.summed(b.emit(op.matmul(b.d, _turned(b, b.operands[1], right.ndim), left.dtype)), 0)
    return found


def _of_right(b: Backward) -> relax.Expr:
    left, right = b.call.inputs
    return b.summed(b.emit(op.matmul(_turned(b, b.operands[0], left.ndim), b.d, right.dtype)), 1)


def _of_weight(b: Backward) -> relax.Expr:
    """Of a matrix that all batches are multiplied with: summed over all rows at once."""
    left, right = b.call.inputs
    if left.ndim > 2:
        rows = ascii_lowercase[: left.ndim - 1]
        return b.emit(op.einsum((b.operands[0], b.d), f"{rows}y,{rows}z->yz"))
    return b.emit(op.matmul(_turned(b, b.operands[0], 2), b.d, right.dtype))


def _turned(b: Backward, x: relax.Expr, ndim: int) -> relax.Expr:
    """With the last two dims in the other order."""
    return b.emit(op.permute_dims(x, [*range(ndim - 2), ndim - 1, ndim - 2]))


gradient("einsum", "outer", FFT, GROUPED)(differentiated)
