"""Operators of torch that make, join or repeat tensors, as Relax operators; torch_ops says what the functions take."""

from __future__ import annotations

from typing import Any

import torch
from tvm import relax

from mesh_tensor.targets.dtypes import dtype_name

from .torch_args import arguments, emit, in_result_dtype, result_dtype


def expand(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Repeated along new leading dims and along dims of size 1; a size of -1 stays."""
    x, sizes = arguments(node, importer, 2)
    shape = list(x.struct_info.shape)
    shape = [None] * (len(sizes) - len(shape)) + shape
    sizes = [importer.env[size] if isinstance(size, torch.fx.Node) else size for size in sizes]
    made = [old if isinstance(size, int) and size == -1 else size for size, old in zip(sizes, shape, strict=True)]
    return emit(importer, relax.op.broadcast_to(x, made))


def concat(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Joined along a dim, in the result's dtype. Tensors of shape (0,) are left out, as torch does."""
    tensors, dim = arguments(node, importer, 1, dim=0)
    joined = [tensor for tensor in tensors if tuple(tensor.meta["val"].shape) != (0,)] or tensors[:1]
    values = [in_result_dtype(node, importer, importer.env[tensor]) for tensor in joined]
    return values[0] if len(values) == 1 else emit(importer, relax.op.concat(values, axis=dim))


def uninitialized(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Memory that something writes before it is read: zeros."""
    (sizes,) = arguments(node, importer, 1)
    shape = [importer.env[size] if isinstance(size, torch.fx.Node) else size for size in sizes]
    return emit(importer, relax.op.zeros(shape, result_dtype(node)))


def triangle(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The indices of a triangle: constants."""
    made = node.target(*node.args, **node.kwargs)  # type: ignore[operator]
    return relax.const(made.cpu().numpy(), dtype_name(made.dtype))


SHAPES = {
    "cat.default": concat,
    "empty_permuted.default": uninitialized,
    "expand.default": expand,
    "tril_indices.default": triangle,
    "triu_indices.default": triangle,
}
