"""What a search over ways to train found; and a plan of it in full, as its pipeline runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mesh_tensor.annotations.names import source_names
from mesh_tensor.base.decisions import columns
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import machine_code
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.topology import Topology
from mesh_tensor.importers import ImportedModule
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.searching.choices import DATA, MODEL, Choice
from mesh_tensor.searching.pieces import Estimate, named_schedule
from mesh_tensor.simulation import PipelineSimulation, Simulation
from mesh_tensor.simulation.pipelines import simulate_pipeline
from mesh_tensor.simulation.summary import in_bytes, in_seconds

from .found import Ranked, cost_head, costs, made_once
from .fragments import StageFragments
from .model_pieces import ModelPieces, without_axis
from .pipeline import Pipeline, pipeline
from .pipeline.planned import AlikeStages
from .pipeline.weights import Rule
from .split_pieces import layouts_over_data
from .strategies import combine


@dataclass(frozen=True, eq=False)
class TrainingPlans(Ranked[Estimate]):
    """What a search over ways to train found: `plans`, the best first, each with its step's time and the memory of the
    device that holds most.

    considered   choices that there are; `too_large` of them don't fit into memory
    """

    module: ImportedModule = field(repr=False)
    function: str
    machine: Machine
    batch: int
    plans: tuple[Estimate, ...] = field(repr=False)
    considered: int
    too_large: int
    pieces: ModelPieces = field(repr=False)
    names: tuple[str, ...] = ()  # of meshes, where it was said on which
    _asked: Mapping[str, Any] = field(repr=False, default_factory=dict)
    _runs: dict[tuple, Any] = field(repr=False, default_factory=dict)

    @property
    def _ranked(self) -> tuple[Estimate, ...]:
        return self.plans

    def picture(self, width: int = 60, height: int = 12) -> str:
        """Time against memory, so many characters large: every plan a dot, those of the front an o."""
        sizes = {"width": width, "height": height}
        if wrong := [f"{name} is {shown(n)}" for name, n in sizes.items() if type(n) is not int or n < 1]:
            refuse(wrong, where="picture", fix="give numbers of characters, from 1 up")
        front = self.pareto()
        times, memory = [e.time for e in self.plans], [e.memory for e in self.plans]
        cells = [[" "] * width for _ in range(height)]
        for each in (*self.plans, *front):
            x = round((each.time - min(times)) / (max(times) - min(times) or 1) * (width - 1))
            y = round((each.memory - min(memory)) / (max(memory) - min(memory) or 1) * (height - 1))
            cells[height - 1 - y][x] = "o" if each in front else "."
        ends = f"{in_seconds(min(times))} .. {in_seconds(max(times))}"
        head = f"memory {in_bytes(min(memory))} .. {in_bytes(max(memory))}, upwards; time {ends}, to the right"
        return "\n".join([head, *("|" + "".join(row).rstrip() for row in cells), "+" + "-" * width])

    def arguments(self, plan: Estimate | None = None) -> dict[str, Any]:
        """What `mt.pipeline` takes beside the module for the best plan, or this one."""
        chosen = self._chosen(plan)
        choice, names = chosen.choice, {ours: theirs for theirs, ours in source_names(self.pieces.flow.func).items()}
        cuts, done = [], 0
        for count in chosen.layers[:-1]:
            done += count
            cuts.append(names.get(self.pieces.leaving[done], self.pieces.leaving[done]))
        last = names.get(self.pieces.flow.results[0], self.pieces.flow.results[0])
        names_of_meshes = self.names or [f"m{number}" for number in range(choice.meshes)]
        meshes = {name: dict(each.mesh.shape) for name, each in zip(names_of_meshes, choice.each, strict=True)}
        return {
            "topology": meshes,
            "stages": cuts or {names_of_meshes[0]: [last]},
            "shardings": {names.get(n, n): layout for n, layout in shardings_of(self.pieces, choice).items()},
            "microbatches": choice.microbatches,
            "schedule": choice.schedule,
            "train": True,
            "recompute": choice.recompute,
        }

    def run(self, *batch: Any, plan: Estimate | None = None, **options: Any) -> Any:
        """What the plan's pipeline gives for a batch: the loss. The pipeline is made once per plan and options; take
        `pipeline` for its gradients, and to update weights."""
        return made_once(self._runs, self.pipeline, self._chosen(plan), options)(*batch)

    def pipeline(self, plan: Estimate | None = None, **options: Any) -> Pipeline:
        """The best plan, or this one, as a pipeline that trains; the options of `mt.pipeline`. Its optimizer's rule is
        to be what `rule` makes of it."""
        return pipeline(
            self.module, function=self.function, **{**self.arguments(plan), "machine": self.machine, **options}
        )

    def simulation(self, plan: Estimate | None = None) -> PipelineSimulation:
        """The best plan, or this one, simulated in full, without its optimizer's update."""
        chosen = self._chosen(plan)
        return planned_whole(self.pieces, chosen.choice, chosen.layers, self.batch)[0]

    def rule(self, rule: Rule, plan: Estimate | None = None) -> Rule:
        """An optimizer's rule for `Pipeline.update` on a virtual topology as the plan has it: with ZeRO-1 every device
        of the data axis updates its part of each weight, and keeps states for that alone."""
        choice = self._chosen(plan).choice
        return _on_parts(rule) if choice.zero == 1 else rule

    def code(self, plan: Estimate | None = None) -> str:
        """The plan as Python to paste."""
        lines = [f"    {name}={value!r}," for name, value in self.arguments(plan).items()]
        last = [f"    function={self.function!r},", f"    machine={machine_code(self.machine)},"]
        return "\n".join(["run = mt.pipeline(", "    module,", *lines, *last, ")"])

    def save(self, path: str | Path) -> None:
        """Write what was found, so that `mt.search(..., known=path)` goes on from it."""
        numbers = [
            (each, *(each.together or (each.time, each.memory))) for each in self.plans
        ]  # comparable with others'
        rows = [{**asdict(e.choice), "time": t, "memory": m, "layers": e.layers} for e, t, m in numbers]
        Path(path).write_text(json.dumps({**self._asked, "plans": rows}), encoding="utf-8")

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [("plan", "layers of stages", "step", "memory", *cost_head(self.machine))]
        for each in self.plans[:10]:
            cost = costs(self.machine, each.time, each.choice.devices)
            layers = " ".join(map(str, each.layers))
            rows.append((each.choice, layers, in_seconds(each.time), in_bytes(each.memory), *cost))
        head = f"{self.considered} ways to train on {self.machine.name}, batch {self.batch}: {self.too_large} don't fit"
        full = sum(each.in_full for each in self.plans[:10])
        if full < len(rows) - 1:
            head += f"; planned in full: the first {full}, and put together of pieces: the others"
        return "\n".join([head, *columns(rows)])


