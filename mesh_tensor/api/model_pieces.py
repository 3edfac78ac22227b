"""A model with layers as pieces: what comes before them, one layer, what comes after. Each is planned and simulated for
some rows and sizes of the model axis; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tvm import ir

from mesh_tensor.annotations.names import SOURCE_NAMES_ATTR, source_names
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.assign import spread
from mesh_tensor.pipelining.flow import Flow, Layers, find_layers
from mesh_tensor.pipelining.fragments import Stage, cut, gradient_name, trained_values
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.program.plan_module import PlanOptions
from mesh_tensor.runtime.module_inputs import ModuleSignature, bound
from mesh_tensor.searching.choices import DATA, MODEL, Choice
from mesh_tensor.searching.pieces import Model, Piece, named_schedule
from mesh_tensor.simulation import PipelineSimulation, Simulation
from mesh_tensor.simulation.pipelines import simulate_pipeline
from mesh_tensor.simulation.stages import held_for_backward, tile_bytes, weights_of

from . import strategies
from .fragments import Options, StageFragments, training_fragments
from .pipeline.stated import stage_layouts

_STEP = 4  # rows that are planned are powers of it; what is between them is interpolated


@dataclass(frozen=True)
class Shape:
    """Rows on a device, the size of the model axis, and whether what is between split layers is split by positions."""

    rows: int
    model: int
    sequence: bool


class ModelPieces:
    """The pieces of a module's function on a machine. `inputs`: parameters that are no weights; `layouts`: how values
    are split over the model axis, Megatron's if they are left out; `halves`: those of backwards are planned, too."""

    def __init__(
        self,
        mod: ir.IRModule,
        function: str,
        inputs: Sequence[str],
        machine: Machine,
        layouts: Mapping[str, Mapping[str, int]] | None = None,
        halves: bool = False,
    ) -> None:
        self.flow, self.inputs, self._machine = Flow(mod, function), tuple(inputs), machine
        self._symbols = ModuleSignature(self.flow.mod, function).symbols
        self.layers = self._found_layers()
        self._weights = [name for name in self.flow.params if name not in inputs and self.flow.is_float(name)]
        self._known: dict[Shape, Model] = {}
        self._flows: dict[int, Flow] = {}
        self._layouts, self._kinds = layouts, "FBIW" if halves else "FB"
        self.planned = 0

    @cached_property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what is trained."""
        infos = {name: self.flow.params[name].struct_info for name in self._weights}
        return {name: tuple(map(int, info.shape.values)) for name, info in infos.items()}

    def model_sizes(self, devices: int) -> tuple[int, ...]:
        """The sizes of the model axis up to so many devices: those that divide what is split over it."""
        sizes = [self.weights[name][dim] for name, layout in self.model_layouts.items() for dim in layout.values()]
        return tuple(n for n in range(1, devices + 1) if n == 1 or (sizes and all(size % n == 0 for size in sizes)))

    def _found_layers(self) -> Layers:
        found = find_layers(self.flow, self.inputs)
        if found is None:
            refuse(
                "nothing repeats in the module",
                where=f"search over {self.flow.function!r}",
                why="a model is cut between layers that compute alike and hand on one value",
                fix="search its layouts alone: leave out batch",
            )
        return found

    @cached_property
    def rows(self) -> int | None:
        """The rows that the module takes at a time; None if they are open."""
        if self._symbols:
            return None
        return next(int(self.flow.params[name].struct_info.shape.values[0]) for name in self.inputs)

    def takes(self, rows: int) -> bool:
        """Whether the module takes so many rows at a time."""
        return self.rows in (None, rows)

    @property
    def leaving(self) -> tuple[str, ...]:
        """After what it is cut, by name: what enters the layers, then what leaves each."""
        (entering,) = {value for value in self._taken(self.layers.layers[0]) if value in self.layers.before[-1:]} or {
            self.layers.before[-1]
        }
        return (entering, *self.layers.leaving)

    def _taken(self, layer: Sequence[str]) -> set[str]:
        return {value for name in layer for value in self.flow.operands[name]} - set(layer)

    @cached_property
    def model_layouts(self) -> Mapping[str, Mapping[str, int]]:
        """Megatron's layouts of the weights, by the flow's names; none where there is nothing to split."""
        ours = source_names(self.flow.func)
        if self._layouts is not None:
            return self._layouts
        try:
            found = strategies.tensor_parallel(self._flow(self.rows or 1).mod, MODEL, vocabulary=True)
        except MeshTensorError:
            return {}
        return {ours.get(name, name): layout for name, layout in found.items()}

    @cached_property
    def sums(self) -> tuple[str, ...]:
        """The values between groups of split layers."""
        ours = source_names(self.flow.func)
        found = strategies.sequence_parallel(self._flow(self.rows or 1).mod, MODEL)
        return tuple(ours.get(name, name) for name in found)

    def shardings(self, sequence: bool, also: Mapping[str, int] | None = None) -> dict[str, dict[str, int]]:
        """The layouts of weights and of what is between layers; `also`: what other axes split there."""
        rest = dict(also or {})
        between = {**rest, MODEL: 1} if sequence else rest
        names = dict.fromkeys((*self.leaving, *(self.sums if sequence else ())))
        return {**{name: dict(layout) for name, layout in self.model_layouts.items()}, **dict.fromkeys(names, between)}

    def models(self, choice: Choice, batch: int) -> list[Model]:
        """The pieces on every mesh of a choice."""
        shapes = [Shape(each.rows(batch), each.model, each.sequence and each.model > 1) for each in choice.each]
        return [self.model(shape) for shape in shapes]

    def model(self, shape: Shape) -> Model:
        """The pieces in this shape: as planned, or between two that are."""
        if self.rows is not None or shape.rows == 1:
            return self._planned(shape)
        below = 1
        while below * _STEP <= shape.rows:
            below *= _STEP
        low = self._planned(replace(shape, rows=below))
        if below == shape.rows:
            return low
        return between(low, self._planned(replace(shape, rows=below * _STEP)), below, below * _STEP, shape.rows)

    @uncollected
    def _planned(self, shape: Shape) -> Model:
        if shape not in self._known:
            self.planned += 1
            flow = self._flow(shape.rows)
            before, layer, after = (self._piece(flow, stage, shape) for stage in self._stages(flow))
            self._known[shape] = Model(before, layer, after, self.layers.count)
        return self._known[shape]

    def _flow(self, rows: int) -> Flow:
        if rows not in self._flows:
            sizes = dict.fromkeys(self._symbols, rows)
            self._flows[rows] = Flow(bound(self.flow.mod, self.flow.function, sizes), self.flow.function)
        return self._flows[rows]

    def stages_of(self, flow: Flow, layers: Sequence[int], only: Sequence[int] | None = None) -> tuple[Stage, ...]:
        """The function cut so that stages have so many layers, the first and last one what is around them."""
        groups, start = [], 0
        for count in layers:
            groups.append([name for layer in self.layers.layers[start : start + count] for name in layer])
            start += count
        groups[0] = [*self.layers.before, *groups[0]]
        groups[-1] = [*groups[-1], *self.layers.after]
        stated = {name: number for number, names in enumerate(groups) for name in names}
        return cut(flow, spread(flow, stated, len(groups)), [f"m{n}" for n in range(len(groups))], only)

    def _stages(self, flow: Flow) -> tuple[Stage, ...]:
        """Before the layers, a layer, after them."""
        count = self.layers.count
        return self.stages_of(flow, (0, *[1] * count, 0), (0, min(2, count), count + 1))

    def _piece(self, flow: Flow, stage: Stage, shape: Shape) -> Piece:
        topology = Topology({stage.mesh: {MODEL: shape.model}})
        here = self.fragments(flow, replace(stage, index=0), topology, self.shardings(shape.sequence), self._kinds)
        return self._measured(here)

    def fragments(
        self,
        flow: Flow,
        stage: Stage,
        topology: Topology,
        shardings: Mapping[str, Any],
        kinds: str = "FB",
        recompute: bool = False,
    ) -> StageFragments:
        """A stage's fragments of these kinds, as a pipeline has them."""
        (layouts,) = stage_layouts(flow, (replace(stage, index=0),), topology, shardings)
        passed = {*self._weights, *trained_values(flow, self._weights)}
        wrt = [name for name in (*stage.params, *stage.takes) if name in passed]
        options = Options("c", recompute=recompute, plan=PlanOptions(machine=self._machine))
        here = training_fragments(stage, topology[stage.mesh], layouts, options, wrt, kinds)
        return replace(here, stage=stage, inputs=tuple(name for name in stage.params if name in self.inputs))

    def _measured(self, here: StageFragments) -> Piece:
        made = {kind: Simulation(each.module.program, self._machine) for kind, each in here.fragments.items()}
        trained = [name for name in weights_of(here) if name in self.weights]
        nbytes, held = tile_bytes(here, weights_of(here)), held_for_backward(here)
        kept = int(held.forward)
        return Piece(
            forward=made["F"].time,
            backward=made["B"].time if "B" in made else 0.0,
            weights=nbytes,
            elements=elements_of(here, trained),
            tensors=len(trained),
            matrices=sum(len(self.weights[name]) > 1 for name in trained),
            kept=kept,
            taken=tile_bytes(here, (*here.inputs, *here.stage.takes)),
            received=_whole_bytes(here, here.stage.takes) // here.mesh.num_devices,
            working=max(0, max(each.peak_bytes for each in made.values()) - nbytes - kept),
            inputs=made["I"].time if "I" in made else 0.0,
            own=made["W"].time if "W" in made else 0.0,
            halfway=int(held.weight or 0) if {"I", "W"} <= made.keys() else 0,
        )

    @uncollected
    def whole(
        self, choice: Choice, layers: Sequence[int], batch: int
    ) -> tuple[PipelineSimulation, list[StageFragments]]:
        """A choice planned in full, as its pipeline runs: what that takes but for the update, and its stages."""
        flow = self._flow(batch // choice.microbatches)
        schedule = named_schedule(*choice.order)
        topology = Topology({f"m{number}": each.mesh for number, each in enumerate(choice.each)})
        cuts = self.stages_of(flow, layers)
        stages = [replace(each, mesh=topology.names[schedule.mesh_of[each.index]]) for each in cuts]
        shardings = shardings_of(self, choice)
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
            made.append(found or self.fragments(flow, stage, topology, shardings, kinds, choice.recompute))
        return simulate_pipeline(_Planned(topology, schedule, tuple(made)), self._machine, Simulation), made


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


def elements_of(here: StageFragments, names: Iterable[str]) -> int:
    """Of the tiles of values of a stage."""
    return sum(math.prod(here.layouts[name].tile_shape(here.types[name][0])) for name in names)


def _whole_bytes(here: StageFragments, names: Iterable[str]) -> int:
    """Of values of a stage as one."""
    return sum(math.prod(here.types[name][0]) * here.types[name][1].itemsize for name in names)


def between(low: Model, high: Model, below: int, above: int, rows: int) -> Model:
    """What has rows between two that are known; affine in them."""
    share = (rows - below) / (above - below)

    def mixed(a: Piece, b: Piece) -> Piece:
        numbers = {name: x + share * (getattr(b, name) - x) for name, x in vars(a).items()}
        whole = ("weights", "elements", "tensors", "matrices", "kept", "taken", "received", "working", "halfway")
        return Piece(**{name: round(n) if name in whole else n for name, n in numbers.items()})

    before, layer, after = (mixed(getattr(low, name), getattr(high, name)) for name in ("before", "layer", "after"))
    return Model(before, layer, after, low.layers)


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
