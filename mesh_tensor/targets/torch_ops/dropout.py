"""`mesh.dropout`, and the numbers that choose: a hash of where an element stands in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.dropout import DROPOUT, dropout_of

from .table import Function, Place, placed_torch_op

Tensor = torch.Tensor
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
    """A tile of a tensor of `shape`, which begins at `offset`, without the elements that are dropped."""
    if probability == 0:
        return x.clone()
    if probability == 1:
        return torch.zeros_like(x)
    places = torch.zeros((), dtype=torch.int64, device=x.device)
    stride = 1
    for dim in reversed(range(x.ndim)):
        along = torch.arange(offset[dim], offset[dim] + x.shape[dim], device=x.device) * stride
        places = places + along.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
        stride *= shape[dim]
    key = _mixed(_mixed(seed.to(x.device) * _GOLDEN) + stream)
    numbers = _mixed(places.mul_(_GOLDEN).add_(key) if places.ndim else places * _GOLDEN + key)
    stays = numbers.bitwise_and_((1 << _BITS) - 1) >= round(probability * (1 << _BITS))
    return torch.where(stays, x * (1 / (1 - probability)), torch.zeros((), dtype=x.dtype, device=x.device))


def _mixed(numbers: Tensor) -> Tensor:
    """The numbers, each of whose bits depends on all of their bits before. In place, but for a single number."""
    for shift, factor in _ROUNDS:
        high = (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # without copies of the sign
        numbers = numbers.bitwise_xor_(high).mul_(factor)
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
