"""Operators that only move elements: reshapes, transposes, concatenation, slices, padding.

Operators whose results are as large as the data says. Where a module says how large they are (R.match_cast; the
operators are those of `mesh.` then), data that says otherwise is refused when it is met.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import torch
import torch.nn.functional as F

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.manual import OF_DEVICE

from ..dtypes import torch_dtype
from ..tile_memory import LARGE, empty_tile
from .table import Function, Place, of_attributes, placed_torch_op, torch_op

Tensor = torch.Tensor


@torch_op("reshape", "expand_dims", "squeeze", "flatten", "nn.batch_flatten")
def _reshape(call: OpCall) -> Function:
    reshape, shape = torch.reshape, call.outputs[0].shape  # takes two thirds of the method's time
    return (lambda x: x) if call.inputs[0].shape == shape else lambda x: reshape(x, shape)


@torch_op(OF_DEVICE)
def _of_device(call: OpCall) -> Function:
    place = call.literals[-1]
    return lambda x: x[place]


@torch_op("permute_dims")
def _permute_dims(call: OpCall) -> Function:
    dims = tuple(call.axis(d) for d in call.attr("axes", range(call.inputs[0].ndim)[::-1]))
    permute = torch.permute
    return lambda x: permute(x, dims)


@torch_op("broadcast_to")
def _broadcast_to(call: OpCall) -> Function:
    broadcast_to, shape = torch.broadcast_to, call.outputs[0].shape
    return lambda x: broadcast_to(x, shape)


@torch_op("collapse_sum_to", "collapse_sum_like")
def _collapse_sum(call: OpCall) -> Function:
    shape = call.outputs[0].shape
    return lambda x, *_: x.sum_to_size(shape)


@torch_op("concat")
def _concat(call: OpCall) -> Function:
    dim = call.attr("axis")
    if dim is None:
        return lambda *tensors: torch.cat([t.reshape(-1) for t in tensors])
    (made,) = call.outputs
    if made.elements * torch_dtype(made.dtype).itemsize < LARGE:
        return lambda *tensors: torch.cat(tensors, dim)
    return lambda *tensors: _large(tensors, dim, made.shape)


def _large(tensors: tuple[torch.Tensor, ...], dim: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Concatenated in memory that earlier tiles have left, unless gradients go through it."""
    reused = not any(tensor.requires_grad for tensor in tensors)
    out = empty_tile(shape, tensors[0].dtype, tensors[0].device) if reused else None
    return torch.cat(tensors, dim, out=out)


@placed_torch_op("mesh.local_join")
def _local_join(call: OpCall, place: Place) -> Function:
    """Tiles as long as the result's, each with its elements where they stand in the result. Literals: the result's
    global shape, its layout as text, the dim, where each tile's elements begin and end there, and what fills the rest.
    Of what overlaps, later tiles have it."""
    _, whole, text, dim, ends, fill = call.literals
    if place.mesh is None:
        refuse("mesh.local_join is an operator of one device of a mesh", fix="use R.concat in a module in global view")
    first = Sharding.parse(place.mesh, len(whole), text).tile_offset(whole, place.rank)[dim]
    shape = call.outputs[0].shape
    held = [min(max(end - first, 0), shape[dim]) for end in ends]
    spans = list(zip(held[::2], held[1::2], strict=True))

    def local_join(*tiles: Tensor) -> Tensor:
        made = tiles[0].new_full(shape, fill)
        for (low, high), tile in zip(spans, tiles, strict=True):
            if low == high:
                continue
            made.narrow(dim, low, high - low).copy_(tile.narrow(dim, low, high - low))
        return made

    return local_join


@torch_op("stack")
def _stack(call: OpCall) -> Function:
    dim = call.attr("axis", 0)
    return lambda *tensors: torch.stack(tensors, dim)


@torch_op("split")
def _split(call: OpCall) -> Function:
    """In equal sections, or at indices: TVM has worked out the results' sizes."""
    dim = call.axis(call.attr("axis"))
    sizes = [out.shape[dim] for out in call.outputs]
    covered, whole = sum(sizes), call.inputs[0].shape[dim]
    if covered > whole:
        refuse(
            f"R.split of {whole} elements makes parts of {sizes}", where=str(call.expr), fix="split at sorted indices"
        )
    return lambda x: x.narrow(dim, 0, covered).split(sizes, dim)


of_attributes(
    {
        "repeat": (torch.repeat_interleave, ("repeats", "axis")),
        "tile": (torch.tile, ("repeats",)),
        "flip": (lambda x, dim: torch.flip(x, (dim,)), ("axis",)),
        "nn.pixel_shuffle": (F.pixel_shuffle, ("upscale_factor",)),
    }
)


@torch_op("meshgrid")
def _meshgrid(call: OpCall) -> Function:
    indexing = call.attr("indexing", "ij")
    if indexing != "ij":
        refuse(
            f"R.meshgrid with indexing={indexing!r}",
            where=str(call.expr),
            why="TVM infers the shapes of 'ij' for it",
            fix="use indexing='ij', and R.permute_dims on its results",
        )
    return lambda *tensors: torch.meshgrid(*tensors, indexing="ij")


