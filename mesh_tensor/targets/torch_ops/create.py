"""Operators that make tensors. What they make lies on torch's default device (`with torch.device(...)`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.reductions import neutral
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.targets.dtypes import torch_dtype

from .table import Function, Place, placed_torch_op, torch_op

Tensor = torch.Tensor


@torch_op("zeros", "zeros_like", "ones", "ones_like", "full", "full_like")
def _full(call: OpCall) -> Function:
    """The value of `full` is a tensor without dims, or a number; `*_like` take a tensor's shape and device only."""
    shape, dtype = call.outputs[0].shape, torch_dtype(call.outputs[0].dtype)
    like, name = call.name.endswith("_like"), call.name.removesuffix("_like")
    if name != "full" or len(call.inputs) == like:
        value = int(name == "ones") if name != "full" else call.literals[-1]

        def make(x: Tensor | None = None) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=None if x is None else x.device)

        return make
    return lambda *tensors: tensors[-1].to(dtype).reshape(()).expand(shape)


@torch_op("arange")
def _arange(call: OpCall) -> Function:
    start, end, step = call.literals
    count, dtype = call.outputs[0].shape[0], torch_dtype(call.outputs[0].dtype)
    if count != max(0, math.ceil((end - start) / step)):
        refuse(
            f"R.arange from {start} to {end} by {step}",
            where=str(call.expr),
            why=f"TVM takes it for {count} elements, as it does not count a negative step right",
            fix="make it with a positive step and flip it",
        )
    wide = torch.float64 if isinstance(start, float) or isinstance(step, float) else torch.int64
    return lambda: (torch.arange(count, dtype=wide) * step + start).to(dtype)


@torch_op("eye", "eye_like")
def _eye(call: OpCall) -> Function:
    (rows, columns), dtype = call.outputs[0].shape, torch_dtype(call.outputs[0].dtype)
    offset = call.literals[-1] if call.name == "eye" else (*call.literals, 0)[0]

    def eye(x: Tensor | None = None) -> Tensor:
        out = torch.zeros(rows, columns, dtype=dtype, device=None if x is None else x.device)
        if -rows < offset < columns:
            out.diagonal(offset).fill_(1)
        return out

    return eye


@torch_op("tril", "triu")
def _triangle(call: OpCall) -> Function:
    keep = torch.tril if call.name == "tril" else torch.triu
    offset = (*call.literals, 0)[0]
    return lambda x: keep(x, offset)


@torch_op("hamming_window")
def _hamming_window(call: OpCall) -> Function:
    size, periodic, alpha, beta = call.literals
    dtype = torch_dtype(call.outputs[0].dtype)
    return lambda: torch.hamming_window(size, bool(periodic), alpha, beta, dtype=dtype)


@torch_op("size")
def _size(call: OpCall) -> Function:
    elements = call.inputs[0].elements
    return lambda x: torch.tensor(elements, dtype=torch.int64, device=x.device)


@placed_torch_op("mesh.fill_padding")
def fill_padding(call: OpCall, place: Place) -> Callable[[torch.Tensor], torch.Tensor]:
    """(tile, R.shape(global shape), R.str(layout), R.shape(dims), R.str(op)): the tile with what lies beyond the valid
    extent along `dims` set to op's neutral element. Shape, layout and dims may take the tensor's dims further apart."""
    assert place.mesh is not None
    _, shape, layout, dims, op = call.literals
    sharding = Sharding.parse(place.mesh, len(shape), layout)
    tile_shape, valid = sharding.tile_shape(shape), sharding.valid_extent(shape, place.rank)
    value = neutral(op, call.outputs[0].dtype)
    short = [dim for dim in dims if valid[dim] < tile_shape[dim]]

    def fill(tile: torch.Tensor) -> torch.Tensor:
        if not short:
            return tile
        filled = tile.clone(memory_format=torch.contiguous_format)
        for dim in short:
            filled.view(tile_shape).narrow(dim, valid[dim], tile_shape[dim] - valid[dim]).fill_(value)
        return filled

    return fill
