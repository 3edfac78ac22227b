"""Operators that make tensors, on torch's default device (`with torch.device(...)`); and `mesh.dropout`, and the
numbers that choose: a hash of where an element stands in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.reductions import neutral
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.dropout import DROPOUT, dropout_of
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
    if (start, step) == (0, 1) and dtype is torch.int64:
        return lambda: torch.arange(count)
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


_BITS = 24  # of a number from 0 to 1


def _signed(number: int) -> int:
    """The bits of a number below 2**64 as one of int64."""
    return number - (1 << 64) if number >> 63 else number


# The finalizer of SplitMix64 (Steele, Lea and Flood: Fast Splittable Pseudorandom Number Generators, 2014).
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def dropped(
    x: Tensor, seed: Tensor, probability: float, stream: int, shape: Sequence[int], offset: Sequence[int]
) -> Tensor:
    """A tile of a tensor of `shape`, which begins at `offset`, whose dropped elements are multiplied with 0: what is
    not finite stays NaN, as in torch."""
    if probability == 0:
        return x.clone()
    if probability == 1:
        return x * 0
    places = torch.zeros((), dtype=torch.int64, device=x.device)
    stride = 1
    for dim in reversed(range(x.ndim)):
        along = torch.arange(offset[dim], offset[dim] + x.shape[dim], device=x.device) * stride
        places = places + along.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
        stride *= shape[dim]
    key = _mixed(_mixed(seed.to(x.device) * _GOLDEN) + stream)
    numbers = _mixed(places.mul_(_GOLDEN).add_(key) if places.ndim else places * _GOLDEN + key)
    stays = numbers.bitwise_and_((1 << _BITS) - 1) >= round(probability * (1 << _BITS))
    del places, numbers  # the product takes as much again
    return (x * (1 / (1 - probability))).mul_(stays)


def _mixed(numbers: Tensor) -> Tensor:
    """The numbers, each of whose bits depends on all of their bits before. In place, but for a single number."""
    for shift, factor in _ROUNDS:
        mask = (1 << (64 - shift)) - 1  # without copies of the sign
        numbers = numbers.bitwise_xor_((numbers >> shift).bitwise_and_(mask)).mul_(factor)
    return numbers


@placed_torch_op(DROPOUT)
def _dropout(call: OpCall, place: Place) -> Function:
    """The elements of this device's tile stand where its layout says."""
    said, dtype = dropout_of(call), call.outputs[0].dtype
    shape, offset = call.inputs[0].shape, (0,) * call.inputs[0].ndim
    if said.layout and place.mesh is not None:
        shape = said.shape
        offset = Sharding.parse(place.mesh, len(shape), said.layout).tile_offset(shape, place.rank)

    def dropout(x: Tensor, seed: Tensor) -> Tensor:
        wide = x.float() if dtype == "float32" else x
        return dropped(wide, seed, said.probability, said.stream, shape, offset)

    return dropout
