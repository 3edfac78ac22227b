"""What is stated for a training step: for what the optimizer keeps, too, and for ZeRO, where it is split over the
batch's axes, at the third level with the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tvm import ir

from mesh_tensor.annotations.annotate_module import annotate_module
from mesh_tensor.annotations.annotation import check, complete
from mesh_tensor.annotations.named_values import NamedValues
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Shard, Sharding

from .training import TrainingStep


def annotated_step(
    step: TrainingStep, mesh: Mesh, shardings: Mapping[str, Any], priority: Mapping[str, Any]
) -> ir.IRModule:
    """The step's module with what is stated for it. What the optimizer keeps for a parameter lies as the parameter,
    unless something is stated for it. `priority` is as `annotate_module` takes it.

    Raises:
        MeshTensorError: as `annotate_module`; or ZeRO is wanted and no axis splits the batch.
    """
    meant, problems = NamedValues(step.mod, "main").meant_by(shardings)
    if problems or not set(priority) <= set(shardings):
        return annotate_module(step.mod, mesh, shardings, priority=priority)  # which says so
    named = [(var if function == "main" else f"{function}.{var}", name) for name, (function, var), _ in meant]
    named += [(again, name) for var, name in named for again in step.copies.get(var, ())]
    given = {var: shardings[name] for var, name in named}
    sharding = {
        param.name_hint: found
        for param in step.mod["main"].params
        if param.name_hint in given
        and (found := _sharding(mesh, len(param.struct_info.shape), given[param.name_hint])) is not None
    }
    axes = dict.fromkeys(a for n in step.inputs if n in sharding and sharding[n].ndim for a in sharding[n].axes_of(0))
    if step.zero and not axes:
        refuse(
            f"zero={step.zero}, but no axis of {mesh} splits the batch",
            fix=f"state a layout for {listing(list(step.inputs))}, as {{{step.inputs[0]!r}: {{axis: 0}}}}",
        )
    kept = {mine.parameter: tuple(mine.slots.values()) for mine in step.kept}
    shapes = {name: tuple(step.state[name].shape) for name in kept if step.zero or name in sharding}
    layouts = zero_layouts(mesh, step.zero, axes, shapes, kept, sharding)
    layouts = {n: s for n, s in layouts.items() if n not in given or (step.zero == 3 and n in kept)}
    # The batch is heard first, or activations would lie as what is kept for their weights.
    later = {name: 1 for name in layouts if name not in kept or step.zero == 3}
    said = {var: priority[name] for var, name in named if name in priority}
    return annotate_module(step.mod, mesh, {**given, **layouts}, priority={**later, **said})


def _sharding(mesh: Mesh, ndim: int, layout: Any) -> Sharding | None:
    """What a layout in any form says; None where it says nothing that fits."""
    annotation, _ = check(mesh, ndim, complete(mesh, layout))
    return annotation.sharding if annotation else None


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
