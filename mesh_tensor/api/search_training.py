"""search with a batch: how a model with layers is trained best on so many devices, and what that takes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mesh_tensor.annotations.names import source_names
from mesh_tensor.base.decisions import columns
from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import machine_code
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.topology import Topology
from mesh_tensor.importers import ImportedModule
from mesh_tensor.pipelining.orders import SCHEDULES
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.searching.choices import DATA, Choice, Part, Space, runs_halves
from mesh_tensor.searching.pieces import Composer, Estimate, Piece, Stage, layers_of, pareto
from mesh_tensor.simulation import PipelineSimulation
from mesh_tensor.simulation.stages import tile_bytes
from mesh_tensor.simulation.summary import in_bytes, in_seconds

from .found import amount, cost_head, costs, made_once, one_of, read_saved
from .fragments import StageFragments
from .model_pieces import ModelPieces, elements_of
from .pipeline import Pipeline, pipeline
from .pipeline.weights import Rule
from .planned_choice import planned_whole, shardings_of
from .search_stages import uneven_choices

Rank = Callable[[Estimate], tuple]
Report = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class TrainingPlans:
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
    def best(self) -> Estimate:
        """The first one."""
        return self.plans[0]

    def pareto(self) -> list[Estimate]:
        """The plans than which no other one takes less time and less memory, the fastest first."""
        return pareto(self.plans)

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
        chosen = one_of(plan, self.best)
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
        return made_once(self._runs, self.pipeline, one_of(plan, self.best), options)(*batch)

    def pipeline(self, plan: Estimate | None = None, **options: Any) -> Pipeline:
        """The best plan, or this one, as a pipeline that trains; the options of `mt.pipeline`. Its optimizer's rule is
        to be what `rule` makes of it."""
        return pipeline(
            self.module, function=self.function, **{**self.arguments(plan), "machine": self.machine, **options}
        )

    def simulation(self, plan: Estimate | None = None) -> PipelineSimulation:
        """The best plan, or this one, simulated in full, without its optimizer's update."""
        chosen = one_of(plan, self.best)
        return planned_whole(self.pieces, chosen.choice, chosen.layers, self.batch)[0]

    def rule(self, rule: Rule, plan: Estimate | None = None) -> Rule:
        """An optimizer's rule for `Pipeline.update` on a virtual topology as the plan has it: with ZeRO-1 every device
        of the data axis updates its part of each weight, and keeps states for that alone."""
        choice = one_of(plan, self.best).choice
        return _on_parts(rule) if choice.zero == 1 else rule

    def code(self, plan: Estimate | None = None) -> str:
        """The plan as Python to paste."""
        lines = [f"    {name}={value!r}," for name, value in self.arguments(plan).items()]
        last = [f"    function={self.function!r},", f"    machine={machine_code(self.machine)},"]
        return "\n".join(["run = mt.pipeline(", "    module,", *lines, *last, ")"])

    def save(self, path: str | Path) -> None:
        """Write what was found, so that `mt.search(..., known=path)` goes on from it."""
        rows = [{**asdict(e.choice), "time": e.time, "memory": e.memory, "layers": e.layers} for e in self.plans]
        Path(path).write_text(json.dumps({**self._asked, "plans": rows}), encoding="utf-8")

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [("plan", "layers of stages", "step", "memory", *cost_head(self.machine))]
        for each in self.plans[:10]:
            cost = costs(self.machine, each.time, each.choice.devices)
            layers = " ".join(map(str, each.layers))
            rows.append((each.choice, layers, in_seconds(each.time), in_bytes(each.memory), *cost))
        head = f"{self.considered} ways to train on {self.machine.name}, batch {self.batch}: "
        return "\n".join([f"{head}{self.too_large} don't fit", *columns(rows)])


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


@dataclass(frozen=True)
class TrainingOptions:
    """What a search is asked for, as `search` says; `limit` is the memory of a device."""

    function: str
    inputs: tuple[str, ...]
    objective: str
    limit: int
    states: int
    seconds: float
    finalists: int
    only: Mapping[str, Any]
    known: str | Path | None
    progress: Report | None
    uneven: bool = False
    topology: Topology | None = None


