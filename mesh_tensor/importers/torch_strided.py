"""Operators of torch that look at the memory of a tensor: its elements at constant places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tvm import relax

from mesh_tensor.base.errors import refuse

from .torch_args import arguments, emit

_FIX = "index it, as x[:, ::2] or x.diagonal() do, or give it .clone(memory_format=torch.contiguous_format) first"


def as_strided(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Elements of a tensor that lies in one piece, by where they are in memory."""
    x, sizes, strides, offset = arguments(node, importer, 3, storage_offset=None)
    places = _places(node, sizes, strides, offset)
    flat = emit(importer, relax.op.reshape(x, [-1]))
    found = emit(importer, relax.op.take(flat, relax.const(places.reshape(-1), "int64"), axis=0, mode="fast"))
    return emit(importer, relax.op.reshape(found, list(sizes)))


def as_strided_scatter(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A tensor that lies in one piece, with others of its elements: a choice, position by position."""
    x, new, sizes, strides, offset = arguments(node, importer, 4, storage_offset=None)
    places = _places(node, sizes, strides, offset).reshape(-1)
    if len(np.unique(places)) < len(places):
        refuse("it writes some elements of a tensor several times", fix="use index_put, which says what counts")
    shape = [int(size) for size in x.struct_info.shape]
    chosen, source = np.zeros(shape, "bool"), np.zeros(shape, "int64")
    chosen.reshape(-1)[places] = True
    source.reshape(-1)[places] = np.arange(len(places))
    if not len(places):
        return x
    flat = emit(importer, relax.op.reshape(new, [-1]))
    spread = emit(importer, relax.op.take(flat, relax.const(source.reshape(-1), "int64"), axis=0, mode="fast"))
    spread = emit(importer, relax.op.reshape(spread, shape))
    return emit(importer, relax.op.where(relax.const(chosen, "bool"), spread, x))


def _places(node: torch.fx.Node, sizes: Any, strides: Any, offset: Any) -> np.ndarray:
    """Where in the tensor's memory its elements are, counted from its first one."""
    whole: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    given = (*whole.shape, *sizes, *strides, 0 if offset is None else offset)
    if not all(isinstance(size, int) for size in given):
        refuse("it looks at the memory of a tensor of open sizes", fix="export it with known sizes, or " + _FIX)
    if not whole.is_contiguous():
        refuse("it looks at the memory of a tensor that does not lie in one piece", fix=_FIX)
    memory = whole.untyped_storage().nbytes() // whole.dtype.itemsize
    if whole.storage_offset() or memory != whole.numel():
        refuse("it looks at the memory of a tensor that is a part of another one", fix=_FIX)
    places = np.full(sizes, 0 if offset is None else offset, "int64")
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        places += (np.arange(size) * stride).reshape([-1 if other == dim else 1 for other in range(len(sizes))])
    return places


STRIDED: dict[str, Callable[[Any, Any], Any]] = {
    "as_strided.default": as_strided,
    "as_strided_scatter.default": as_strided_scatter,
}
