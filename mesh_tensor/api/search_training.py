"""search with a batch: how a model with layers is trained best on so many devices, and what that takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.topology import Topology
from mesh_tensor.importers import ImportedModule
from mesh_tensor.pipelining.orders import SCHEDULES
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.searching.choices import Choice, Part, Question, Space, cut_best, divisors, runs_halves
from mesh_tensor.searching.pieces import Composer, Estimate, Piece, Stage, layers_of
from mesh_tensor.simulation.stages import tile_bytes

from .fragments import StageFragments
from .model_pieces import ModelPieces, elements_of
from .search_results import amount, read_saved
from .training_plans import TrainingPlans, planned_whole

Rank = Callable[[Estimate], tuple]
Report = Callable[[int, int], None]


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
    end = time.monotonic() + options.seconds
    found, large = _composed(choices, pieces, composer, batch, options, known, end)
    rank = _rank(options.objective)
    tried = _in_full(sorted(found, key=rank), pieces, composer, batch, options, end)
    if not any(each.memory <= options.limit for each in tried):  # pieces may have said a little too much
        least = sorted(large, key=lambda each: each.memory)[: options.finalists]
        tried += _in_full(least, pieces, composer, batch, options, end) or large
    plans = [each for each in tried if each.memory <= options.limit]
    if not plans:
        refuse(
            f"no way to train fits into {options.limit:,} bytes per device",
            where=f"{devices} devices of machine {machine.name!r}",
            why=f"the smallest that was found needs {min(each.memory for each in tried):,}",
            fix="take more devices, a smaller batch, or a machine with more memory",
        )
    plans.sort(key=lambda each: (not each.in_full, rank(each)))  # what is put together may leave something out
    names = () if options.topology is None else options.topology.names
    return TrainingPlans(
        module, options.function, machine, batch, tuple(plans), len(choices), len(large), pieces, names, asked
    )


def _choices(
    pieces: ModelPieces, composer: Composer, devices: int, batch: int, options: TrainingOptions
) -> list[Choice]:
    """All ways on so many devices, or on the meshes that are given; on fewer, too, where cost counts."""
    fewer = options.objective == "cost" and options.topology is None
    found: list[Choice] = []
    for count in divisors(devices) if fewer else [devices]:
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
    end: float,
) -> tuple[list[Estimate], list[Estimate]]:
    """What choices take that fit into memory, put together from pieces; and those that don't."""
    found, too_large = list[Estimate](), list[Estimate]()
    for number, choice in enumerate(choices, 1):
        try:
            if options.progress is not None:
                options.progress(number, len(choices))
            late = found and time.monotonic() > end
            if choice not in known and late:
                continue
            made = known.get(choice) or _estimated(choice, pieces, composer, batch, options.limit)
            (found if made.memory <= options.limit else too_large).append(made)
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


def check_names(only: Iterable[str]) -> None:
    """Refuse names of what no search can be held to."""
    known = [f.name for f in fields(Space)][3:]
    if unknown := [
        f"a search can't be held to {name!r}{did_you_mean(name, known)}" for name in only if name not in known
    ]:
        fix = f"it can be held to {', '.join(known)}; it draws no numbers, and takes no seed"
        refuse(unknown, where="search", fix=fix)


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
    plans: list[Estimate], pieces: ModelPieces, composer: Composer, batch: int, options: TrainingOptions, end: float
) -> list[Estimate]:
    """The plans, in order, of which the first ones are planned in full: until so many fit as are asked for, or as many
    don't and the time is over. What planning in full adds to one, others of its level of ZeRO are taken to have, too:
    else all finalists might be of one that pieces leave most out of."""
    made: list[Estimate] = []
    left, wanted = list(plans), options.finalists
    added, rank = dict[int, float](), _rank(options.objective)
    try:
        while left and sum(each.memory <= options.limit for each in made) < wanted:
            if len(made) >= wanted and time.monotonic() > end:
                break
            best = min(left, key=lambda each: rank(replace(each, time=each.time * added.get(each.choice.zero, 1.0))))
            made.append(in_full(best, pieces, composer, batch))
            left.remove(best)
            if 0 < best.time < math.inf and not best.in_full:
                added[best.choice.zero] = made[-1].time / best.time
    except KeyboardInterrupt:  # the rest as it was put together
        pass
    return made + left


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
        took = max(took, composer.update(here, own))
        most = max(most, peak + composer.kept(here, own.elements))
    return replace(plan, time=sim.time + took, memory=most, in_full=True, together=(plan.time, plan.memory))


