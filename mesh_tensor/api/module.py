"""distribute_module: from a Relax module in global view to a callable on a mesh; and what is stated for a training
step: for what the optimizer keeps, too, and for ZeRO, where it is split over the batch's axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

from tvm import ir

from mesh_tensor.annotations.annotate_module import annotate_module
from mesh_tensor.annotations.annotation import check, complete
from mesh_tensor.annotations.named_values import NamedValues
from mesh_tensor.annotations.names import check_module, meant_function
from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU, machine_named
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Shard, Sharding
from mesh_tensor.importers import ImportedModule
from mesh_tensor.importers.constants import Constants
from mesh_tensor.program.from_graph import Kernels
from mesh_tensor.program.fuse import check_fuse
from mesh_tensor.program.overlap import check_overlap
from mesh_tensor.program.plan_module import PlanOptions
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.ranks.dtensor import mesh_of
from mesh_tensor.runtime.virtual.mesh_tensor import ShardingLike

from .fragments import Options
from .mesh_module import MeshModule
from .module_gradient import RecordedModule
from .module_ports import whole
from .training import TrainingStep
from .training_run import TrainingRun


@undisturbed
def distribute_module(
    mod: Any,
    mesh: Any = None,
    shardings: Mapping[str, ShardingLike] | None = None,
    *,
    weights: Mapping[str, Any] | None = None,
    priority: Mapping[str, int | Mapping[str, int]] | None = None,
    function: str = "main",
    target: str = "auto",
    strict: bool = False,
    replicate_unknown: bool = False,
    kernels: Kernels | None = None,
    check_indices: bool = True,
    poison: bool = False,
    overlap: str | int = "auto",
    fuse: str = "auto",
    donate: bool = False,
    machine: Machine | str | None = None,
) -> Any:
    """Make a Relax module callable on a mesh.

    Args:
        mod: the module in global view, with annotations (`annotate_module`, `R.dist.annotate_sharding`) or without; an
            ImportedModule (of `from_torch`), which brings its weights, and is called as the torch model was exported;
            or a `training_step`.
        mesh: a Mesh, a dict from axes to sizes, or a torch DeviceMesh, on whose ranks the module then runs; None: the
            mesh of the module's annotations.
        shardings: layouts of parameters and values by name, as in `annotate_module`.
        weights: tensors for parameters that stay the same from call to call, by the parameter's name or that in torch,
            or the result of `open_weights`. They are distributed once. All other parameters are passed at every call.
        priority: the order in which stated layouts propagate, as in `annotate_module`.
        function: the name of the function to run.
        target: the target of kernels, as in `compile`.
        strict: refuse annotations that can't be used as stated, instead of redistributing between them.
        replicate_unknown: compute operators that have no sharding rule replicated, on every device.
        kernels: TileLang kernels for operators: from an operator's name to a function of its call on tiles, which
            returns a kernel whose parameters are the operands, then the results; or None for torch's operator.
        check_indices: refuse indices out of range and integer division by 0, as torch does; without it such elements
            are NaN, or the lowest integer. On ranks, indices in global tensors are checked before anything runs.
        poison: on a virtual mesh, fill padding with NaN or extreme integers, so that reads of it show (for tests).
        overlap: overlap of collectives with operators and kernels. `auto` starts collectives early, reduces gradients
            in buckets, and on ranks splits TileLang kernels into slabs where the cost model says so; `off` runs one
            step after the other; a number is the number of slabs of kernels that overlap with a collective.
        fuse: operators that run as one: products with a transposed matrix or a bias, norms that are written out,
            attention in which heads of queries share keys, softmax's gradients. `explain()` has each with what it is
            one for. `off` runs each operator alone, as the graph has it, to look at what lies between: slower, and in
            16 bits a product is rounded before its bias is added.
        donate: empty the dict `weights`: each tensor in it is freed once it is distributed.
        machine: the Machine that the plan is optimized for, or a preset's name ("h100x16"); None: this project's CPU
            ranks. It changes what is communicated and recomputed, never the result.

    Returns:
        A `MeshModule`; of a training step, a `TrainingRun`. A function with symbolic sizes is planned at the first call
        with new sizes, any other one here.

    Raises:
        MeshTensorError: something can't be distributed as stated; the message names the bindings and operators.
    """
    form, constants = None, Constants()
    if isinstance(mod, ImportedModule):
        mod.constants.check_unwritten()
        weights = mod.params if weights is None else mod.constants.left_out(weights, whole, donate)
        mod, form, constants = mod.mod, mod.form, mod.constants
    if isinstance(mod, TrainingStep):
        mod.constants.check_unwritten("the step of training", "make the step after the model is written")
        if weights is not None:
            refuse(
                "weights are given for a step of training",
                why="it starts from those that its model had",
                fix="write them into the model before training_step, or load them: run.load_state_dict(...)",
            )
    step, given = (mod, _step_module(mod, mesh, shardings, priority)) if isinstance(mod, TrainingStep) else (None, mod)
    _check(given, kernels, weights, donate)
    function = meant_function(given, function)
    if shardings and step is None:
        if mesh is None:
            refuse("shardings without a mesh", fix="pass the mesh that they are for")
        given = annotate_module(given, _mesh(mesh), shardings, function, priority=priority)
    elif priority and step is None:
        refuse(f"a priority of {listing(list(priority))} without shardings", fix="state layouts for them")
    options = PlanOptions(
        replicate_unknown,
        kernels or {},
        check_overlap(overlap),
        check_indices,
        machine_named(machine),
        sub_axes=True,
        fuse=check_fuse(fuse),
    )
    made = MeshModule(
        given,
        mesh,
        weights=step.fixed if step else {} if weights is None else weights,
        function=function,
        target=target,
        strict=strict,
        poison=poison,
        options=options,
        donate=donate,
        form=form,
        constants=constants,
        recorder=None if step else partial(RecordedModule, options=Options(target, poison=poison, plan=options)),
        kept=step.state if step else (),
    )
    return made if step is None else TrainingRun(step, made)


def _check(given: object, kernels: object, weights: object, donate: bool) -> None:
    check_module(given, "distribute_module", takes_imported=True)
    if kernels and not (isinstance(kernels, Mapping) and all(callable(made) for made in kernels.values())):
        refuse(
            f"the kernels are {shown(kernels)}", fix="give a dict from operators' names to functions that make kernels"
        )
    if donate and not isinstance(weights, MutableMapping):
        refuse("donate takes the tensors out of `weights`", fix="pass them as a dict")


def _step_module(
    step: TrainingStep, mesh: Any, shardings: Mapping[str, ShardingLike] | None, priority: Mapping[str, Any] | None
) -> ir.IRModule:
    """A training step's module, annotated for the mesh that it is to run on."""
    if mesh is None:
        refuse("a training step without a mesh", fix="pass the mesh that it is to run on")
    return annotated_step(step, _mesh(mesh), shardings or {}, priority or {})


