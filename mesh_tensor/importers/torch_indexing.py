"""Operators of torch that index by tensors, that make, join or repeat tensors, or that look at the memory of one: its
elements at constant places. See torch_ops for what each function takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tvm import ir, relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype
from mesh_tensor.tir.nodes import is_const

from .torch_args import arguments, emit, in_result_dtype, result_dtype

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


def index(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """x[:, i, j]: with one index, rows; with several, what they point at together."""
    x, indices = arguments(node, importer, 2)
    places = [dim for dim, found in enumerate(indices) if found is not None]
    _check(importer, indices)
    if len(places) == 1:
        return emit(importer, relax.op.take(x, _value(importer, indices[places[0]]), axis=places[0]))
    order, back, shape = _order(x, places, importer, indices)
    front = emit(importer, relax.op.permute_dims(x, order))
    found = emit(importer, relax.op.gather_nd(front, _positions(importer, indices, places, shape)))
    return emit(importer, relax.op.permute_dims(found, back))


def index_put(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """x with other values at [:, i, j]; with `accumulate`, with values added there."""
    x, indices, values, accumulate = arguments(node, importer, 3, accumulate=False)
    places = [dim for dim, found in enumerate(indices) if found is not None]
    mask = _value(importer, indices[places[0]]) if len(places) == 1 else None
    if mask is not None and mask.struct_info.dtype == "bool":
        return _masked(importer, x, mask, places[0], values, accumulate)
    _check(importer, indices)
    order, back, shape = _order(x, places, importer, indices)
    rest = [x.struct_info.shape[dim] for dim in order[len(places) :]]
    made = [*shape, *rest]
    values = emit(importer, relax.op.broadcast_to(values, [made[back[dim]] for dim in range(len(made))]))
    values = emit(importer, relax.op.permute_dims(values, _inverse(back)))
    front = emit(importer, relax.op.permute_dims(x, order))
    positions = _positions(importer, indices, places, shape)
    how = "add" if accumulate else "update"
    front = emit(importer, relax.op.scatter_nd(front, positions, values, how))
    return emit(importer, relax.op.permute_dims(front, _inverse(order)))


def _masked(
    importer: Any, x: relax.Expr, mask: relax.Expr, first: int, values: relax.Expr, accumulate: bool
) -> relax.Expr:
    """x with values wherever the mask, of the dims from `first` on, is true; or with them added there. They are the
    same for all these places: else data would say which belongs to which."""
    masked = len(mask.struct_info.shape)
    after = len(x.struct_info.shape) - first - masked
    shape = list(values.struct_info.shape)
    split = max(len(shape) - after, 0)
    before, rest = shape[:split], shape[split:]
    if before and not is_const(before[-1], 1):
        refuse(
            "an index of bool, with a value for each place", fix="use torch.where, or indices that are whole numbers"
        )
    lanes = emit(importer, relax.op.reshape(mask, [*mask.struct_info.shape, *[1] * after])) if after else mask
    if before:
        values = emit(importer, relax.op.reshape(values, [*before[:-1], *[1] * masked, *rest]))
    new = emit(importer, relax.op.add(x, values)) if accumulate else values
    return emit(importer, relax.op.where(lanes, new, x))


def gather(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Elements along a dim."""
    x, dim, where, _ = arguments(node, importer, 3, sparse_grad=False)
    return emit(importer, relax.op.gather_elements(x, _from_start(importer, where), dim))