def own_state(here: StageFragments, pieces: ModelPieces) -> Piece:
    """The weights of a stage that are trained, as a piece that does nothing."""
    names = [name for name in here.stage.params if name in pieces.weights]
    return Piece(0.0, 0.0, tile_bytes(here, names), elements_of(here, names), len(names), 0, 0, 0, 0, 0)


def _space(pieces: ModelPieces, devices: int, batch: int, only: Mapping[str, Any]) -> Space:
    made = Space(devices, batch, pieces.layers.count, model=pieces.model_sizes(devices))
    return replace(made, **{name: tuple(value) for name, value in only.items()})  # type: ignore[arg-type]  # by name


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
    stated = {each.name: row[each.name] for each in fields(Choice)}
    parts, layers = tuple(Part(**part) for part in stated["parts"]), tuple(row["layers"])
    choice = Choice(**{**stated, "parts": parts})
    hash(choice)  # else it is none
    whole = all(type(count) is int and count >= 0 for count in layers) and sum(layers) == pieces.layers.count
    if not whole or len(layers) != choice.stages:
        raise ValueError(f"{choice} has stages of {shown(layers)} layers, of {pieces.layers.count}")
    return Estimate(choice, float(amount(row, "time")), int(amount(row, "memory")), layers)


def uneven_choices(pieces: ModelPieces, composer: Composer, space: Space, limit: int) -> Iterator[Choice]:
    """Per number of microbatches, ZeRO, recomputation and sequence parallelism: the best stages on meshes of different
    sizes, in 1F1B, that devices of so many bytes hold; nothing where meshes of one size are better."""
    counts = [count for count in space.counts(1) if pieces.takes(space.batch // count)]
    for count, zero, again, sequence in product(counts, space.zero, space.recompute, space.sequence):
        base = Choice(microbatches=count, schedule="1f1b", zero=zero, recompute=again, sequence=sequence)
        parts = cut_best(_Cut(base, pieces, composer, space).question(limit))
        if parts is None or len({(part.data, part.model) for part in parts}) == 1:
            continue
        data, model = (max(getattr(part, name) for part in parts) for name in ("data", "model"))
        if (data > 1 or not zero) and (model > 1 or not sequence):  # else it is another one
            yield replace(base, data=data, model=model, meshes=len(parts), parts=parts)


@dataclass(frozen=True)
class _Cut:
    """What a choice's stages take, whatever they are cut into."""

    base: Choice
    pieces: ModelPieces
    composer: Composer
    space: Space

    def question(self, limit: int) -> Question:
        """How it is cut best."""
        space, rows = self.space, self.space.batch // self.base.microbatches
        sizes = [(d, m) for m in space.model for d in range(1, space.devices // m + 1) if rows % d == 0]
        count = self.base.microbatches
        return Question(space.layers, space.devices, count, sizes, self._seconds, self._memory, limit)

    def _here(self, part: Part, first: bool, last: bool) -> tuple[Choice, Stage, int]:
        choice = replace(self.base, data=part.data, model=part.model, meshes=2)
        model = self.pieces.models(choice, self.space.batch)[0]
        return choice, model.stage(part.layers, first, last), model.layer.received

    def _seconds(self, part: Part, first: bool, last: bool) -> float:
        return self.composer.part_seconds(*self._here(part, first, last))

    def _memory(self, part: Part, first: bool, last: bool, held: int) -> float:
        choice, stage, _ = self._here(part, first, last)
        return self.composer.part_memory(choice, stage, held)
