"""A model's pieces whose weights are split over the data axis, too (ZeRO-3): weights are gathered and gradients
scattered beside what computes, as far as that hides it.

Which steps that is beside depends neither on how many devices the axis has nor on how many rows each of them has. So
pieces are planned on two devices, for few and for many rows, and their steps are priced for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mesh_tensor.base.collectives import BETWEEN, collective_time
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.sharding import Partial, Replicate, Shard, Sharding
from mesh_tensor.program.steps import Step
from mesh_tensor.searching.choices import DATA, MODEL
from mesh_tensor.searching.pieces import Model, Piece, grown, mixed
from mesh_tensor.simulation import Simulation
from mesh_tensor.simulation.stages import reducing_seconds, weights_of
from mesh_tensor.simulation.streams import SEND, START, WAIT, Event, play

from .fragments import StageFragments
from .strategies import combine

if TYPE_CHECKING:
    from .model_pieces import ModelPieces

_GATHERED, _SCATTERED = BETWEEN[Shard, Replicate].name, BETWEEN[Partial, Shard].name
_FEW, _MANY = 4, 8  # rows that are planned, and times as many
_AHEAD = CPU.tuning.products_ahead
_TIMES = {"F": "forward", "B": "backward", "I": "inputs", "W": "own"}


@dataclass(frozen=True)
class Shape:
    """Rows on a device, the size of the model axis, and whether what is between split layers is split by positions;
    `data`: devices that share all rows, and, if they are `split`, weights (ZeRO-3)."""

    rows: int
    model: int
    sequence: bool
    data: int = 1
    split: bool = False


@dataclass(frozen=True, eq=False)
class _Planned:
    """A piece as it was planned for so many rows on a device: its numbers, and what each of its fragments does."""

    rows: int
    piece: Piece
    runs: Mapping[str, Simulation]
    here: StageFragments


class SplitPieces:
    """The pieces of a model in shapes whose weights are split over the data axis."""

    def __init__(self, pieces: ModelPieces) -> None:
        self._pieces, self._known = pieces, dict[tuple[Shape, int], _Planned]()

    def model(self, shape: Shape) -> Model:
        """Layers are planned for few rows and for many; what is around them for few: of more, it takes as much more as
        where weights are whole. Where a module takes so many rows alone, or devices share processors, everything is
        planned as it is."""
        pieces, few = self._pieces, shape
        if pieces.rows is None:
            few = replace(shape, rows=_FEW, data=2 if pieces.machine.processors is None else shape.data)
        while few.rows * _MANY < shape.rows:
            few = replace(few, rows=few.rows * _MANY)
        many = few if pieces.rows is not None else replace(few, rows=few.rows * _MANY)
        data = 1 if pieces.rows is None else shape.data
        ends = [pieces.model(replace(shape, rows=rows, data=data, split=False)) for rows in (few.rows, shape.rows)]
        before, after = (self._at(shape, self._planned(few, number)) for number in (0, 2))
        layer = self._at(shape, self._planned(few, 1), self._planned(many, 1))
        before, after = (
            grown(piece, *(getattr(end, name) for end in ends))
            for piece, name in ((before, "before"), (after, "after"))
        )
        return Model(before, layer, after, ends[0].layers)

    @uncollected
    def _planned(self, shape: Shape, number: int) -> _Planned:
        pieces, key = self._pieces, (shape, number)
        if key not in self._known:
            flow = pieces.flow_of(shape.rows * shape.data)
            stage = pieces.around(flow)[number]
            layouts = pieces.over_rows(shape.data, shape.sequence)
            layouts = combine(layouts, layouts_over_data(pieces.weights, pieces.model_layouts, shape.data))
            mesh = {DATA: shape.data, MODEL: shape.model}
            self._known[key] = _Planned(shape.rows, *pieces.piece(flow, stage, mesh, layouts))
        return self._known[key]

    def _at(self, shape: Shape, few: _Planned, many: _Planned | None = None) -> Piece:
        """The piece for a shape's rows and devices; of a layer, for few and for many rows, as it is between others."""
        machine, here, among = self._pieces.machine, few.here, many is not None
        many = few if many is None else many
        share = 0.0 if many.rows == few.rows else (shape.rows - few.rows) / (many.rows - few.rows)
        mesh, names, lies = Mesh({**here.mesh.shape, DATA: shape.data}), weights_of(here), here.layouts
        tiles = {n: Sharding.of(mesh, lies[n].ndim, lies[n].placements()).tile_shape(here.types[n][0]) for n in names}
        ends = [(few.runs[kind], many.runs[kind]) for kind in few.runs]
        seconds = [_seconds(each, share, mesh, machine, among) for each in ends]
        times: dict[str, Any] = dict(zip(map(_TIMES.__getitem__, few.runs), seconds, strict=True))
        return replace(
            mixed(few.piece, many.piece, share),
            **times,
            weights=sum(math.prod(tile) * here.types[name][1].itemsize for name, tile in tiles.items()),
            elements=sum(math.prod(tile) for name, tile in tiles.items() if name in self._pieces.weights),
            ending=reducing_seconds(here, machine, mesh),
        )


