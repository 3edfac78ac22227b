"""A choice of a search planned in full, as its pipeline runs: its layouts and its stages; what is alike is planned
once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import ir

from mesh_tensor.annotations.names import SOURCE_NAMES_ATTR
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.fragments import Stage, gradient_name
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.searching.choices import DATA, Choice
from mesh_tensor.searching.pieces import named_schedule
from mesh_tensor.simulation import PipelineSimulation, Simulation
from mesh_tensor.simulation.pipelines import simulate_pipeline

from .fragments import StageFragments
from .model_pieces import ModelPieces


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
    made: list[StageFragments] = []
    for stage in stages:
        ports = [shardings.get(name) for name in ports_of_stage(stage)]
        same = (
            renamed(other, stage)
            for other in made
            if topology[other.stage.mesh] == topology[stage.mesh]
            and [shardings.get(name) for name in ports_of_stage(other.stage)] == ports
            and ir.structural_equal(_unnamed(other.stage.module), _unnamed(stage.module))
        )
        found = next(same, None)
        made.append(found or pieces.fragments(flow, stage, topology, shardings, kinds, choice.recompute))
    return simulate_pipeline(_Planned(topology, schedule, tuple(made)), pieces.machine, Simulation), made


def ports_of_stage(stage: Stage) -> tuple[str, ...]:
    """What a stage's function takes and gives, in order."""
    return (*stage.params, *stage.takes, *stage.gives)


def _unnamed(mod: ir.IRModule) -> ir.IRModule:
    """The module without what its values are called in its source."""
    return ir.IRModule({name: func.without_attr(SOURCE_NAMES_ATTR) for name, func in mod.functions_items()})


def renamed(here: StageFragments, stage: Stage) -> StageFragments:
    """A stage's fragments as those of another one, which computes the same on values of its own."""
    names = dict(zip(ports_of_stage(here.stage), ports_of_stage(stage), strict=True))
    names |= {gradient_name(one): gradient_name(other) for one, other in names.items()}

    def own(values: Iterable[str]) -> tuple[str, ...]:
        return tuple([names.get(name, name) for name in values])

    made = {kind: replace(f, takes=own(f.takes), gives=own(f.gives)) for kind, f in here.fragments.items()}
    layouts = {names.get(name, name): layout for name, layout in here.layouts.items()}
    return replace(here, stage=stage, fragments=made, layouts=layouts, inputs=own(here.inputs))


@dataclass(frozen=True, eq=False)
class _Planned:
    """What a simulation looks at of a pipeline."""

    topology: Topology
    schedule: Schedule
    fragments: tuple[StageFragments, ...]


def shardings_of(pieces: ModelPieces, choice: Choice) -> dict[str, dict[str, int]]:
    """The layouts of a choice: the batch and what is between layers by rows, weights as Megatron's, and with ZeRO-3
    over the data axis as well."""
    made = pieces.shardings(choice.sequence, {DATA: 0} if choice.data > 1 else {})
    if choice.model == 1:
        made = {name: {axis: d for axis, d in layout.items() if axis == DATA} for name, layout in made.items()}
    made |= {name: {DATA: 0} if choice.data > 1 else {} for name in pieces.inputs}
    if choice.zero == 3:
        for name, size in pieces.weights.items():
            made[name] = {**made.get(name, {}), **_over_data(size, made.get(name, {}), choice)}
    return {name: layout for name, layout in made.items() if layout or name not in pieces.weights}


def _over_data(shape: Sequence[int], layout: Mapping[str, int], choice: Choice) -> dict[str, int]:
    """Over the first dim that is whole and long enough; vectors stay whole."""
    free = [dim for dim, size in enumerate(shape) if dim not in layout.values() and size >= choice.data]
    return {DATA: free[0]} if free and len(shape) > 1 else {}
