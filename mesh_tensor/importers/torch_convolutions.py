"""Convolutions and averages of windows of torch, as Relax operators. See torch_ops for what functions take."""

from __future__ import annotations

from typing import Any

import torch
from tvm import relax

from .torch_args import arguments, emit
from .torch_general import any_operator
from .torch_numbers import of_tvm

_CONVOLUTIONS = {3: relax.op.nn.conv1d, 4: relax.op.nn.conv2d, 5: relax.op.nn.conv3d}  # by the operand's dims
_TRANSPOSED = {3: relax.op.nn.conv1d_transpose, 4: relax.op.nn.conv2d_transpose, 5: relax.op.nn.conv3d_transpose}


def conv2d(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A convolution in the dtype of its operands."""
    x, weight, bias, stride, padding, dilation, groups = arguments(
        node, importer, 2, bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    return _convolved(importer, x, weight, bias, (stride, padding, dilation, groups))


def convolution(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A convolution along one to three dims, in the dtype of its operands."""
    x, weight, bias, stride, padding, dilation, transposed, beyond, groups = arguments(node, importer, 9)
    if not transposed:
        return _convolved(importer, x, weight, bias, (stride, padding, dilation, groups))
    how = {"strides": stride, "padding": padding, "output_padding": beyond, "dilation": dilation}
    how = {name: list(sizes) for name, sizes in how.items()}
    made = _TRANSPOSED[len(x.struct_info.shape)](x, weight, **how, groups=groups)
    return _with_bias(importer, emit(importer, made), bias)


def _convolved(importer: Any, x: relax.Expr, weight: relax.Expr, bias: relax.Expr | None, how: Any) -> relax.Expr:
    """`how`: strides, padding, dilation and groups."""
    op, how = _CONVOLUTIONS[len(x.struct_info.shape)], [list(n) if isinstance(n, (tuple, list)) else n for n in how]
    return _with_bias(importer, emit(importer, op(x, weight, *how)), bias)


def _with_bias(importer: Any, result: relax.Expr, bias: relax.Expr | None) -> relax.Expr:
    if bias is None:
        return result
    shape = (1, -1, *[1] * (len(result.struct_info.shape) - 2))
    return emit(importer, relax.op.add(result, emit(importer, relax.op.reshape(bias, shape))))


def average_pool(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Averages of windows; torch's own where these reach over the end, or are divided by another number."""
    *_, over_the_end, padding_counts, divisor = arguments(
        node, importer, 2, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    )
    return any_operator(node, importer) if over_the_end or divisor is not None else of_tvm(node, importer)


CONVOLUTIONS = {
    "avg_pool2d.default": average_pool,
    "avg_pool3d.default": average_pool,
    "conv2d.default": conv2d,
    "convolution.default": convolution,
}
