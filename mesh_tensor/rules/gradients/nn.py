"""Gradients of matrix products, of neural network operators, of those that take or put elements by index, and of
torch's own: those of their torch functions; and of what leads into manual computations and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

import numpy
from tvm import relax

from mesh_tensor.rules.operator.aten import ANY, ATEN
from mesh_tensor.rules.operator.dropout import DROPOUT, dropout_call, dropout_of
from mesh_tensor.rules.operator.linear_algebra import FFT, GROUPED, LOOKED_UP
from mesh_tensor.rules.operator.manual import ALL_DEVICES, OF_DEVICE, PER_DEVICE, axes_of, devices_call

from .table import Backward, Gradient, differentiated, gradient, zeros

_NAMES = (
    "nn.layer_norm nn.rms_norm nn.group_norm nn.instance_norm nn.batch_norm nn.attention nn.attention_bias nn.conv1d"
    " nn.conv2d nn.conv3d nn.conv1d_transpose nn.conv2d_transpose nn.conv3d_transpose nn.max_pool1d nn.max_pool2d"
    " nn.max_pool3d nn.avg_pool1d nn.avg_pool2d nn.avg_pool3d nn.adaptive_avg_pool1d nn.adaptive_avg_pool2d"
    " nn.adaptive_avg_pool3d nn.cross_entropy_with_logits nn.nll_loss image.resize2d"
)


gradient(*_NAMES.split())(differentiated)


@gradient(DROPOUT)
def dropout(b: Backward) -> Sequence[Gradient]:
    """The same elements of the gradient are dropped."""
    return [b.emit(dropout_call(b.d, b.operands[1], dropout_of(b.call))), None]


@gradient("full")
def full(b: Backward) -> Sequence[Gradient]:
    return [b.typed(b.summed(b.d, 0), 0)]


@gradient("full_like")
def full_like(b: Backward) -> Sequence[Gradient]:
    return [b.emit(zeros(b.call.inputs[0])), *(b.typed(b.summed(b.d, n), n) for n in range(1, len(b.operands)))]


@gradient("zeros_like", "ones_like")
def like(b: Backward) -> Sequence[Gradient]:
    return [b.emit(zeros(b.call.inputs[0])), *[None] * (len(b.operands) - 1)]


gradient("take", "gather_elements", "gather_nd", "index_tensor", "scatter_elements", "scatter_nd", "index_put")(
    differentiated
)
# Their gradients are unknown to torch, or zero without being so said.
_WITHOUT = (
    *("aten.heaviside.default", "aten.histc.default", "aten.nextafter.default", "aten.searchsorted.Tensor"),
    "aten._embedding_bag_forward_only.default",
)
gradient(ANY, *(name for name in ATEN if name not in _WITHOUT))(differentiated)


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
    """Of a matrix that all batches are multiplied with: summed over all rows at once, which are turned by nobody."""
    left, right = b.call.inputs
    if left.ndim > 2 or left.dtype == right.dtype == str(b.d.struct_info.dtype):
        rows = ascii_lowercase[: left.ndim - 1]
        return b.emit(op.einsum((b.operands[0], b.d), f"{rows}y,{rows}z->yz"))
    return b.emit(op.matmul(_turned(b, b.operands[0], 2), b.d, right.dtype))


def _turned(b: Backward, x: relax.Expr, ndim: int) -> relax.Expr:
    """With the last two dims in the other order."""
    return b.emit(op.permute_dims(x, [*range(ndim - 2), ndim - 1, ndim - 2]))


gradient("einsum", "outer", FFT, GROUPED, LOOKED_UP)(differentiated)


@gradient(PER_DEVICE)
def per_device(b: Backward) -> Sequence[Gradient]:
    return [b.emit(devices_call(ALL_DEVICES, b.d, axes_of(b.call), b.call.inputs[0].shape))]


@gradient(ALL_DEVICES)
def all_devices(b: Backward) -> Sequence[Gradient]:
    return [b.emit(devices_call(PER_DEVICE, b.d, axes_of(b.call), b.call.inputs[0].shape))]


@gradient(OF_DEVICE)
def of_device(b: Backward) -> Sequence[Gradient]:
    """Nothing depends on what other devices have."""
    (given,), place = b.call.inputs, b.call.literals[-1]
    there = numpy.zeros(given.shape[: len(place)], dtype=bool)
    there[place] = True
    mask = relax.const(there.reshape(*there.shape, *(1 for _ in given.shape[len(place) :])))
    everywhere = b.emit(op.broadcast_to(b.d, relax.ShapeExpr(given.shape)))
    return [b.emit(op.where(mask, everywhere, b.emit(zeros(given))))]