def _mesh(mesh: Any) -> Mesh:
    return mesh_of(mesh) if type(mesh).__name__ == "DeviceMesh" else Mesh(mesh)


def annotated_step(
    step: TrainingStep, mesh: Mesh, shardings: Mapping[str, Any], priority: Mapping[str, Any]
) -> ir.IRModule:
    """The step's module with what is stated for it. What the optimizer keeps for a parameter lies as the parameter,
    unless something is stated for it. `priority` is as `annotate_module` takes it. Refused as by `annotate_module`, and
    where ZeRO is wanted and no axis splits the batch."""
    if isinstance(shardings, TrainingStep):
        refuse(
            "a training step where layouts are expected",
            why="strategies.zero gives the step, whose optimizer's state is split over the axes that split the batch",
            fix="distribute_module(strategies.zero(step, level), mesh, strategies.data_parallel(step))",
        )
    is_dict = isinstance(shardings, Mapping)
    meant, problems = NamedValues(step.mod, "main").meant_by(shardings if is_dict else ())
    if problems or not is_dict or not set(priority) <= set(shardings):
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
    """The layout with more axes, all on one dim: the first that nothing splits and that they divide, so that tiles lie
    in one piece; else, of a tensor with several dims, the first that all axes on it divide; else, of a large tensor,
    the largest that nothing splits; else as it is."""
    axes = [axis for axis in axes if sharding.dim_of(axis) is None]
    added = math.prod(sharding.mesh.size(axis) for axis in axes)
    fitting = [dim for dim, size in enumerate(shape) if size and size % (sharding.num_shards(dim) * added) == 0]
    # Where another axis splits a dim first, gradients that are scattered along it lie in another order than the mesh's.
    whole = [dim for dim in fitting if sharding.num_shards(dim) == 1]
    large = math.prod(shape) * _BYTES >= CPU.bytes_per_start
    free = [dim for dim, size in enumerate(shape) if large and size >= added and sharding.num_shards(dim) == 1]
    dims = whole or (fitting if len(shape) > 1 else []) or sorted(free, key=lambda dim: -shape[dim])
    if not axes or not dims:
        return sharding
    placements = sharding.placements() | dict.fromkeys(axes, Shard(dims[0]))
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
