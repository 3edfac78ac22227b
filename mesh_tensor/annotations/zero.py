"""ZeRO as layouts: what the optimizer keeps, and at the third level the parameters, are split over the batch's axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Shard, Sharding


def with_axes(sharding: Sharding, shape: tuple[int, ...], axes: Iterable[str]) -> Sharding:
    """The layout with more axes, all on one dim: the largest that all axes on it divide, else as it is. Small tensors
    stay as they are, too: a part of them for each device is not worth a collective."""
    axes = [axis for axis in axes if sharding.dim_of(axis) is None]
    added = math.prod(sharding.mesh.size(axis) for axis in axes)
    fitting = [dim for dim, size in enumerate(shape) if size and size % (sharding.num_shards(dim) * added) == 0]
    if not axes or not fitting:
        return sharding
    dim = max(fitting, key=lambda d: (shape[d] // sharding.num_shards(d), -d))
    placements = sharding.placements() | dict.fromkeys(axes, Shard(dim))
    return Sharding.of(sharding.mesh, sharding.ndim, placements)


def zero_layouts(
    mesh: Mesh,
    level: int,
    axes: Iterable[str],
    parameters: Mapping[str, tuple[int, ...]],
    kept: Mapping[str, Iterable[str]],
    stated: Mapping[str, Sharding],
) -> dict[str, Sharding]:
    """Layouts of parameters and of what is kept for them.

    parameters  name -> shape
    kept        name -> the names of what the optimizer keeps for it
    stated      what is stated for parameters; all others are replicated
    """
    layouts: dict[str, Sharding] = {}
    axes = list(axes)
    for name, shape in parameters.items():
        own = stated.get(name, Sharding.of(mesh, len(shape), {}))
        split = with_axes(own, shape, axes)
        layouts[name] = split if level == 3 else own
        layouts |= dict.fromkeys(kept[name], own if level == 0 else split)
    return layouts