@uncollected
def search_training(
    module: ImportedModule, devices: int, machine: Machine, batch: int, options: TrainingOptions
) -> TrainingPlans:
    """As `search` says."""
    _check(batch, options)
    halves = any(runs_halves(name) for name in options.only.get("schedules", ()))
    pieces = ModelPieces(module.mod, options.function, options.inputs, machine, halves=halves)
    pieces.check()
    composer = Composer(machine, options.states)
    choices = _choices(pieces, composer, devices, batch, options)
    if not choices:
        fixed = f"the module takes {pieces.rows} rows at a time" if pieces.rows else ""
        held = "" if options.topology is None else f", in stages on the meshes of {options.topology}"
        refuse(
            f"there is no way to train a batch of {batch} rows on {devices} devices{held}",
            why=fixed or f"of data x model x stages, data divides the rows, and there are {pieces.layers.count} layers",
            fix="export the model with an open batch size"
            if fixed
            else "take other numbers of devices, rows or microbatches, more schedules, or uneven=True; "
            "meshes of a topology are of one size",
        )
    asked = _question(pieces, machine, batch, options)
    read = [] if options.known is None else read_saved(options.known, asked, "plans", lambda row: _plan(row, pieces))
    known = {each.choice: each for each in read}
    found, sizes = _composed(choices, pieces, composer, batch, options, known)
    if not found:
        refuse(
            f"no way to train fits into {options.limit:,} bytes per device",
            where=f"{devices} devices of machine {machine.name!r}",
            why=f"the smallest that was found needs {min(sizes):,}",
            fix="take more devices, a smaller batch, or a machine with more memory",
        )
    rank = _rank(options.objective)
    plans = _in_full(sorted(found, key=rank), pieces, composer, batch, options)
    plans.sort(key=lambda each: (not each.in_full, rank(each)))  # what is put together may leave something out
    names = () if options.topology is None else options.topology.names
    return TrainingPlans(
        module, options.function, machine, batch, tuple(plans), len(choices), len(sizes), pieces, names, asked
    )


