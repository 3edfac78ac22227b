"""Products of rows with matrices of which each row meets one, as experts compute them."""

from __future__ import annotations

import torch

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.linear_algebra import GROUPED, LOOKED_UP
from mesh_tensor.targets.dtypes import torch_dtype

from .table import Function, Place, placed_torch_op


@placed_torch_op(GROUPED)
def _grouped_matmul(call: OpCall, place: Place) -> Function:
    """The groups that this device has matrices of, in the rows that it has; 0 elsewhere."""
    dtype, shape = torch_dtype(call.outputs[0].dtype), call.outputs[0].shape
    (group, held), row = _matrices(call, place), 0
    if place.mesh is not None and len(call.literals) > 1:
        rows, text = call.literals[1:3]
        row = Sharding.parse(place.mesh, 2, text).tile_offset(rows, place.rank)[0]

    def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        bounds = [max(0, min(shape[0], end - row)) for end in (0, *ends.tolist())]
        result = x.new_zeros(shape, dtype=dtype)
        for number in range(held):
            start, stop = bounds[group + number : group + number + 2]
            if start < stop:
                result[start:stop] = x[start:stop].to(dtype) @ weight[number].to(dtype)
        return result

    return grouped_matmul


@placed_torch_op(LOOKED_UP)
def _looked_up_matmul(call: OpCall, place: Place) -> Function:
    """Rows by the matrices that this device has, those that meet the same one together; 0 elsewhere."""
    dtype, shape = torch_dtype(call.outputs[0].dtype), call.outputs[0].shape
    first, held = _matrices(call, place)

    def looked_up_matmul(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        known, order = ids.sort(stable=True)
        groups = torch.arange(first, first + held + 1, dtype=known.dtype, device=known.device)
        bounds = torch.searchsorted(known, groups).tolist()
        result = x.new_zeros(shape, dtype=dtype)
        for number in range(held):
            start, stop = bounds[number : number + 2]
            if start < stop:
                rows = order[start:stop]
                product = x.index_select(0, rows).to(dtype) @ weight[number].to(dtype)
                result = result.index_copy_(0, rows, product)
        return result

    return looked_up_matmul


def _matrices(call: OpCall, place: Place) -> tuple[int, int]:
    """The first of the matrices that a device has, and how many it has: its call says last how these lie."""
    if place.mesh is None or len(call.literals) < 2:
        return 0, call.inputs[1].shape[0]
    weights, text = call.literals[-2:]
    layout = Sharding.parse(place.mesh, 3, text)
    return layout.tile_offset(weights, place.rank)[0], layout.valid_extent(weights, place.rank)[0]
