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
    """Pipeline parallelism: cut a model into stages on several meshes, through which batches go in microbatches.

    Args:
        model: an ImportedModule (of `from_torch` or `from_onnx`), or a Relax module, for the rows of one microbatch or
            for any number of rows.
        topology: the meshes; None takes those of the module's annotations (`R.device_mesh`), as "mesh0", "mesh1", ...
        stages: {mesh: names} gives every mesh a stage that computes these values (of submodules, as "blocks.0", or of
            bindings) and what they need; {name: mesh} and {name: (mesh, stage)} assign values; a list has the values
            after which to cut; a number cuts where stages cost alike on `machine`. None takes the module's annotations.
        shardings: layouts of values and weights, as `annotate_module` takes them: per mesh, {mesh: {name: layout}}, or
            for all, {name: layout}, of which every mesh takes the axes that it has.
        microbatches: the number of microbatches that a batch is split into, along its first dim.
        schedule: a Schedule, or the name of one (`SCHEDULES`); None: "1f1b" with `train`, otherwise "forward".
        train: compute gradients of all weights that hold floats, or of the named ones. The function's first result has
            to be the loss.
        reduction: how scalar results depend on the rows of a batch: "mean" or "sum"; None: it is derived. It has to be
            stated where a sum is divided by a constant that may be the number of a microbatch's rows.
        per_microbatch: values (of submodules, or bindings) that mix the rows of a microbatch, as a batch norm does in
            training, and may do so: the result is then not the whole batch's.
        weights: tensors for parameters that stay the same from call to call; None: those of the ImportedModule, or
            those that a frontend attached to the function (its attribute "params"). If the function has the attribute
            `num_input` and a batch is split, all parameters after that many have to be among them.
        machine: the Machine that stages are cut and planned for, or a preset's name ("h100x16"); None: this project's
            CPU ranks.
        function: the name of the function to run.
        target, strict, replicate_unknown, check_indices, poison: as in `distribute_module`.
        loss_scale: for 16-bit training: the loss is multiplied by this before the backward pass, and the gradients are
            divided by it in float32. A number, or "dynamic": an update whose gradients overflow is skipped, and the
            scale reduced.
        recompute: keep only the inputs of each stage for its backward, which runs the stage's forward again.
        memory: the kind of memory, "device" or "pinned_host", by name: of values (of submodules, or bindings) while
            they are kept for the backward, and of weights while no action uses them. For values it can also be stated
            in `stages`: {name: "m0@pinned_host"}. On a CPU both are the same.
        limit: the most microbatches that a mesh may hold at a time, or one number per mesh.
        ranks: run on the ranks of torch.distributed, rank i as device i of the topology. All ranks make the same calls
            with the same global batches, and get the same results.

    Returns:
        The Pipeline, a callable that takes the function's inputs for a whole batch and returns its results.

    Raises:
        MeshTensorError: the model can't be cut or distributed as stated, or the schedule can't run it.
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
