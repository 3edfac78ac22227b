"""Operators of torch that stay torch's own: calls with all their arguments. See torch_ops for what functions take.

Convolutions and averages of windows, as Relax operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tvm import relax, tirx

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.rules.operator.aten import ANY, ATEN, any_text, arguments_text
from mesh_tensor.rules.operator.linear_algebra import grouped_call
from mesh_tensor.targets.dtypes import dtype_name
from mesh_tensor.targets.torch_ops.linear_algebra import independent_dims, is_function

from .torch_args import arguments, emit, op_name, result_dtype
from .torch_numbers import Convert, clamp, divide_rounded, of_tvm
from .torch_sizes import Known, in_tir, sizes_of

_NUMBERS = (bool, int, float, str, type(None))
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_WHERE = ("device", "layout", "memory_format", "pin_memory")  # arguments that say where results lie, not what they are
# Operators of one tensor's elements that are not what they are made of: near 0, far from it, or in their gradients.
WITH_GRADIENTS = (
    *("binary_cross_entropy", "celu", "elu", "expm1", "hardsigmoid", "hardswish", "hardtanh", "log1p", "logit"),
    *("mish", "relu6", "sinc", "softplus", "special_entr"),
)


def general(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A call of torch's operator with the node's arguments, by the rule of its name."""
    tensors: list[torch.fx.Node] = []
    text = arguments_text(_stated(node.args, tensors), _stated(node.kwargs, tensors))
    return _called(f"aten.{op_name(node)}", text, tensors, node, importer, [importer.env[tensor] for tensor in tensors])


def stays(node: torch.fx.Node) -> bool:
    """Whether the node can be a call of torch's operator whatever it is: of tensors of floats or whole numbers."""
    meant = node.meta.get("val")
    results = meant if isinstance(meant, (tuple, list)) else [meant]
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    return is_function(node.target) and bool(operands) and all(map(_is_plain, (*results, *operands)))