def _choices(
    pieces: ModelPieces, composer: Composer, devices: int, batch: int, options: TrainingOptions
) -> list[Choice]:
    """All ways on so many devices, or on the meshes that are given; on fewer, too, where cost counts."""
    fewer = options.objective == "cost" and options.topology is None
    found: list[Choice] = []
    for count in [n for n in range(1, devices + 1) if devices % n == 0] if fewer else [devices]:
        space = _space(pieces, count, batch, options.only)
        found += [choice for choice in space.choices() if pieces.takes(batch // choice.microbatches)]
        if options.uneven:
            found += uneven_choices(pieces, composer, space, options.limit)
    if options.topology is None:
        return found
    sizes = [options.topology[name].num_devices for name in options.topology.names]
    return [choice for choice in found if [each.data * each.model for each in choice.each] == sizes]


def _composed(
    choices: Sequence[Choice],
    pieces: ModelPieces,
    composer: Composer,
    batch: int,
    options: TrainingOptions,
    known: Mapping[Choice, Estimate],
) -> tuple[list[Estimate], list[int]]:
    """What choices take that fit into memory, put together from pieces; and the memory of those that don't."""
    end, found, too_large = time.monotonic() + options.seconds, list[Estimate](), list[int]()
    for number, choice in enumerate(choices, 1):
        try:
            if options.progress is not None:
                options.progress(number, len(choices))
            late = found and time.monotonic() > end
            if choice not in known and late:
                continue
            made = known.get(choice) or _estimated(choice, pieces, composer, batch, options.limit)
            if made.memory <= options.limit:
                found.append(made)
            else:
                too_large.append(made.memory)
        except KeyboardInterrupt:
            if not found:
                raise
            end = -math.inf  # with what there is
    return found, too_large


def _estimated(choice: Choice, pieces: ModelPieces, composer: Composer, batch: int, limit: int) -> Estimate:
    """What a choice takes, put together from pieces; forever, if it needs more memory than `limit`."""
    models = pieces.models(choice, batch)
    layers = layers_of(choice, models)
    memory = composer.memory(choice, models, layers)
    return Estimate(choice, composer.seconds(choice, models, layers) if memory <= limit else math.inf, memory, layers)


def _check(batch: int, options: TrainingOptions) -> None:
    """What is wrong with numbers that a search is given."""
    numbers = {"batch": (batch, 1), "states": (options.states, 0), "finalists": (options.finalists, 0)}
    wrong = [f"{name} is {shown(n)}" for name, (n, least) in numbers.items() if type(n) is not int or n < least]
    for name, values in options.only.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            wrong.append(f"{name}={shown(values)}, no list of what may be")
        else:
            known = _VALUES.get(name, lambda each: True)
            wrong += [f"{name} has {shown(each)}" for each in values if not known(each)]
    given = options.only.get("schedules", ())
    given = () if isinstance(given, str) or not isinstance(given, Sequence) else given
    names = [name for name in SCHEDULES if Schedule.named(name, meshes=2, microbatches=4).has_backward]
    wrong += [f"there is no schedule {shown(n)}{did_you_mean(str(n), names)}" for n in given if n not in SCHEDULES]
    wrong += [f"the schedule {n!r} has no backward" for n in given if n in SCHEDULES and n not in names]
    if wrong:
        ways = (
            "batch is a number of rows; states and finalists are counts, from 0 up; microbatches and model have "
            "numbers above 0, zero has 0, 1 and 3, recompute and sequence have True and False; schedules are of"
        )
        refuse(wrong, where="search", fix=f"{ways} {listing(names)}")


_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "microbatches": lambda each: type(each) is int and each > 0,
    "model": lambda each: type(each) is int and each > 0,
    "zero": lambda each: type(each) is int and each in (0, 1, 3),
    "recompute": lambda each: isinstance(each, bool),
    "sequence": lambda each: isinstance(each, bool),
}


def _in_full(
    plans: list[Estimate], pieces: ModelPieces, composer: Composer, batch: int, options: TrainingOptions
) -> list[Estimate]:
    """The plans, of which the first ones are planned in full, until so many fit as are asked for. What doesn't fit
    then is left out, unless nothing does."""
    made: list[Estimate] = []
    left = list(plans)
    try:
        while left and sum(each.memory <= options.limit for each in made) < options.finalists:
            made.append(in_full(left[0], pieces, composer, batch))
            left.pop(0)
    except KeyboardInterrupt:  # the rest as it was put together
        pass
    return [each for each in made if each.memory <= options.limit] + left or made


def in_full(plan: Estimate, pieces: ModelPieces, composer: Composer, batch: int) -> Estimate:
    """A plan as its pipeline runs, with the update."""
    if plan.in_full:
        return plan
    choice = plan.choice
    sim, stages = planned_whole(pieces, choice, plan.layers, batch)
    took, most = 0.0, 0
    for mesh, peak in enumerate(sim.peaks):
        mine = [here for here in stages if sim.schedule.mesh_of[here.stage.index] == mesh]
        own = Stage(tuple(own_state(here, pieces) for here in mine))
        here = choice.each[mesh]
        took = max(took, composer.update(here, own, split=here.zero == 3))
        most = max(most, peak + composer.kept(here, own.elements))
    return replace(plan, time=sim.time + took, memory=most, in_full=True)


def own_state(here: StageFragments, pieces: ModelPieces) -> Piece:
    """The weights of a stage that are trained, as a piece that does nothing."""
    names = [name for name in here.stage.params if name in pieces.weights]
    return Piece(0.0, 0.0, tile_bytes(here, names), elements_of(here, names), len(names), 0, 0, 0, 0, 0)


def _space(pieces: ModelPieces, devices: int, batch: int, only: Mapping[str, Any]) -> Space:
    made = Space(devices, batch, pieces.layers.count, model=pieces.model_sizes(devices))
    names = [f.name for f in fields(Space)][3:]
    if wrong := [f"{name}={shown(value)}" for name, value in only.items() if name not in names]:
        refuse(wrong, where="what a search is held to", fix=f"it can be held to {', '.join(names)}")
    return replace(made, **{name: tuple(value) for name, value in only.items()})  # type: ignore[arg-type]  # by name


def _choice(row: Mapping[str, Any]) -> Choice:
    return Choice(**{**row, "parts": tuple(Part(**part) for part in row["parts"])})


def _rank(objective: str) -> Rank:
    if objective == "memory":
        return lambda e: (e.memory, e.time, e.choice)
    if objective == "cost":
        return lambda e: (e.time * e.choice.devices, e.time, e.memory, e.choice)
    return lambda e: (e.time, e.memory, e.choice)


def _question(pieces: ModelPieces, machine: Machine, batch: int, options: TrainingOptions) -> dict[str, Any]:
    """What was searched, so that it is told from other searches."""
    params = ", ".join(f"{name} {var.struct_info}" for name, var in pieces.flow.params.items())
    asked = {"machine": machine.to_text(), "batch": batch, "function": options.function, "states": options.states}
    return {**asked, "parameters": params}


def _plan(row: Mapping[str, Any], pieces: ModelPieces) -> Estimate:
    """What a search wrote of a plan."""
    choice, layers = _choice({each.name: row[each.name] for each in fields(Choice)}), tuple(row["layers"])
    hash(choice)  # else it is none
    whole = all(type(count) is int and count >= 0 for count in layers) and sum(layers) == pieces.layers.count
    if not whole or len(layers) != choice.stages:
        raise ValueError(f"{choice} has stages of {shown(layers)} layers, of {pieces.layers.count}")
    return Estimate(choice, float(amount(row, "time")), int(amount(row, "memory")), layers)
