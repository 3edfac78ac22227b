"""mt.pipeline: from what is asked for to a Pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tvm import ir

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU, machine_named
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.topology import Topology
from mesh_tensor.importers import ImportedModule
from mesh_tensor.importers.constants import Constants
from mesh_tensor.pipelining.flow import Flow
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.program.plan_module import PlanOptions
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.sequential import attached_weights
from mesh_tensor.runtime.sequential_runner import as_tensor

from ..fragments import Options
from ..module_ports import whole
from ..training_optimizer import LossScale
from .model import Pipeline
from .stated import held_memory, without_memory


@undisturbed
def pipeline(
    model: ImportedModule | ir.IRModule,
    topology: Topology | Mapping[str, Mesh | Mapping[str, int]] | None = None,
    stages: Any = None,
    shardings: Mapping[str, Any] | None = None,
    *,
    microbatches: int = 1,
    schedule: Schedule | str | None = None,
    train: bool | Sequence[str] = False,
    reduction: str | None = None,
    per_microbatch: Sequence[str] = (),
    weights: Mapping[str, torch.Tensor] | None = None,
    machine: Machine | str | None = None,
    function: str = "main",
    target: str = "auto",
    strict: bool = False,
    replicate_unknown: bool = False,
    recompute: bool = False,
    memory: Mapping[str, str] | None = None,
    check_indices: bool = True,
    limit: float | Sequence[float] | None = None,
    ranks: bool = False,
    loss_scale: float | str | None = None,
    poison: bool = False,
) -> Pipeline:
    """A model whose stages lie on several meshes; batches go through it in microbatches.

    Args:
        model: what `from_torch` or `from_onnx` gave, or a Relax module. It takes one microbatch, or any number of rows.
        topology: the meshes; None takes those of the module's annotations (`R.device_mesh`), as "mesh0", "mesh1", ...
        stages: {mesh: names} gives every mesh a stage that computes these values (of submodules, as "blocks.0", or of
            bindings) and what they need; {name: mesh} and {name: (mesh, stage)} assign values; a list has the values
            after which to cut; a number cuts where stages cost alike on `machine`. None takes the module's annotations.
        shardings: layouts of values and weights, as `annotate_module` takes them: per mesh, {mesh: {name: layout}}, or
            for all, {name: layout}, of which every mesh takes the axes that it has.
        microbatches: in how many parts a batch is split along its first dim.
        schedule: its name (`SCHEDULES`), or a Schedule; "forward" where nothing is trained, "1f1b" else.
        train: whether gradients of the weights are computed (all that hold floats), or of which. The function's first
            result is the loss then.
        reduction: what results that are numbers are over the rows of a batch, a "mean" or a "sum"; None: what they are
            found to be. Has to be said where a sum is divided by a number that may be that of a microbatch's rows.
        per_microbatch: values (of submodules, or bindings) that take the rows of a microbatch together, as a batch norm
            does in training, and are to do so: the result is not the whole batch's then.
        weights: parameters that stay; those of an ImportedModule, or those that a frontend has attached to the function
            (its attribute "params"), where nothing is given. What follows the first `num_input` parameters, where the
            function has such an attribute, has to be among them if a batch is split.
        machine: what it is cut and planned for, or a preset's name ("h100x16"); None: this project's CPU ranks.
        function: the function to run.
        target, strict, replicate_unknown, check_indices, poison: as in `distribute_module`.
        loss_scale: what the loss is multiplied with before gradients are taken, which are divided by it again, in
            float32: a number, or "dynamic", which leaves out updates whose gradients overflow and goes on with a
            smaller one.
        recompute: save nothing of a forward but what its stage takes; backwards run it again.
        memory: the kind of memory, "device" or "pinned_host", in which stages hold values for their backwards, by name
            (of submodules, or bindings), and weights while no action takes them; of values also stated as
            {name: "m0@pinned_host"} in `stages`. On a CPU all are one.
        limit: microbatches that a mesh may hold at a time, or one number per mesh.
        ranks: run on the ranks of torch.distributed, rank i as device i of the topology. All ranks make the same calls,
            with the same whole batches; what the function returns is the same on all of them.

    Returns:
        The callable: takes a whole batch, as the function does what is no weight, and gives what the function does.

    Raises:
        MeshTensorError: what was asked for can't be done; nothing has run.
    """
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        refuse(f"microbatches={shown(microbatches)}", fix="give the number of parts of a batch, at least 1")
    if train is True and isinstance(model, ImportedModule) and model.buffers:
        refuse(
            f"train=True would train the buffers {listing(list(model.buffers))}",
            fix="name the weights that are trained (train=[...]), or import the model without its buffers",
        )
    if train is True and isinstance(model, ImportedModule) and model.frozen:
        refuse(
            f"train=True would train {listing(list(model.frozen))}",
            why="they require no gradient",
            fix="name the weights that are trained (train=[...])",
        )
    mod, given, constants = model, {}, Constants()
    if isinstance(model, ImportedModule):
        model.constants.check_unwritten()
        mod, given, constants = model.mod, model.params, model.constants
    on = machine_named(machine)
    flow = Flow(mod, function)
    if not isinstance(model, ImportedModule):
        given = {name: as_tensor(value) for name, value in attached_weights(flow.mod[flow.function]).items()}
    stages, kinds = without_memory(stages, memory or {})
    planned = PlanOptions(replicate_unknown, check_indices=check_indices, machine=on)
    options = Options(target, strict, poison, recompute, plan=planned, carries=ranks and not kinds)
    made = Pipeline(
        flow, topology, given if weights is None else constants.left_out(weights, whole), train, options, ranks
    )
    if microbatches > 1:
        _check_inputs(made, flow)
    made._constants, made._form = constants, model.form if isinstance(model, ImportedModule) else None
    made._machine = on or CPU
    made._scale = LossScale.make(loss_scale)
    if made._scale is not None and not made.trained:
        refuse(f"loss_scale={shown(loss_scale)}, but no gradients are taken", fix="leave it out, or pass train=True")
    made._read_results(microbatches, reduction, per_microbatch)
    made.memory |= held_memory(flow, kinds, made.inputs)
    made._cut(stages, shardings or {}, schedule or ("1f1b" if train else "forward"), limit)
    made._checks_indices = check_indices
    return made


def _check_inputs(made: Pipeline, flow: Flow) -> None:
    """Refuse a function that says of more parameters that they are weights than are given: they would be split."""
    func = flow.mod[flow.function]
    attrs = func.attrs or {}
    if "num_input" not in attrs or len(flow.params) != len(func.params):
        return
    count = int(attrs["num_input"])
    names = list(flow.params)[count:]
    if missing := [name for name in names if name in made.inputs]:
        refuse(
            f"the weights lack {listing(missing)}",
            where=f"pipeline of {flow.function!r}",
            why=f"what follows its first {count} parameters are weights, as its attribute num_input says",
            fix="pass weights={name: tensor} with all of them, or remove the attribute",
        )