def index_select(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Rows."""
    x, dim, where = arguments(node, importer, 3)
    return emit(importer, relax.op.take(x, where, axis=dim, mode="nan"))


def one_hot(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Zeros, and a 1 at each class. These are looked up among all there are: others are refused, as in torch."""
    x, count = arguments(node, importer, 1, num_classes=-1)
    if not isinstance(count, int) or count < 1:
        refuse("one_hot without a number of classes, which data say then", fix="pass it: one_hot(x, num_classes)")
    table, classes = (emit(importer, relax.op.arange(count, dtype="int64")) for _ in range(2))
    known = emit(importer, relax.op.expand_dims(emit(importer, relax.op.take(table, x, axis=0, mode="nan")), -1))
    return emit(importer, relax.op.astype(emit(importer, relax.op.equal(known, classes)), "int64"))


def scatter(node: torch.fx.Node, importer: Any, how: str) -> relax.Expr:
    """x with the values of another tensor, or with one number, along a dim ("update"), or with these added ("add")."""
    x, dim, where, source = arguments(node, importer, 4)
    is_number = not len(x.struct_info.shape)  # which Relax has no scatter for
    x, where, source = (
        emit(importer, relax.op.reshape(value, (1,))) if is_number and isinstance(value, relax.Expr) else value
        for value in (x, where, source)
    )
    where = _from_start(importer, where)
    if not isinstance(source, relax.Expr):
        dtype = x.struct_info.dtype
        source = emit(importer, relax.op.full(where.struct_info.shape, relax.const(source, dtype), dtype))
    sizes, given = (list(tensor.struct_info.shape) for tensor in (where, source))
    if str(sizes) != str(given):  # torch takes the first ones
        zeros, dims = [0] * len(sizes), list(range(len(sizes)))
        source = emit(importer, relax.op.strided_slice(source, dims, zeros, sizes))
    made = emit(importer, relax.op.scatter_elements(x, where, source, dim, how))
    return emit(importer, relax.op.reshape(made, ())) if is_number else made


def _from_start(importer: Any, where: relax.Expr) -> relax.Expr:
    """Indices of which negative ones, which don't count from the end, are larger than any dim."""
    dtype = where.struct_info.dtype
    negative = emit(importer, relax.op.less(where, relax.const(0, dtype)))
    largest = relax.const(torch.iinfo(torch_dtype(dtype)).max, dtype)
    return emit(importer, relax.op.where(negative, largest, where))


def _check(importer: Any, indices: Any) -> None:
    kinds = {_value(importer, found).struct_info.dtype for found in indices if found is not None}
    if kinds - {"int64", "int32"}:
        refuse(f"an index of {', '.join(sorted(kinds))}", fix="use torch.where, or indices that are whole numbers")


def _value(importer: Any, found: Any) -> relax.Expr:
    return importer.env[found] if isinstance(found, torch.fx.Node) else found


def _order(x: relax.Expr, places: list[int], importer: Any, indices: Any) -> tuple[list[int], list[int], list[Any]]:
    """The dims of x with indexed ones first; where torch has the dims of the result of that; the indices' shape."""
    rest = [dim for dim in range(len(x.struct_info.shape)) if dim not in places]
    shape = _together([list(_value(importer, indices[dim]).struct_info.shape) for dim in places])
    adjacent = places == list(range(places[0], places[0] + len(places)))
    before, count = (places[0] if adjacent else 0), len(shape)
    back = [*range(count, count + before), *range(count), *range(count + before, count + len(rest))]
    return [*places, *rest], back, shape


def _positions(importer: Any, indices: Any, places: list[int], shape: list[Any]) -> relax.Expr:
    """The indices, one column each; negative ones count from the end, as in torch."""
    columns = []
    for dim in places:
        found = emit(importer, relax.op.astype(_value(importer, indices[dim]), "int64"))
        columns.append(emit(importer, relax.op.broadcast_to(found, shape)))
    return emit(importer, relax.op.stack(columns, axis=-1))


def _together(shapes: list[list[Any]]) -> list[Any]:
    """The shape to which all of them are broadcast."""
    result: list[Any] = []
    for position in range(-max(map(len, shapes)), 0):
        sizes = [shape[position] for shape in shapes if len(shape) >= -position]
        result.append(next((size for size in sizes if not (hasattr(size, "value") and int(size) == 1)), sizes[0]))
    return result


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


INDEXING: dict[str, Callable[[Any, Any], Any]] = {
    "gather.default": gather,
    "index.Tensor": index,
    "index_put.default": index_put,
    "index_put_.default": index_put,
    "index_select.default": index_select,
    "one_hot.default": one_hot,
    "scatter.src": partial(scatter, how="update"),
    "scatter.value": partial(scatter, how="update"),
    "scatter_add.default": partial(scatter, how="add"),
}


def expand(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Repeated along new leading dims and along dims of size 1; a size of -1 stays."""
    x, sizes = arguments(node, importer, 2)
    shape = list(x.struct_info.shape)
    shape = [None] * (len(sizes) - len(shape)) + shape
    sizes = [importer.env[size] if isinstance(size, torch.fx.Node) else size for size in sizes]
    made = [old if isinstance(size, int) and size == -1 else size for size, old in zip(sizes, shape, strict=True)]
    return emit(importer, relax.op.broadcast_to(x, made))


def repeated(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """So many times along each dim, new leading ones included; dims of size 1 are broadcast so often as an open size
    says. (TVM's tile takes numbers alone.)"""
    x, times = arguments(node, importer, 2)
    times = [importer.env[count] if isinstance(count, torch.fx.Node) else count for count in times]
    if all(isinstance(count, int) for count in times):
        return emit(importer, relax.op.tile(x, times))
    shape = [1] * (len(times) - len(x.struct_info.shape)) + list(x.struct_info.shape)
    apart = [size for pair in zip([1] * len(shape), shape, strict=True) for size in pair]
    repeats = [size for pair in zip(times, shape, strict=True) for size in pair]
    many = emit(importer, relax.op.broadcast_to(emit(importer, relax.op.reshape(x, apart)), repeats))
    return emit(importer, relax.op.reshape(many, [count * size for count, size in zip(times, shape, strict=True)]))


def concat(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Joined along a dim, in the result's dtype. Tensors of shape (0,) are left out, as torch does."""
    tensors, dim = arguments(node, importer, 1, dim=0)
    joined = [tensor for tensor in tensors if tuple(tensor.meta["val"].shape) != (0,)] or tensors[:1]
    values = [in_result_dtype(node, importer, importer.env[tensor]) for tensor in joined]
    return values[0] if len(values) == 1 else emit(importer, relax.op.concat(values, axis=dim))


def stacked(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Side by side along a dim of their own, in the result's dtype."""
    tensors, dim = arguments(node, importer, 1, dim=0)
    values = [in_result_dtype(node, importer, importer.env[tensor]) for tensor in tensors]
    return emit(importer, relax.op.stack(values, axis=dim))


def uninitialized(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Memory that something writes before it is read: zeros."""
    (sizes,) = arguments(node, importer, 1)
    shape = [importer.env[size] if isinstance(size, torch.fx.Node) else size for size in sizes]
    return emit(importer, relax.op.zeros(shape, result_dtype(node)))


def triangle(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The indices of a triangle: constants."""
    made = node.target(*node.args, **node.kwargs)  # type: ignore[operator]
    return relax.const(made.cpu().numpy(), dtype_name(made.dtype))


def reshaped(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """In another shape. (TVM's importer asks open sizes whether they are others.)"""
    value, sizes = arguments(node, importer, 2)
    shape = [importer.env[size] if isinstance(size, torch.fx.Node) else size for size in sizes]
    given = value.struct_info.shape
    if given is not None and ir.structural_equal(given, relax.ShapeExpr(shape)):
        return value
    return emit(importer, relax.op.reshape(value, shape))


SHAPES = {
    "cat.default": concat,
    "empty_permuted.default": uninitialized,
    "expand.default": expand,
    "repeat.default": repeated,
    "reshape.default": reshaped,
    "stack.default": stacked,
    "tril_indices.default": triangle,
    "triu_indices.default": triangle,
    "view.default": reshaped,
}
