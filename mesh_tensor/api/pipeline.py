"""mt.pipeline: a model on several meshes, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tvm import ir

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import MODULE_SIZES, Recent
from mesh_tensor.base.topology import Topology
from mesh_tensor.importers import ImportedModule
from mesh_tensor.pipeline.annotated import annotated_stages, annotated_topology
from mesh_tensor.pipeline.assign import NamedStage, assign, stages_by_mesh
from mesh_tensor.pipeline.flow import Flow
from mesh_tensor.pipeline.place import check_pipeline, place
from mesh_tensor.pipeline.schedule import Schedule
from mesh_tensor.pipeline.stages import Stage, cut
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.module_inputs import ModuleSignature, bound
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .pipeline_layouts import stage_layouts
from .pipeline_rows import Mailbox, Row, run_rows
from .pipeline_stages import Options, StageFragments, Values, forward_fragments

_HOW = (
    'give {"m0": ["embed", "blocks.0"], "m1": [...]}: per mesh the values (of submodules, or bindings) that it '
    'computes; {"embed": ("m0", 0), ...}; the values after which to cut, as ["blocks.1"]; or a number of stages'
)


@undisturbed
def pipeline(
    model: ImportedModule | ir.IRModule,
    topology: Topology | Mapping[str, Mesh | Mapping[str, int]] | None = None,
    stages: Any = None,
    shardings: Mapping[str, Any] | None = None,
    *,
    microbatches: int = 1,
    schedule: Schedule | str = "forward",
    weights: Mapping[str, torch.Tensor] | None = None,
    function: str = "main",
    target: str = "auto",
    strict: bool = False,
    replicate_unknown: bool = False,
    limit: float | Sequence[float] | None = None,
    poison: bool = False,
) -> Pipeline:
    """A model whose stages lie on several meshes; batches go through it in microbatches.

    Args:
        model: what `from_torch` or `from_onnx` gave, or a Relax module.
        topology: the meshes; None takes those of the module's annotations (`R.device_mesh`), as "mesh0", "mesh1", ...
        stages: {mesh: names} gives every mesh a stage that computes these values (of submodules, as "blocks.0", or of
            bindings) and what they need; {name: mesh} and {name: (mesh, stage)} assign values; a list has the values
            after which to cut; a number cuts so that stages cost alike. None takes the module's annotations.
        shardings: layouts of values and weights, as `annotate_module` takes them: per mesh, {mesh: {name: layout}}, or
            for all, {name: layout}, of which every mesh takes the axes that it has.
        microbatches: in how many parts a batch is split along its first dim.
        schedule: its name (`SCHEDULES`), or a Schedule.
        weights: parameters that stay; those of an ImportedModule, where nothing is given.
        function: the function to run.
        target, strict, replicate_unknown, poison: as in `distribute_module`.
        limit: microbatches that a mesh may hold at a time, or one number per mesh.

    Returns:
        The callable: takes a whole batch, as the function does what is no weight, and gives what the function does.

    Raises:
        MeshTensorError: what was asked for can't be done; nothing has run.
    """
    mod, given = (model.mod, model.params) if isinstance(model, ImportedModule) else (model, {})
    options = Options(target, strict, replicate_unknown, poison)
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        refuse(f"microbatches={shown(microbatches)}", fix="give the number of parts of a batch, at least 1")
    return Pipeline(
        Flow(mod, function),
        topology,
        stages,
        shardings or {},
        microbatches=microbatches,
        schedule=schedule,
        weights=given if weights is None else weights,
        limit=limit,
        options=options,
    )


class Pipeline:
    """A model on several meshes: takes whole batches, splits them, and runs its schedule; a thread per mesh.

    Results with a first dim of the batch are put together along it; numbers are means over the batch's rows."""

    def __init__(
        self,
        flow: Flow,
        topology: Any,
        stages: Any,
        shardings: Mapping[str, Any],
        *,
        microbatches: int,
        schedule: Schedule | str,
        weights: Mapping[str, Any],
        limit: float | Sequence[float] | None,
        options: Options,
    ) -> None:
        self._flow, self._options, self.microbatches = flow, options, microbatches
        self._signature = ModuleSignature(flow.mod, flow.function)
        self._whole = self._signature.weights(weights, "cpu")
        self.inputs = tuple(name for name in flow.params if name not in self._whole)
        self.topology = annotated_topology(flow) if topology is None else Topology(topology)
        if stages is None:
            self._where, stated = annotated_stages(flow, self.topology)
            meshes: list[str | None] = [*stated]
        else:
            named = _named_stages(flow, stages, self.topology)
            self._where = assign(flow, named, self.inputs)
            meshes = [stage.mesh for stage in named]
        self._meshes, self.schedule = place(self.topology, meshes, schedule, microbatches)
        self.stages = cut(flow, self._where, self._meshes)
        check_pipeline(
            self.schedule, {s.index: tuple(dict.fromkeys(s.takes.values())) for s in self.stages}, False, limit
        )
        self._layouts = stage_layouts(flow, self.stages, self.topology, shardings)
        self._plans: Recent[tuple[int, ...], tuple[StageFragments, ...]] = Recent(MODULE_SIZES)
        self._weights: dict[int, Values] = {}
        self.peak_bytes = dict.fromkeys(self.topology, 0)
        if not self._signature.symbols:
            self._planned({})

    @undisturbed
    def __call__(self, *batch: torch.Tensor, **named: torch.Tensor) -> Any:
        tensors = self._signature.bind(self._whole, batch, named)
        parts = self._split({name: tensors[name] for name in self.inputs})
        plans = [self._planned(self._signature.check({**tensors, **part})) for part in parts]
        mailbox = Mailbox()
        rows = [Row(plans.__getitem__, mailbox, self._weights, parts) for _ in self.topology]
        run_rows(self.schedule, rows, self.topology.names, mailbox)
        made = {key: value for row in rows for key, value in row.results.items()}
        return self._tree(made, [_rows_of(part) for part in parts])

    def _split(self, batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The batch in microbatches."""
        sizes = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in batch.items()}
        count, rows = self.microbatches, max(sizes.values(), default=0)
        own = {p.name: p.shape[0] for p in self._signature.params if p.name in batch and p.shape}
        fixed = next((size for size in own.values() if isinstance(size, int)), None)
        each = fixed if fixed is not None else -(-rows // count)
        problems = [f"input {name!r} has {size} rows, others {rows}" for name, size in sizes.items() if size != rows]
        if not problems and fixed is not None and rows != fixed * count:
            problems = [f"a batch of {rows} rows in {count} microbatches, but the module takes {fixed} rows at a time"]
        elif not problems and each * (count - 1) >= rows:
            problems = [f"a batch of {rows} rows in {count} microbatches leaves some without rows"]
        if problems:
            refuse(
                problems,
                where=f"call of the pipeline of {self._flow.function!r}",
                fix=f"pass {count} x {fixed} rows, or export the model with an open batch size"
                if fixed is not None
                else "pass more rows, the same for all inputs, or fewer microbatches",
            )
        return [{name: tensor[i * each : (i + 1) * each] for name, tensor in batch.items()} for i in range(count)]

    def _planned(self, sizes: Mapping[Any, int]) -> tuple[StageFragments, ...]:
        """The stages for microbatches of these sizes."""
        key = tuple(sizes[var] for var in self._signature.symbols)
        plan = self._plans.get(key)
        if plan is None:
            flow = Flow(bound(self._flow.mod, self._flow.function, sizes), self._flow.function) if sizes else self._flow
            stages = cut(flow, self._where, self._meshes) if sizes else self.stages
            plan = tuple(self._fragments(stage) for stage in stages)
            self._plans.put(key, plan)
        return plan

    def _fragments(self, stage: Stage) -> StageFragments:
        weights = self._weights.get(stage.index, {})
        layouts = {**self._layouts[stage.index], **{name: weight.sharding for name, weight in weights.items()}}
        made = forward_fragments(stage, self.topology[stage.mesh], layouts, self._options)
        if stage.index not in self._weights:
            held = {name: made.place(name, self._whole[name]) for name in stage.params if name in self._whole}
            self._weights[stage.index] = held
        return made

    def _tree(self, made: Mapping[tuple[str, int], MeshTensor], rows: Sequence[int]) -> Any:
        values = {name: _merged([made[name, i].full() for i in range(len(rows))], rows) for name in self._flow.results}
        return self._flow.tree(values)

    def __repr__(self) -> str:
        return f"Pipeline({self._flow.function}, {len(self.stages)} stages, {self.schedule.name!r}, {self.topology})"


def _named_stages(flow: Flow, stages: Any, topology: Topology) -> list[NamedStage]:
    """The stages in any of their forms."""
    if isinstance(stages, Mapping) and stages:
        return stages_by_mesh(flow, stages, topology.names)
    if isinstance(stages, (list, tuple)) and stages and all(isinstance(name, str) for name in stages):
        return [*(NamedStage((name,)) for name in stages), NamedStage(tuple(dict.fromkeys(flow.results)))]
    return refuse(f"stages={shown(stages)}", fix=_HOW)


def _rows_of(part: Mapping[str, torch.Tensor]) -> int:
    return next((tensor.shape[0] for tensor in part.values() if tensor.ndim), 1)


def _merged(parts: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """The microbatches' results as the batch's: rows behind each other, or the mean of numbers over rows."""
    if len(parts) == 1 or parts[0].ndim:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    weighted = [part.double() * (count / sum(rows)) for part, count in zip(parts, rows, strict=True)]
    return torch.stack(weighted).sum().to(parts[0].dtype)