@torch_op("strided_slice")
def _strided_slice(call: OpCall) -> Function:
    axes, begins, ends, *strides = call.literals
    flipped, index = [], [slice(None)] * call.inputs[0].ndim
    for dim, begin, end, stride in zip(axes, begins, ends, strides[0] if strides else [1] * len(axes), strict=True):
        dim = call.axis(dim)
        index[dim], backwards = _slice(begin, end, stride, call.inputs[0].shape[dim])
        flipped += [dim] if backwards else []
        if len(range(*index[dim].indices(size := call.inputs[0].shape[dim]))) != call.outputs[0].shape[dim]:
            refuse(
                f"R.strided_slice of dim {dim} from {begin} to {end} by {stride}",
                where=str(call.expr),
                why=f"of {size} elements TVM takes {call.outputs[0].shape[dim]}",
                fix="keep the slice's begin before its end, and both within the dim",
            )
    where = _short(index)
    if flipped:
        return lambda x: x.flip(flipped)[where]
    return lambda x: x[where]


def _short(index: Sequence[slice]) -> tuple[slice | EllipsisType, ...]:
    """An index with as few whole dims as the same takes: each costs time."""
    cut = [dim for dim, taken in enumerate(index) if taken != slice(None)]
    if not cut:
        return (...,)
    until, since = tuple(index[: cut[-1] + 1]), tuple(index[cut[0] :])
    return (..., *since) if len(since) < len(until) else until


def _slice(begin: int, end: int, stride: int, size: int) -> tuple[slice, bool]:
    """The slice of a dim, and whether the dim is to be turned around first, as torch has no negative steps."""
    start, stop, step = slice(begin, end, stride).indices(size)
    if step > 0:
        return slice(start, max(start, stop), step), False
    start, stop = size - 1 - start, size - 1 - stop
    return slice(start, max(start, stop), -step), True


@torch_op("slice_scatter")
def _slice_scatter(call: OpCall) -> Function:
    start, end, step = call.literals
    dim = call.attr("axis")
    return lambda x, source: torch.slice_scatter(x, source, dim, start, end, step)


@torch_op("nn.pad")
def _pad(call: OpCall) -> Function:
    widths = call.attr("pad_width")
    mode = call.attr("pad_mode", "constant")
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    if mode == "constant":
        value = call.attr("pad_value", 0.0)
        flat = [width for pair in reversed(pairs) for width in pair]
        return lambda x: F.pad(x, flat, value=value)
    if mode not in _SOURCES:
        refuse(f"R.nn.pad has no mode {mode!r}", where=str(call.expr), fix=f"use constant, {', '.join(_SOURCES)}")
    shape = call.inputs[0].shape
    indices = [
        (dim, torch.tensor([_SOURCES[mode](i, shape[dim]) for i in range(-low, shape[dim] + high)], device="cpu"))
        for dim, (low, high) in enumerate(pairs)
        if low or high
    ]

    def pad(x: Tensor) -> Tensor:
        for dim, index in indices:
            x = x.index_select(dim, index.to(x.device))
        return x

    return pad


# mode -> which element of a dim of n stands at position i, before 0 or after n
_SOURCES = {
    "reflect": lambda i, n: n - 1 - abs(n - 1 - abs(i)),
    "replicate": lambda i, n: min(max(i, 0), n - 1),
    "circular": lambda i, n: i % n,
}


@torch_op("nonzero", "mesh.nonzero")
def _nonzero(call: OpCall) -> Function:
    return _as_said(call, lambda x: x.nonzero().t().contiguous())


@torch_op("dynamic_strided_slice", "mesh.dynamic_strided_slice")
def _dynamic_strided_slice(call: OpCall) -> Function:
    def cut(x: Tensor, begin: Tensor, end: Tensor, strides: Tensor) -> Tensor:
        for dim, one in enumerate(zip(begin.tolist(), end.tolist(), strides.tolist(), strict=True)):
            places = range(*slice(*one).indices(x.shape[dim]))
            x = x.index_select(dim, torch.tensor(list(places), dtype=torch.int64, device=x.device))
        return x

    return _as_said(call, cut)


@torch_op("unique", "mesh.unique")
def _unique(call: OpCall) -> Function:
    """Values in ascending order, then what else is asked for, in Relax's order; the first of equals counts."""
    _, first, inverse, counts, axis = [None if kind == "" else kind for kind in _numbers(call)]

    def unique(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        flat = x.reshape(-1) if axis is None else x
        dim = 0 if axis is None else int(axis) % x.ndim
        values, places, numbers = torch.unique(flat, sorted=True, return_inverse=True, return_counts=True, dim=dim)
        every = torch.arange(flat.shape[dim], device=x.device)
        least = torch.full_like(numbers, flat.shape[dim]).scatter_reduce(0, places, every, "amin")
        asked = [(first, least), (inverse, places), (counts, numbers)]
        made = (values, *(one for wanted, one in asked if wanted))
        return made if len(made) > 1 else values

    return _as_said(call, unique)


def _numbers(call: OpCall) -> tuple:
    """sorted, return_index, return_inverse, return_counts, and the axis, if there is one."""
    literals = tuple(call.literals)[call.operator.startswith("mesh.") :]  # without the function's name
    return (*literals, *("",) * (5 - len(literals)))


def _as_said(call: OpCall, function: Function) -> Function:
    """The function, whose results have to be as large as is said of them, if anything is."""
    said = [out.shape for out in call.outputs]

    def checked(*operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = function(*operands)
        results = made if isinstance(made, tuple) else (made,)
        found = [tuple(result.shape) for result in results]
        if said and found != said:
            name = call.operator.removeprefix("mesh.")
            facts = [", ".join(map(str, shapes)) for shapes in (found, said)]
            refuse(
                f"R.{name} gives {facts[0]}, but the module says {facts[1]}",
                why="the data says how large the result is, and the module was laid out for what R.match_cast says",
                fix="call it with such data, or state another size",
            )
        return made

    return checked
