"""Operators that write where an index tensor says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.call import OpCall

from .index import Linear, Range, poison_like, refuse_outside
from .table import Function, Place, placed_torch_op, torch_op

Tensor = torch.Tensor


@torch_op("index_put")
def _index_put(call: OpCall) -> Function:
    """Without `accumulate`, of several values for a place one stays."""
    accumulate, check, sizes = bool(call.attr("accumulate", False)), Range(call, Place()), call.inputs[0].shape

    def index_put(x: Tensor, *rest: Tensor) -> Tensor:
        *indices, values = rest
        places = tuple(check(index.long(), size)[0] for index, size in zip(indices, sizes, strict=False))
        return torch.index_put(x, places, values, accumulate)

    return index_put


# R.scatter's reduction -> torch's
_SCATTERS = {"update": None, "add": "sum", "mul": "prod", "min": "amin", "max": "amax"}


def _scatter_along(call: OpCall) -> Function:
    """`data` with `updates` entered along a dim, as the call's `reduction` says."""
    reduction = call.attr("reduction", "update")
    if reduction not in _SCATTERS:
        refuse(
            f"R.{call.name} has no reduction {reduction!r} here",
            where=str(call.expr),
            fix=f"use {', '.join(_SCATTERS)}",
        )
    return lambda x, dim, index, updates: _scattered(x, dim, index, updates, reduction)


def _scattered(x: Tensor, dim: int, index: Tensor, updates: Tensor, reduction: str) -> Tensor:
    op = _SCATTERS[reduction]
    return torch.scatter(x, dim, index, updates) if op is None else torch.scatter_reduce(x, dim, index, updates, op)


@placed_torch_op("scatter_elements")
def _scatter_elements(call: OpCall, place: Place) -> Function:
    """Of an index outside the dim, where it may be padding, all that it could have been entered into is poison."""
    dim, scatter, check = call.axis(call.attr("axis")), _scatter_along(call), Range(call, place)
    size = call.inputs[0].shape[dim]

    def scatter_elements(x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        index, valid = check(index.long(), size, (1, index))
        found = scatter(x, dim, index, updates)
        if valid is not None:
            known = torch.ones([1 if d == dim else n for d, n in enumerate(found.shape)], dtype=torch.bool)
            known[tuple(slice(0, 1 if d == dim else n) for d, n in enumerate(index.shape))] = valid.all(
                dim, keepdim=True
            )
            found = torch.where(known.to(found.device), found, poison_like(found))
        return found

    return scatter_elements


@torch_op("scatter_nd")
def _scatter_nd(call: OpCall) -> Function:
    """The last dim of the indices names a position in the data's first dims."""
    shape, count = call.inputs[0].shape, call.inputs[1].shape[-1]
    scatter, linear = _scatter_along(call), Linear(Range(call, Place()), shape[:count])
    places, rest = math.prod(shape[:count]), math.prod(shape[count:])

    def scatter_nd(x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        rows = linear(index.reshape(-1, count), (1, index))[0][:, None].expand(-1, rest)
        return scatter(x.reshape(places, rest), 0, rows, updates.reshape(rows.shape)).reshape(shape)

    return scatter_nd


@placed_torch_op("mesh.local_scatter")
def _local_scatter(call: OpCall, place: Place) -> Function:
    """`R.scatter_elements`, `R.scatter_nd` or `R.index_put` into a tensor of which indexed dims are split: of the
    updates those that belong into this device's tile. Literals: the data's global shape, its layout as text, the dims
    that are indexed, the operator's name and how it combines."""
    _, data, text, dims, name, how = call.literals
    mesh = place.mesh
    if mesh is None:
        refuse("mesh.local_scatter is an operator of one device of a mesh", fix=f"use R.{name} in global view")
    layout, tile = Sharding.parse(mesh, len(data), text), call.outputs[0].shape
    start, held = layout.tile_offset(data, place.rank), layout.valid_extent(data, place.rank)
    kept = tuple([slice(0, size) for size in tile])

    def mine(index: Tensor, dim: int) -> Tensor:
        """Where in the tile, or in one more row after it, which takes what is another device's."""
        index = index.long()
        index = torch.where(index < 0, index + data[dim], index) - start[dim]
        return torch.where((index >= 0) & (index < held[dim]), index, tile[dim])

    def local_scatter(x: Tensor, *rest: Tensor) -> Tensor:
        _check_places(call, place, [data[d] for d in dims], rest[:-1])
        longer = F.pad(x, [n for d in reversed(range(x.ndim)) for n in (0, int(d in dims))])
        places = rest[:-1] if name != "scatter_nd" else rest[0].unbind(-1)
        found = [mine(index, dim) for index, dim in zip(places, dims, strict=True)]
        return _SCATTER[name](longer, found, rest[-1], dims, how)[kept]

    return local_scatter


def _check_places(call: OpCall, place: Place, sizes: Sequence[int], indices: Sequence[Tensor]) -> None:
    """Refuse places outside the data; of indices in tiles, of what is no padding."""
    if place.valid is None:
        return
    for number, index in enumerate(indices, 1):
        valid = place.valid[number].of(index)
        columns = valid.unbind(-1) if len(sizes) > len(indices) else [valid]
        for column, size in zip(columns, sizes if len(columns) > 1 else [sizes[number - 1]], strict=True):
            refuse_outside(call, column, -size, size)


def _put_elements(x: Tensor, places: list[Tensor], updates: Tensor, dims: tuple[int, ...], how: str) -> Tensor:
    return _scattered(x, dims[0], places[0], updates, how)


def _put_pieces(x: Tensor, places: list[Tensor], updates: Tensor, dims: tuple[int, ...], how: str) -> Tensor:
    linear = torch.zeros_like(places[0])
    for index, size in zip(places, x.shape, strict=False):
        linear = linear * size + index
    lines = x.reshape(math.prod(x.shape[: len(dims)]), -1)
    rows = linear.reshape(-1, 1).expand(-1, lines.shape[1])
    return _scattered(lines, 0, rows, updates.reshape(rows.shape), how).reshape(x.shape)


def _put_values(x: Tensor, places: list[Tensor], values: Tensor, dims: tuple[int, ...], how: str) -> Tensor:
    return torch.index_put(x, tuple(places), values, how == "accumulate")


_SCATTER = {"scatter_elements": _put_elements, "scatter_nd": _put_pieces, "index_put": _put_values}
