"""Operators of torch that TVM's importer leaves out, or reads only in part, as Relax operators.

Each function takes the fx node and TVM's importer (`env`: node -> Relax value; `block_builder`), and gives the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tvm import relax, tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.targets.dtypes import dtype_name

from .torch_args import arguments, emit, filled, in_dtype, in_result_dtype, widened
from .torch_attention import attention
from .torch_backward import BACKWARD, KEPT_BACKWARD
from .torch_dropout import converted as dropout
from .torch_general import CONVOLUTIONS, GENERAL, WITH_GRADIENTS
from .torch_indexing import INDEXING, SHAPES, STRIDED
from .torch_numbers import NUMBERS, Convert, of_tvm, promoting, widening

_aten = torch.ops.aten

# What torch would take apart into smaller operators, and what has an operator of its own in Relax, or a short form.
KEPT = (
    *(_aten.linear.default, _aten.matmul.default, _aten.scaled_dot_product_attention.default, _aten.conv2d.default),
    *(_aten.layer_norm.default, _aten.rms_norm.default, _aten.group_norm.default, _aten.max_pool2d.default),
    *(_aten.gelu.default, _aten.silu.default, _aten.detach.default, _aten.one_hot.default, _aten.roll.default),
    *(_aten.stack.default, _aten.bilinear.default, _aten._safe_softmax.default, _aten.special_xlog1py.default),
    *(_aten.xlogy.Tensor, _aten.special_log_ndtr.default),
    *(getattr(_aten, name).default for name in WITH_GRADIENTS),
    # what raises for matrices without an inverse, which torch takes for an effect if that is an operator of its own
    *(_aten.linalg_solve.default, _aten.linalg_inv.default, _aten.inverse.default, _aten.linalg_cholesky.default),
    *(_aten.linalg_lu_factor.default, _aten.linalg_ldl_factor.default),
    *KEPT_BACKWARD,
)


def with_alpha(op: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """a + alpha * b, or a - alpha * b, in the result's dtype. TVM's conversion leaves alpha out."""
    alpha = node.kwargs.get("alpha", 1)
    if alpha == 1:
        return promoting(op, node, importer)
    a, b = (in_result_dtype(node, importer, operand) for operand in arguments(node, importer, 2))
    return emit(importer, op(a, _scaled(importer, b, alpha)))


def flip(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Along each of several dims."""
    value, dims = arguments(node, importer, 2)
    for dim in dims:
        value = emit(importer, relax.op.flip(value, dim))
    return value


