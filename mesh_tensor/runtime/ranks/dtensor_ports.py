"""How DTensors enter and leave a rank's launch: as they lie where that fits, redistributed where it doesn't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import RedistributionPlan
from mesh_tensor.runtime.elementwise import copy
from mesh_tensor.targets.dtypes import dtype_name

from .dtensor import as_dtensor, lies_like_torch, local_part, major_only, moved_by_torch
from .rank_launch import RankLaunch
from .tiling import Tiling

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Transfer(NamedTuple):
    """How a DTensor for a parameter changed its layout, on its way in or out, and who moved it: we by `plan`, or
    torch."""

    parameter: str
    comes_in: bool
    by_torch: bool
    plan: RedistributionPlan


def transfers(launch: RankLaunch, layouts: Mapping[str, Sharding], returned: Sequence[str]) -> list[Transfer]:
    """What `enter` and `leave` do for arguments that lie so."""
    found = []
    for name, layout in layouts.items():
        port = launch.ports[name]
        if port.input is not None:
            mine = layout if lies_like_torch(layout, port.input.shape) else major_only(layout)
            found += _between(name, True, port.input, [layout, mine, port.input.sharding], by_torch=0)
    for name in returned:
        tiling = launch.ports[name].output
        assert tiling is not None
        layout = layouts.get(name, tiling.sharding)
        mine = layout if lies_like_torch(layout, tiling.shape) else major_only(layout)
        found += _between(name, False, tiling, [tiling.sharding, mine, layout], by_torch=1)
    return found


def _between(name: str, comes_in: bool, tiling: Tiling, layouts: list[Sharding], by_torch: int) -> list[Transfer]:
    """The changes from each layout to the next; the change number `by_torch` is torch's."""
    dtype = dtype_name(tiling.dtype)
    return [
        Transfer(
            name,
            comes_in,
            number == by_torch,
            RedistributionPlan.make(tiling.shape, dtype, tiling.dtype.itemsize, before, after),
        )
        for number, (before, after) in enumerate(pairwise(layouts))
        if before != after
    ]


def enter(launch: RankLaunch, name: str, tensor: DTensor, layout: Sharding) -> torch.Tensor | None:
    """This rank's part of a DTensor that lies as `layout`, in the layout of the parameter. None: there is nothing to
    come in, and the result can't be written where it is to end up."""
    port = launch.ports[name]
    wanted, shape = port.tiling.sharding, tuple(tensor.shape)
    fits = layout == wanted and lies_like_torch(layout, shape)
    if fits:
        return local_part(tensor)
    if port.input is None:
        return None
    if not lies_like_torch(layout, shape):
        layout = major_only(layout)
        tensor = moved_by_torch(tensor, layout, launch.ranks)
    local = local_part(tensor)
    if layout == wanted:
        return local
    tiling = Tiling(shape, tensor.dtype, layout, launch.ranks.rank)
    return launch.change(tiling, wanted, tiling.tile(local))


def leave(launch: RankLaunch, name: str, given: DTensor | None, layout: Sharding | None, result: torch.Tensor) -> Any:
    """The DTensor for a result: the one that was passed, filled, or a new one that lies as the parameter does."""
    tiling = launch.ports[name].output
    assert tiling is not None
    sharding, device_mesh = tiling.sharding, launch.ranks.device_mesh
    if given is None or layout is None:
        return _made(launch, tiling, result, sharding, device_mesh)
    if layout == sharding and lies_like_torch(layout, tiling.shape):
        return given  # it was written
    made = _made(launch, tiling, result, layout, device_mesh)
    target = local_part(given)
    if target.numel():
        copy(target, local_part(made))
    return given


def _made(launch: RankLaunch, tiling: Tiling, result: torch.Tensor, layout: Sharding, device_mesh: Any) -> DTensor:
    """A DTensor that lies as `layout`, from this rank's valid part of the value."""
    possible = layout if lies_like_torch(layout, tiling.shape) else major_only(layout)
    if possible != tiling.sharding:
        tile = launch.change(tiling, possible, tiling.tile(result))
        result = Tiling(tiling.shape, tiling.dtype, possible, launch.ranks.rank).valid(tile)
    made = as_dtensor(result, device_mesh, possible, tiling.shape)
    return made if possible == layout else moved_by_torch(made, layout, launch.ranks)
