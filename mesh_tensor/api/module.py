"""distribute_module: from a Relax module in global view to a callable on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

from tvm import ir

from mesh_tensor.annotations.annotate_module import annotate_module
from mesh_tensor.annotations.names import check_module
from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import machine_named
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.importers import ImportedModule
from mesh_tensor.program.from_graph import Kernels
from mesh_tensor.program.overlap import check_overlap
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.ranks.dtensor import mesh_of
from mesh_tensor.runtime.virtual.mesh_tensor import ShardingLike

from .fragments import Options
from .mesh_module import MeshModule
from .module_gradient import RecordedModule
from .training import TrainingStep
from .training_layouts import annotated_step
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
    donate: bool = False,
    machine: Machine | str | None = None,
) -> Any:
    """Make a Relax module callable on a mesh.

    Args:
        mod: the module in global view, with annotations (`annotate_module`, `R.dist.annotate_sharding`) or without;
            what `from_torch` gave, whose weights are then known, and which is called as the model was recorded, and
            gives what that gave; or a `training_step`.
        mesh: a Mesh, a dict, or a DeviceMesh of torch's, on whose ranks the module then runs; None takes the mesh that
            the module's annotations are for.
        shardings: layouts of named parameters and values, as `annotate_module` takes them.
        weights: parameters that stay, by name (the module's, or that in torch): split once, whatever sizes come.
            Tensors, or what `open_weights` gives of files. What is left of the parameters is passed at every call.
        priority: whose layouts are heard first, as `annotate_module` takes it.
        function: the function to run.
        target: where kernels run, as in `compile`.
        strict: refuse annotations that can't be used as stated, instead of changing layouts between them.
        replicate_unknown: compute operators without a sharding rule on whole tensors, on every device.
        kernels: operators that run as TileLang kernels: from an operator's name to a function from its call on tiles to
            a kernel on the operands, then the results, or None (torch computes the call).
        check_indices: refuse elements that are looked up in a table that doesn't have them, as torch does; without it
            they give NaN. On ranks, whole tensors are checked before anything runs.
        poison: on a virtual mesh, padding holds NaN or extreme integers, so that what reads it shows (for tests).
        overlap: whether collectives run beside operators and kernels. `auto` starts them early, and on ranks splits
            TileLang kernels into slabs where a cost model says so; `off` runs everything in bulk, a number is into
            how many slabs kernels beside a collective are split. Gradients go in buckets where it is `auto`.
        donate: take the tensors out of `weights`, which is empty then: each is let go once it is laid out.
        machine: what the plan is for, or a preset's name ("h100x16"): what is cheap on it is done; None: what is on
            this project's CPU ranks. It changes what is sent and repeated, never the result.

    Returns:
        A `MeshModule`; of a training step, a `TrainingRun`. It is planned here, or at the first call with new sizes if
        the function has symbolic ones.

    Raises:
        MeshTensorError: what was asked for can't be done; the message names the binding and the operator.
    """
    form = None
    if isinstance(mod, ImportedModule):
        mod.check_unwritten()
        mod, form, weights = mod.mod, mod.form, mod.params if weights is None else weights
    step, given = (mod, _step_module(mod, mesh, shardings, priority)) if isinstance(mod, TrainingStep) else (None, mod)
    check_module(given, "distribute_module")
    if kernels and not (isinstance(kernels, Mapping) and all(callable(made) for made in kernels.values())):
        refuse(
            f"the kernels are {shown(kernels)}", fix="give a dict from operators' names to functions that make kernels"
        )
    if donate and not isinstance(weights, MutableMapping):
        refuse("donate takes the tensors out of `weights`", fix="pass them as a dict")
    if shardings and step is None:
        if mesh is None:
            refuse("shardings without a mesh", fix="pass the mesh that they are for")
        given = annotate_module(given, _mesh(mesh), shardings, function, priority=priority)
    elif priority and step is None:
        refuse(f"a priority of {listing(list(priority))} without shardings", fix="state layouts for them")
    options = Options(
        target,
        replicate_unknown=replicate_unknown,
        poison=poison,
        kernels=kernels or {},
        overlap=check_overlap(overlap),
        machine=machine_named(machine),
    )
    made = MeshModule(
        given,
        mesh,
        weights=step.fixed if step else {} if weights is None else weights,
        function=function,
        target=target,
        strict=strict,
        replicate_unknown=replicate_unknown,
        kernels=kernels or {},
        check_indices=check_indices,
        poison=poison,
        overlap=options.overlap,
        donate=donate,
        form=form,
        recorder=None if step else partial(RecordedModule, options=options),
        sub_axes=step is None,
        machine=options.machine,
    )
    return made if step is None else TrainingRun(step, made)


def _step_module(
    step: TrainingStep, mesh: Any, shardings: Mapping[str, ShardingLike] | None, priority: Mapping[str, Any] | None
) -> ir.IRModule:
    """A training step's module, annotated for the mesh that it is to run on."""
    if mesh is None:
        refuse("a training step without a mesh", fix="pass the mesh that it is to run on")
    return annotated_step(step, _mesh(mesh), shardings or {}, priority or {})


def _mesh(mesh: Any) -> Mesh:
    """The names and sizes of a mesh in any form."""
    return mesh_of(mesh) if type(mesh).__name__ == "DeviceMesh" else Mesh(mesh)