def linear(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """x @ weight^T + bias, in the dtype of x."""
    x, weight, bias = arguments(node, importer, 2, bias=None)
    product = emit(importer, relax.op.matmul(x, emit(importer, relax.op.permute_dims(weight))))
    return product if bias is None else emit(importer, relax.op.add(product, bias))


def matmul(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A product in the dtype of its operands."""
    return emit(importer, relax.op.matmul(*arguments(node, importer, 2)))


def addmm(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """beta * c + alpha * a @ b, in the dtype of its operands. Of c nothing counts, NaN neither, if beta is 0."""
    c, a, b = arguments(node, importer, 3)
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    if (alpha, beta) != (1, 1):
        c, a, b = (widened(importer, operand) for operand in (c, a, b))
    made = _scaled(importer, emit(importer, relax.op.matmul(a, b)), alpha)
    if beta != 0:
        made = emit(importer, relax.op.add(_scaled(importer, c, beta), made))
    return in_result_dtype(node, importer, made)


def layer_norm(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Over the last dims; a weight or bias that is None is 1 or 0."""
    x, sizes, weight, bias, epsilon = arguments(node, importer, 2, weight=None, bias=None, eps=1e-5)
    weight, bias = filled(weight, 1, sizes, x), filled(bias, 0, sizes, x)
    return emit(importer, relax.op.nn.layer_norm(x, weight, bias, axes=_last(sizes), epsilon=epsilon))


def group_norm(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Over groups of channels (dim 1) and all later dims."""
    x, groups, weight, bias, epsilon = arguments(node, importer, 2, weight=None, bias=None, eps=1e-5)
    shape = x.struct_info.shape
    weight, bias = filled(weight, 1, [shape[1]], x), filled(bias, 0, [shape[1]], x)
    axes = list(range(2, len(shape)))
    return emit(importer, relax.op.nn.group_norm(x, weight, bias, groups, channel_axis=1, axes=axes, epsilon=epsilon))


def rms_norm(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Over the last dims; an eps of None is that of the dtype in which torch computes."""
    x, sizes, weight, epsilon = arguments(node, importer, 2, weight=None, eps=None)
    if epsilon is None:
        dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
        epsilon = torch.finfo(torch.float32 if dtype.itemsize < 4 else dtype).eps
    return emit(importer, relax.op.nn.rms_norm(x, filled(weight, 1, sizes, x), axes=_last(sizes), epsilon=epsilon))


def variance(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Over dims (none: all), computed in float32 at least, divided by the number of elements less `correction`, which
    TVM's importer leaves out."""
    x, dims = arguments(node, importer, 1, dim=None)
    dims, keep = list(dims or range(node.args[0].meta["val"].dim())), node.kwargs.get("keepdim", False)  # type: ignore[union-attr]
    count = math.prod(int(x.struct_info.shape[dim]) for dim in dims)
    correction: Any = node.kwargs.get("correction")
    left = count - (1 if correction is None else correction)
    if left <= 0:
        refuse(f"a variance of {count} elements with a correction of {correction}", fix="take it of more elements")
    made = emit(importer, relax.op.variance(widened(importer, x), dims, keep))
    return in_dtype(importer, _scaled(importer, made, count / left), x.struct_info.dtype)


def embedding(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Rows of a table; the ids keep their dims, and don't count from the end. The row `padding_idx` is a constant when
    gradients are taken."""
    table, ids, padding, by_frequency = arguments(node, importer, 2, padding_idx=-1, scale_grad_by_freq=False)
    if by_frequency:
        refuse("an embedding whose gradient is scaled by frequency", fix="make it with scale_grad_by_freq=False")
    rows = emit(importer, relax.op.take(table, ids, axis=0, mode="nan"))
    if padding < 0:
        return rows
    is_padding = emit(importer, relax.op.equal(ids, relax.const(padding, ids.struct_info.dtype)))
    fixed = emit(importer, relax.op.grad.no_grad(rows))
    return emit(importer, relax.op.where(emit(importer, relax.op.expand_dims(is_padding, -1)), fixed, rows))


def bilinear(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """x A y + bias, a matrix A per feature; any leading dims."""
    x, y, weight, bias = arguments(node, importer, 3, bias=None)
    made = emit(importer, relax.op.einsum([x, y, weight], "...i,...j,oij->...o"))
    return made if bias is None else emit(importer, relax.op.add(made, bias))


def detach(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The same, as a constant when gradients are taken. Where it holds no floats it is one anyway."""
    (x,) = arguments(node, importer, 1)
    return emit(importer, relax.op.grad.no_grad(x)) if "float" in x.struct_info.dtype else x


def _of_a_sample(importer: Any, shape: Sequence[Any], dims: Sequence[int], dtype: str) -> relax.Expr:
    """What the variance of the elements along `dims` is multiplied by to be that of a sample: n / (n - 1)."""
    if all(isinstance(size, int) for size in shape):
        count = math.prod(shape[dim] for dim in dims)
        return relax.const(count / (count - 1), dtype)
    # as many ones as a channel has elements, in float32: in 16 bits they are too many
    importer.conditions.append(f"{' * '.join(f'({shape[dim]})' for dim in dims)} >= 2")
    ones = emit(importer, relax.op.ones([1 if dim == 1 else size for dim, size in enumerate(shape)], "float32"))
    many = emit(importer, relax.op.reshape(emit(importer, relax.op.sum(ones)), [1]))
    rest = emit(importer, relax.op.subtract(many, relax.const(1.0, "float32")))
    share = emit(importer, relax.op.divide(many, rest))
    return share if dtype == "float32" else emit(importer, relax.op.astype(share, dtype))


def batch_norm(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """In training: the data normalised by the batch's own mean and variance, these (the second as the inverse of the
    root), and the running ones that they enter; the variance as one of a sample."""
    x, weight, bias, mean, var, training, momentum, epsilon = arguments(node, importer, 8)
    if not training:
        refuse("a batch norm for inference that gives statistics", fix="export the model in eval mode")
    shape = [int(size) if isinstance(size, tirx.IntImm) else size for size in x.struct_info.shape]
    dims = [0, *range(2, len(shape))]
    if not isinstance(shape[1], int):
        refuse(f"a batch norm in training over {x.struct_info.shape}", fix="export the model for known channels")
    x, weight, bias, mean, var = (each and widened(importer, each) for each in (x, weight, bias, mean, var))
    dtype = x.struct_info.dtype
    if all(shape[dim] == 1 for dim in dims):
        refuse("a batch norm over one element", fix="give it more than one element per channel")

    def number(value: float) -> relax.Expr:
        return relax.const(value, dtype)

    def bound(expr: relax.Expr) -> relax.Var:
        return emit(importer, expr)

    own = bound(relax.op.mean(x, dims, True))
    centered = bound(relax.op.subtract(x, own))
    spread = bound(relax.op.mean(bound(relax.op.multiply(centered, centered)), dims, True))
    inverse = bound(relax.op.rsqrt(bound(relax.op.add(spread, number(epsilon)))))
    result = bound(relax.op.multiply(centered, inverse))
    for tensor, apply in ((weight, relax.op.multiply), (bias, relax.op.add)):
        if tensor is not None:
            along = bound(relax.op.reshape(tensor, [1, -1, *[1] * (len(shape) - 2)]))
            result = bound(apply(result, along))

    def entered(running: relax.Expr, new: relax.Expr) -> relax.Expr:
        kept = bound(relax.op.multiply(running, number(1 - momentum)))
        return bound(relax.op.add(kept, bound(relax.op.multiply(new, number(momentum)))))

    flat = [bound(relax.op.reshape(tensor, [shape[1]])) for tensor in (own, inverse, spread)]
    sample = bound(relax.op.multiply(flat[2], _of_a_sample(importer, shape, dims, dtype)))
    made = [result, flat[0], flat[1], entered(mean, flat[0]), entered(var, sample)]
    dtypes = [dtype_name(meant.dtype) for meant in node.meta["val"]]
    return bound(relax.Tuple([in_dtype(importer, *each) for each in zip(made, dtypes, strict=True)]))


CONVERTERS: dict[str, Convert] = {
    **BACKWARD,
    **CONVOLUTIONS,
    **INDEXING,
    **NUMBERS,
    **SHAPES,
    **STRIDED,
    **GENERAL,
    "_native_batch_norm_legit_functional.default": batch_norm,
    "_native_batch_norm_legit.no_stats": partial(widening, of_tvm),
    "_native_batch_norm_legit_no_training.default": partial(widening, of_tvm),
    "add.Tensor": partial(with_alpha, relax.op.add),
    "addmm.default": addmm,
    "bilinear.default": bilinear,
    "bmm.default": matmul,
    "counted_dropout.default": dropout,
    "detach.default": detach,
    "embedding.default": embedding,
    "flip.default": flip,
    "group_norm.default": partial(widening, group_norm),
    "layer_norm.default": partial(widening, layer_norm),
    "linear.default": linear,
    "matmul.default": matmul,
    "mm.default": matmul,
    "rms_norm.default": partial(widening, rms_norm),
    "scaled_dot_product_attention.default": attention,
    "sub.Tensor": partial(with_alpha, relax.op.subtract),
    "var.correction": variance,
}


def _last(sizes: Any) -> list[int]:
    return list(range(-len(sizes), 0))


def _scaled(importer: Any, value: relax.Expr, factor: Any) -> relax.Expr:
    constant = relax.const(factor, value.struct_info.dtype)
    return value if factor == 1 else emit(importer, relax.op.multiply(value, constant))
