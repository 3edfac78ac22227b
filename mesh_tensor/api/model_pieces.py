"""A model with layers as pieces: what comes before them, one layer, what comes after. Each is planned and simulated for
some rows and sizes of the model axis; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from tvm import ir

from mesh_tensor.annotations.names import reachable, source_names
from mesh_tensor.base.errors import MeshTensorError, did_you_mean, listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.assign import spread
from mesh_tensor.pipelining.flow import Flow, Layers, find_layers
from mesh_tensor.pipelining.fragments import trained_values
from mesh_tensor.pipelining.stages import Stage, cut
from mesh_tensor.plan.manual import NO_AXES, manual_mesh
from mesh_tensor.program.plan_module import PlanOptions
from mesh_tensor.program.verify import peak_bytes
from mesh_tensor.runtime.module_inputs import ModuleSignature, bound
from mesh_tensor.searching.choices import DATA, MODEL, Choice
from mesh_tensor.searching.pieces import Model, Piece, mixed
from mesh_tensor.simulation import Simulation
from mesh_tensor.simulation.costs import working_bytes
from mesh_tensor.simulation.pipelines import after_handing_on
from mesh_tensor.simulation.stages import held_for_backward, tile_bytes, weights_of

from . import strategies
from .fragments import Options, StageFragments, training_fragments
from .pipeline.planned import AlikeStages
from .pipeline.results import check_loss
from .pipeline.stated import stage_layouts
from .split_pieces import Shape, SplitPieces

_STEP = 8  # rows that are planned are powers of it; what is between them is interpolated


class ModelPieces:
    """The pieces of a module's function on a machine. `inputs`: parameters that are no weights; `layouts`: how values
    are split over the model axis, Megatron's if they are left out; `halves`: those of backwards are planned, too;
    `overlap`: as `distribute_module` takes it."""

    def __init__(
        self,
        mod: ir.IRModule,
        function: str,
        inputs: Sequence[str],
        machine: Machine,
        layouts: Mapping[str, Mapping[str, int]] | None = None,
        halves: bool = False,
        overlap: str = "auto",
    ) -> None:
        self.flow, self.inputs, self.machine = Flow(mod, function), tuple(inputs), machine
        self._symbols = ModuleSignature(self.flow.mod, function).symbols
        self._weights = [name for name in self.flow.params if name not in inputs and self.flow.is_float(name)]
        self._known: dict[Shape, Model] = {}
        self._split = SplitPieces(self)
        self._flows: dict[int, Flow] = {}
        self._passed: dict[Flow, set[str]] = {}
        self._cuts: dict[tuple, tuple[Stage, ...]] = {}
        self._layouts, self._kinds = layouts, "FBIW" if halves else "FB"
        self._plan = PlanOptions(machine=machine, overlap=overlap)
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

    @cached_property
    def layers(self) -> Layers:
        """Those that the model repeats."""
        found = find_layers(self.flow, self.inputs)
        if found is None:
            refuse(
                "nothing repeats in the module",
                where=f"search over {self.flow.function!r}",
                why="a model is cut between layers that compute alike and hand on one value",
                fix="search its layouts alone: leave out batch",
            )
        return found

    def check(self) -> None:
        """Refuse inputs that the function doesn't have, and one that repeats no layers, gives no loss, or has axes."""
        if missing := [name for name in self.inputs if name not in self.flow.params]:
            refuse(
                [f"there is no input {shown(name)}{did_you_mean(str(name), self.flow.params)}" for name in missing],
                where=f"search over {self.flow.function!r}",
                fix="give a list of the parameters that are no weights",
            )
        if (manual := manual_mesh(reachable(self.flow.mod, self.flow.function).values())) != NO_AXES:
            refuse(
                f"manual computations over {listing(tuple(manual))}",
                where=f"search over {self.flow.function!r} with a batch",
                why=f"ways to train lie on meshes of the axes {DATA!r} and {MODEL!r}",
                fix="search its layouts alone: leave out batch",
            )
        assert self.layers  # refused where there are none
        check_loss(self.flow, f"search over {self.flow.function!r} with a batch")

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
            found = strategies.tensor_parallel(self.flow_of(self.rows or 1).mod, MODEL, vocabulary=True)
        except MeshTensorError:
            return {}
        return {ours.get(name, name): layout for name, layout in found.items()}

    @cached_property
    def sums(self) -> tuple[str, ...]:
        """The values between groups of split layers."""
        ours = source_names(self.flow.func)
        found = strategies.sequence_parallel(self.flow_of(self.rows or 1).mod, MODEL)
        return tuple(ours.get(name, name) for name in found)

    def shardings(self, sequence: bool, also: Mapping[str, int] | None = None) -> dict[str, dict[str, int]]:
        """The layouts of weights and of what is between layers; `also`: what other axes split there."""
        rest = dict(also or {})
        between = {**rest, MODEL: 1} if sequence else rest
        names = dict.fromkeys((*self.leaving, *(self.sums if sequence else ())))
        return {**{name: dict(layout) for name, layout in self.model_layouts.items()}, **dict.fromkeys(names, between)}

    def over_rows(self, data: int, sequence: bool) -> dict[str, dict[str, int]]:
        """The same, where so many devices of the data axis split the batch by rows."""
        if data == 1:
            return self.shardings(sequence)
        made = self.shardings(sequence, {DATA: 0})
        return made | {name: {**made.get(name, {}), DATA: 0} for name in self.inputs}

    def models(self, choice: Choice, batch: int) -> list[Model]:
        """The pieces on every mesh of a choice."""
        return [self.model(self._shape(each, batch)) for each in choice.each]

    def _shape(self, choice: Choice, batch: int) -> Shape:
        """That of a mesh. How many devices share the rows counts where they share weights, too, or a module's own."""
        split = choice.zero == 3 and choice.data > 1
        data = choice.data if split or self.rows is not None else 1
        return Shape(choice.rows(batch), choice.model, choice.sequence and choice.model > 1, data, split)

    def model(self, shape: Shape) -> Model:
        """The pieces in this shape: as planned, or between two that are."""
        if shape.split:
            if shape not in self._known:
                self._known[shape] = self._split.model(shape)
            return self._known[shape]
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
            flow, layouts = self.flow_of(shape.rows), self.over_rows(shape.data, shape.sequence)
            if shape.model == 1:
                layouts = without_axis(layouts, MODEL)
            mesh = {DATA: shape.data, MODEL: shape.model}
            before, layer, after = (self.piece(flow, stage, mesh, layouts)[0] for stage in self.around(flow))
            self._known[shape] = Model(before, layer, after, self.layers.count)
        return self._known[shape]

    def flow_of(self, rows: int) -> Flow:
        """The function for so many rows."""
        if rows not in self._flows:
            sizes = dict.fromkeys(self._symbols, rows)
            self._flows[rows] = Flow(bound(self.flow.mod, self.flow.function, sizes), self.flow.function)
        return self._flows[rows]

    def stages_of(self, flow: Flow, layers: Sequence[int], only: tuple[int, ...] | None = None) -> tuple[Stage, ...]:
        """The function cut so that stages have so many layers, the first and last one what is around them."""
        key = flow, tuple(layers), only
        if key not in self._cuts:
            self._cuts[key] = self._cut(flow, layers, only)
        return self._cuts[key]

    def _cut(self, flow: Flow, layers: Sequence[int], only: tuple[int, ...] | None) -> tuple[Stage, ...]:
        groups, start = [], 0
        for count in layers:
            groups.append([name for layer in self.layers.layers[start : start + count] for name in layer])
            start += count
        groups[0] = [*self.layers.before, *groups[0]]
        groups[-1] = [*groups[-1], *self.layers.after]
        stated = {name: number for number, names in enumerate(groups) for name in names}
        return cut(flow, spread(flow, stated, len(groups)), [f"m{n}" for n in range(len(groups))], only)

    def around(self, flow: Flow) -> tuple[Stage, ...]:
        """Before the layers, a layer, after them."""
        count = self.layers.count
        return self.stages_of(flow, (0, *[1] * count, 0), (0, min(2, count), count + 1))

    def piece(
        self, flow: Flow, stage: Stage, mesh: Mapping[str, int], layouts: Mapping[str, Any]
    ) -> tuple[Piece, dict[str, Simulation], StageFragments]:
        """A stage as a piece, and what its fragments do."""
        topology = Topology({stage.mesh: mesh})
        here = self.fragments(flow, replace(stage, index=0), topology, layouts, self._kinds)
        runs = {kind: Simulation(each.module.program, self.machine) for kind, each in here.fragments.items()}
        return self._measured(here, runs), runs, here

    def fragments(
        self,
        flow: Flow,
        stage: Stage,
        topology: Topology,
        shardings: Mapping[str, Any],
        kinds: str = "FB",
        recompute: bool = False,
        known: AlikeStages | None = None,
    ) -> StageFragments:
        """A stage's fragments of these kinds, as a pipeline has them; those of one like it that is `known`."""
        (layouts,) = stage_layouts(flow, (replace(stage, index=0),), topology, shardings)
        if flow not in self._passed:
            self._passed[flow] = {*self._weights, *trained_values(flow, self._weights)}
        wrt = [name for name in (*stage.params, *stage.takes) if name in self._passed[flow]]
        options = Options("c", recompute=recompute, plan=self._plan)
        mesh = topology[stage.mesh]
        make = partial(training_fragments, stage, mesh, layouts, options, wrt, kinds)
        here = make() if known is None else known.made(stage, mesh, layouts, wrt, kinds, make)
        return replace(here, stage=stage, inputs=tuple(name for name in stage.params if name in self.inputs))

    def _measured(self, here: StageFragments, made: Mapping[str, Simulation]) -> Piece:
        trained = [name for name in weights_of(here) if name in self.weights]
        nbytes, held = tile_bytes(here, weights_of(here)), held_for_backward(here)
        kept, alone = int(held.forward), self.machine.processors is None
        programs = [here.fragments[kind].module.in_memory(alone) for kind in made]
        return Piece(
            forward=made["F"].time,
            backward=made["B"].time if "B" in made else 0.0,
            weights=nbytes,
            elements=elements_of(here, trained),
            tensors=len(trained),
            kept=kept,
            taken=tile_bytes(here, (*here.inputs, *here.stage.takes)),
            received=_whole_bytes(here, here.stage.takes) // here.mesh.num_devices,
            working=max(0, max(peak_bytes(each, working_bytes(self.machine)) for each in programs) - nbytes - kept),
            inputs=made["I"].time if "I" in made else 0.0,
            own=made["W"].time if "W" in made else 0.0,
            halfway=int(held.weight or 0) if {"I", "W"} <= made.keys() else 0,
            rest=after_handing_on(here.fragments["B"], made["B"], Simulation) if "B" in made else 0.0,
        )


def without_axis(layouts: Mapping[str, Mapping[str, int]], axis: str) -> dict[str, dict[str, int]]:
    """The layouts where there is no such axis."""
    return {name: {each: dim for each, dim in layout.items() if each != axis} for name, layout in layouts.items()}


def elements_of(here: StageFragments, names: Iterable[str]) -> int:
    """Of the tiles of values of a stage."""
    return sum(math.prod(here.layouts[name].tile_shape(here.types[name][0])) for name in names)


def _whole_bytes(here: StageFragments, names: Iterable[str]) -> int:
    return sum(math.prod(here.types[name][0]) * here.types[name][1].itemsize for name in names)


def between(low: Model, high: Model, below: int, above: int, rows: int) -> Model:
    """What has rows between two that are known; affine in them."""
    share = (rows - below) / (above - below)
    names = "before", "layer", "after"
    before, layer, after = (mixed(getattr(low, name), getattr(high, name), share) for name in names)
    return Model(before, layer, after, low.layers)