def any_operator(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A call of torch's operator that has no rule of its own: element by element where torch says so, by leading dims
    where it is known here; else all of every tensor is needed."""
    return any_call(node, importer, importer.env.__getitem__)


def any_call(node: torch.fx.Node, importer: Any, operand: Callable[[torch.fx.Node], relax.Expr]) -> relax.Expr:
    """The same, of what `operand` gives: pairs of floats, in their last dim, for complex numbers."""
    tensors: list[torch.fx.Node] = []
    kwargs = {name: value for name, value in node.kwargs.items() if name not in _WHERE}
    args, kwargs = _stated(node.args, tensors), _stated(kwargs, tensors)
    meant = node.meta["val"]
    every = [*(t.meta["val"] for t in tensors), *(meant if isinstance(meant, (tuple, list)) else [meant])]
    dims, pairs = independent_dims(node.target, [t.shape for t in every]), [t.is_complex() for t in every]
    text = any_text(op_name(node), dims, args, kwargs, pairs)
    return _called(ANY, text, tensors, node, importer, [operand(tensor) for tensor in tensors])


def with_its_gradient(otherwise: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Torch's own operator where it is of floats, and of no symbolic size; else what another function makes of it."""
    sized = any(not isinstance(operand.meta.get("val"), torch.Tensor) for operand in node.all_input_nodes)
    own = node.meta["val"].dtype.is_floating_point and not sized
    return (any_operator if own else otherwise)(node, importer)


def of_tvm_or_torch(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """What TVM's importer makes of the node, if it knows it."""
    return (of_tvm if op_name(node) in importer.conversions_of_tvm else any_operator)(node, importer)


def divided(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A quotient, rounded or not: floats that are rounded have no gradient, not that of a quotient."""
    rounded = node.kwargs.get("rounding_mode") is not None
    return (partial(with_its_gradient, divide_rounded) if rounded else divide_rounded)(node, importer)


def cross_entropy_of_two(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Element by element; then the mean (1) or the sum (2) of all."""
    *operands, reduction = arguments(node, importer, 2, weight=None, reduction=1)
    values = [value for value in operands if value is not None]
    args = [{"tensor": number} for number in range(len(values))] + [None] * (3 - len(values)) + [0]
    text = relax.StringImm(any_text("binary_cross_entropy.default", None, args, {}))
    each = emit(importer, relax.op.call_pure_packed(ANY, *values, text, sinfo_args=[values[0].struct_info]))
    return each if not reduction else emit(importer, (relax.op.mean if reduction == 1 else relax.op.sum)(each))


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_complex()


def _called(
    name: str, text: str, tensors: list[torch.fx.Node], node: torch.fx.Node, importer: Any, operands: list[relax.Expr]
) -> relax.Expr:
    shapes = [
        tuple(operand.struct_info.shape)[: tensor.meta["val"].dim()]
        for tensor, operand in zip(tensors, operands, strict=True)
    ]
    known = sizes_of(zip([tensor.meta["val"].shape for tensor in tensors], shapes, strict=True))
    meant = node.meta["val"]
    infos = [_info(tensor, known, importer) for tensor in (meant if isinstance(meant, (tuple, list)) else [meant])]
    info = relax.TupleStructInfo(infos) if isinstance(meant, (tuple, list)) else infos[0]
    return emit(importer, relax.op.call_pure_packed(name, *operands, relax.StringImm(text), sinfo_args=[info]))


def _stated(value: Any, tensors: list[torch.fx.Node]) -> Any:
    """Arguments in the form of JSON; tensors are collected."""
    if isinstance(value, torch.fx.Node):
        if not isinstance(value.meta.get("val"), torch.Tensor):
            refuse(f"the argument {value.name!r} is a symbolic size", fix="export the model with constant sizes there")
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (tuple, list)):
        return [_stated(item, tensors) for item in value]
    if isinstance(value, Mapping):
        return {key: _stated(item, tensors) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        if value in _QUANTIZED:
            refuse(f"a tensor of {value}", fix="keep whole numbers and their scales as tensors of their own")
        return {"dtype": dtype_name(value)}
    if not isinstance(value, _NUMBERS):
        refuse(f"the argument {shown(value)} has no form that can be saved")
    return value


def _size(size: torch.SymInt, known: Known, importer: Any) -> tirx.PrimExpr | None:
    made = in_tir(size.node.expr, known)
    return importer.size(size) if made is None else made


def _info(tensor: torch.Tensor, known: Known, importer: Any) -> relax.TensorStructInfo:
    shape = [size if isinstance(size, int) else _size(size, known, importer) for size in tensor.shape]
    if any(size is None for size in shape):
        refuse(f"the result's shape {tuple(tensor.shape)} has sizes that no operand has", fix="export constant sizes")
    if tensor.is_complex():
        return relax.TensorStructInfo([*shape, 2], dtype_name(tensor.real.dtype))
    return relax.TensorStructInfo(shape, dtype_name(tensor.dtype))


def grouped(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """(S, K) rows, sorted by group, by (G, K, N) matrices; other forms are torch's."""
    x, weight, ends, bias, _ = arguments(node, importer, 2, offs=None, bias=None, out_dtype=None)
    if ends is None or bias is not None or [len(t.struct_info.shape) for t in (x, weight)] != [2, 3]:
        return general(node, importer)
    return emit(importer, grouped_call(x, weight, ends, result_dtype(node)))


GENERAL: dict[str, Convert] = {
    **{name.removeprefix("aten."): general for name in ATEN},
    **{f"{name}.default": partial(with_its_gradient, of_tvm_or_torch) for name in WITH_GRADIENTS},
    "clamp.Tensor": partial(with_its_gradient, clamp),
    "div.Tensor_mode": divided,
    "binary_cross_entropy.default": cross_entropy_of_two,
    "_grouped_mm.default": grouped,
    "grouped_mm_fallback.default": grouped,
}


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