def layouts_over_data(
    weights: Mapping[str, Sequence[int]], model: Mapping[str, Mapping[str, int]], data: int
) -> dict[str, dict[str, int]]:
    """The matrices, split over the data axis: along the first dim that is long enough and that `model` parallelism
    doesn't split, which heads may be too few for. Vectors stay whole."""
    found = {}
    for name, shape in weights.items():
        free = [dim for dim, size in enumerate(shape) if dim not in model.get(name, {}).values() and size >= data]
        found[name] = {DATA: free[0]} if free and len(shape) > 1 else {}
    return found


def _seconds(runs: tuple[Simulation, Simulation], share: float, mesh: Mesh, machine: Machine, among: bool) -> float:
    """What a fragment takes between, or beyond, two numbers of rows: where its steps are the same, each takes that."""
    ends = [_events(run, mesh, machine) for run in runs]
    low, high = (run.time - _played(run.events, machine) for run in runs)
    if [event[::2] for event in ends[0]] == [event[::2] for event in ends[1]]:
        pairs = zip(*ends, strict=True)
        ends = [[one._replace(seconds=_mixed(one.seconds, other.seconds, share)) for one, other in pairs]]
    took = []
    for events, run in zip(ends, runs, strict=False):
        alone = _played(events, machine)
        took.append(_played(_twice(events, run), machine) - alone if among else alone)
    return _mixed(took[0], took[-1], share) + _mixed(low, high, share)


def _played(events: Sequence[Event], machine: Machine) -> float:
    return play(events, len(machine.links), machine.busy)[0]


def _mixed(low: float, high: float, share: float) -> float:
    return max(0.0, low + share * (high - low))


def _events(run: Simulation, mesh: Mesh, machine: Machine) -> list[Event]:
    """What a fragment does on another mesh, which differs in what is sent over the data axis."""
    found, own = list[Event](), run.program.mesh
    for event, number in zip(run.events, run.numbers, strict=True):
        step = run.program.steps[number].starts
        if event.kind in (SEND, START) and step is not None and DATA in step.axes and mesh != own:
            was, now = (math.prod(each.size(axis) for axis in step.axes) for each in (own, mesh))
            nbytes = step.bytes * (1 - 1 / now) / (1 - 1 / was)
            event = event._replace(seconds=collective_time(machine, step.kind, nbytes, mesh, step.axes))
        found.append(event)
    return found


def _twice(events: Sequence[Event], run: Simulation) -> list[Event]:
    """A fragment and one like it behind it, as one program: what the second one gathers first starts beside the last
    products of the first one, which waits at the end of both for what it scatters last."""
    steps = [run.program.steps[number] for number in run.numbers]
    products = [place for place, step in enumerate(steps) if step.is_long]
    before, after = (products[_AHEAD - 1], products[-_AHEAD]) if len(products) >= _AHEAD else (0, len(events))
    gathered = [n for n in range(before) if _sends(events[n], steps[n], _GATHERED)]
    late = {n for n in range(after, len(events)) if _sends(events[n], steps[n], _SCATTERED)}
    made, at, early = list[Event](), dict[int, int](), dict[int, int]()

    def add(event: Event) -> int:
        made.append(event._replace(which=at[event.which]) if event.kind == WAIT else event)
        return len(made) - 1

    for n, event in enumerate(events):
        if n == after:
            early = {each: add(events[each]._replace(kind=START)) for each in gathered}
        if not (event.kind == WAIT and event.which in late):
            at[n] = add(event._replace(kind=START) if n in late else event)
    waited = [at[n] for n in late]
    for n, event in enumerate(events):
        if n not in early:
            at[n] = add(event)
        elif event.kind == START:
            at[n] = early[n]
        else:
            made.append(Event(WAIT, 0.0, early[n]))
    return [*made, *(Event(WAIT, 0.0, which) for which in waited)]


def _sends(event: Event, step: Step, kind: str) -> bool:
    """Whether it is a collective of a kind over the data axis."""
    sent = step.starts if event.kind in (SEND, START) else None
    return sent is not None and sent.kind == kind and DATA in sent.axes
