"""The local operator `mesh.fill_padding`: padding is made neutral before an operator reduces over it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mesh_tensor.base.reductions import neutral
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.call import OpCall

from .table import Place, placed_torch_op


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