def _on_parts(rule: Rule) -> Rule:
    """The rule on parts of weights and gradients, each split over the data axis along the first dim that is whole."""

    def split(weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
        whole = weight.sharding
        dims = [dim for dim in range(len(weight.shape)) if not whole.axes_of(dim)]
        if not dims:
            return rule(weight, gradient, state)
        part = whole.with_shard(DATA, dims[0])
        return rule(weight.redistribute(part), gradient.redistribute(part), state).redistribute(whole)

    return split


@uncollected
def planned_whole(
    pieces: ModelPieces, choice: Choice, layers: Sequence[int], batch: int
) -> tuple[PipelineSimulation, list[StageFragments]]:
    """A choice planned in full, as its pipeline runs: what that takes but for the update, and its stages."""
    flow = pieces.flow_of(batch // choice.microbatches)
    schedule = named_schedule(*choice.order)
    topology = Topology({f"m{number}": each.mesh for number, each in enumerate(choice.each)})
    cuts = pieces.stages_of(flow, layers)
    stages = [replace(each, mesh=topology.names[schedule.mesh_of[each.index]]) for each in cuts]
    shardings = shardings_of(pieces, choice)
    kinds = "".join({action.kind: None for row in schedule.rows for action in row})
    known = AlikeStages()
    made = [pieces.fragments(flow, each, topology, shardings, kinds, choice.recompute, known) for each in stages]
    return simulate_pipeline(_Planned(topology, schedule, tuple(made)), pieces.machine, Simulation), made


@dataclass(frozen=True, eq=False)
class _Planned:
    """What a simulation looks at of a pipeline."""

    topology: Topology
    schedule: Schedule
    fragments: tuple[StageFragments, ...]
    not_simulated: tuple[str, ...] = ("the optimizer's update",)


def shardings_of(pieces: ModelPieces, choice: Choice) -> dict[str, dict[str, int]]:
    """The layouts of a choice: the batch and what is between layers by rows, weights as Megatron's, and with ZeRO-3
    over the data axis as well."""
    made = dict.fromkeys(pieces.inputs, dict[str, int]()) | pieces.over_rows(choice.data, choice.sequence)
    if choice.zero == 3 and choice.data > 1:
        made = combine(made, layouts_over_data(pieces.weights, pieces.model_layouts, choice.data))
    if choice.model == 1:
        made = without_axis(made, MODEL)
    return {name: layout for name, layout in made.items() if layout or name not in pieces.weights}
