"""ZeRO as layouts: what the optimizer keeps, and at the third level the parameters, are split over the batch's axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Shard, Sharding

_SHARE = 100  # of all elements, small parameters have one in so many
_BYTES = 4  # of an element


def with_axes(sharding: Sharding, shape: tuple[int, ...], axes: Iterable[str]) -> Sharding:
    """The layout with more axes, all on one dim: the first that all axes on it divide, so that tiles lie in one piece;
    else as it is."""
    axes = [axis for axis in axes if sharding.dim_of(axis) is None]
    added = math.prod(sharding.mesh.size(axis) for axis in axes)
    fitting = [dim for dim, size in enumerate(shape) if size and size % (sharding.num_shards(dim) * added) == 0]
    if not axes or not fitting:
        return sharding
    placements = sharding.placements() | dict.fromkeys(axes, Shard(fitting[0]))
    return Sharding.of(sharding.mesh, sharding.ndim, placements)


def small_ones(sizes: Mapping[str, int]) -> set[str]:
    """The smallest parameters, as norms' and biases: what they have together is a hundredth of all at most, and a part
    of one for each device would cost more to collect than it saves. Those of one size are treated alike.

    >>> small_ones({"weight": 10_000, "bias": 100, "gate": 1000})
    {'bias'}
    """
    left, small = sum(sizes.values()) // _SHARE, set()
    for size in sorted(set(sizes.values())):
        alike = [name for name in sizes if sizes[name] == size]
        left -= size * len(alike)
        if left < 0 or size * _BYTES >= CPU.bytes_per_start:
            break
        small.update(alike)
    return small


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
    axes, small = list(axes), small_ones({name: math.prod(shape) for name, shape in parameters.items()})
    for name, shape in parameters.items():
        own = stated.get(name, Sharding.of(mesh, len(shape), {}))
        split = own if name in small else with_axes(own, shape, axes)
        layouts[name] = split if level == 3 else own
        layouts |= dict.fromkeys(kept[name], own if level == 0 else split)
    return layouts
