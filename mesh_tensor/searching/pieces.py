"""What the parts of a model take, and what a choice takes that is put together from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from mesh_tensor.base.collectives import BETWEEN, CollectiveKind, collective_time
from mesh_tensor.base.machine import Link, Machine
from mesh_tensor.base.placement import Partial, Replicate, Shard
from mesh_tensor.pipelining.check import Held, peaks
from mesh_tensor.pipelining.clock import timeline
from mesh_tensor.pipelining.schedule import Action, Schedule

from .choices import DATA, Choice

Order = tuple[str, int, int, int]  # a schedule's name, meshes, microbatches, chunks
Fragments = tuple[float, ...]  # seconds of a stage's actions, by their place in _KINDS
_KINDS = "FBIW"
_GRADIENT = 4  # bytes of an element of a gradient: sums are kept in float32
_STATE = 4  # bytes of each number that an optimizer keeps
_REDUCED, _GATHERED = BETWEEN[Partial, Replicate], BETWEEN[Shard, Replicate]


@dataclass(frozen=True)
class Piece:
    """A part of a model on one device, for some rows of a microbatch: seconds of its forward and backward, and bytes.

    inputs     seconds of the part of the backward that gives gradients of what it takes, and `own` of its weights: 0
               where no schedule runs them apart; `halfway`: what the first one leaves for the second

    weights    of its weights, of which there are `tensors`, with so many `elements`
    kept       what its forward leaves for its backward, and `taken`: what it takes of others or of the batch;
               `received`: what it takes of others, every element from one device
    working    the most that is there beside weights and what is kept

    rest       seconds of its backward after it has handed on what comes before it waits for, on a device alone

    With ZeRO-3 there is a piece for every size of the data axis: its weights are those that a device has, and its times
    have what is gathered and scattered; `ending`: seconds in which what stays whole is reduced at last.
    """

    forward: float
    backward: float
    weights: int
    elements: int
    tensors: int
    kept: int
    taken: int
    received: int
    working: int
    inputs: float = 0.0
    own: float = 0.0
    halfway: int = 0
    ending: float = 0.0
    rest: float = 0.0


_WHOLE = ("weights", "elements", "tensors", "kept", "taken", "received", "working", "halfway")


def mixed(low: Piece, high: Piece, share: float) -> Piece:
    """What is between two pieces, such a share of the way from the first one on, or beyond."""
    numbers = {name: value + share * (getattr(high, name) - value) for name, value in vars(low).items()}
    return Piece(**{name: max(0, round(n)) if name in _WHOLE else max(0.0, n) for name, n in numbers.items()})


def grown(piece: Piece, few: Piece, many: Piece) -> Piece:
    """What a piece takes more where another one, which differs in what is sent, grows from `few` to `many`."""
    more = {name: getattr(many, name) - value for name, value in vars(few).items()}
    return Piece(**{name: max(0, value + more[name]) for name, value in vars(piece).items()})


@dataclass(frozen=True)
class Stage:
    """Pieces that follow each other."""

    pieces: tuple[Piece, ...]

    @property
    def weights(self) -> int:
        return sum(piece.weights for piece in self.pieces)

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)

    @property
    def tensors(self) -> int:
        return sum(piece.tensors for piece in self.pieces)

    @property
    def ending(self) -> float:
        return sum(piece.ending for piece in self.pieces)

    @property
    def working(self) -> int:
        """The most that is there beside weights, sums of their gradients, and what is kept."""
        return max((piece.working for piece in self.pieces), default=0)

    @property
    def held(self) -> Held:
        """What it keeps of a microbatch for its backward."""
        return Held(sum(piece.kept for piece in self.pieces), sum(piece.halfway for piece in self.pieces))


@dataclass(frozen=True)
class Estimate:
    """What a choice takes: seconds of a step, and bytes of the device that holds most."""

    choice: Choice
    time: float
    memory: int
    layers: tuple[int, ...]  # of every stage
    in_full: bool = False  # planned as it runs, not put together from pieces
    together: tuple[float, int] | None = None  # ... and the seconds and bytes that it was put together to


def spread_layers(count: int, first: float, layer: float, last: float, stages: int) -> tuple[int, ...]:
    """So many layers on stages, of which the first and last one do more beside, so that the dearest takes least."""
    costs = [first, *[0.0] * (stages - 2), last] if stages > 1 else [first + last]
    found = [0] * stages
    for _ in range(count):
        least = min(range(stages), key=lambda stage: (costs[stage], stage))
        costs[least] += layer
        found[least] += 1
    return tuple(found)


@dataclass(frozen=True)
class Model:
    """A model as pieces: what comes before its layers, one layer, what comes after; and how many layers there are."""

    before: Piece
    layer: Piece
    after: Piece
    layers: int

    def cut(self, stages: int) -> tuple[int, ...]:
        """How many layers every stage has."""
        first, layer, last = (piece.forward + piece.backward for piece in (self.before, self.layer, self.after))
        return spread_layers(self.layers, first, layer, last, stages)

    def stage(self, layers: int, first: bool, last: bool) -> Stage:
        """A stage with so many layers, and what is before them all in the first one, and after them in the last."""
        return Stage(((self.before,) * first) + (self.layer,) * layers + ((self.after,) * last))


def layers_of(choice: Choice, models: Sequence[Model]) -> tuple[int, ...]:
    """How many layers every stage has; `models` are the model's pieces on each mesh."""
    return tuple(part.layers for part in choice.parts) or models[0].cut(choice.stages)


class Composer:
    """Choices on a machine. `states`: numbers that an optimizer keeps per weight, in float32."""

    def __init__(self, machine: Machine, states: int) -> None:
        self._machine, self._states = machine, states

    def memory(self, choice: Choice, models: Sequence[Model], layers: Sequence[int]) -> int:
        """The bytes of the device that holds most; `models` are the model's pieces on each mesh, `layers` how many
        every stage has."""
        stages = _stages(choice, models, layers)
        schedule, most = named_schedule(*choice.order), 0
        sums = [_GRADIENT * stage.elements for stage in stages]
        held = _held(choice, [_kept(choice, stage) for stage in stages], sums)
        for mesh, (activations, here) in enumerate(zip(held, choice.each, strict=True)):
            mine = [stage for number, stage in enumerate(stages) if schedule.mesh_of[number] == mesh]
            most = max(most, self._most(here, mine, activations))
        return most

    def _most(self, choice: Choice, stages: Sequence[Stage], activations: float) -> int:
        """What a device holds at most that has these stages, and so much for backwards and of what they give."""
        working = max(stage.working for stage in stages)
        if choice.recompute:
            working += int(max(stage.held.forward for stage in stages))
        return int(activations) + working + sum(self._state(choice, stage) for stage in stages)

    def part_memory(self, choice: Choice, stage: Stage, held: int) -> int:
        """What a device of a stage holds at most that keeps so many microbatches."""
        return self._most(choice, [stage], held * _kept(choice, stage).forward + _GRADIENT * stage.elements)

    def part_seconds(self, choice: Choice, stage: Stage, sent: int) -> float:
        """What a microbatch takes in a stage, forwards and backwards, with what it sends to the next one and back."""
        forward, backward, *_ = self._fragments(choice, stage)
        return forward + backward + 2 * self.transfer(choice, sent)

    def _state(self, choice: Choice, stage: Stage) -> int:
        """Weights and what the optimizer keeps."""
        states = _STATE * self._states * stage.elements
        return stage.weights + states // (choice.data if choice.zero == 1 else 1)

    def seconds(self, choice: Choice, models: Sequence[Model], layers: Sequence[int]) -> float:
        """Of a step: the schedule, what devices with the same weights exchange at its end, and the optimizer's
        update."""
        stages, each = _stages(choice, models, layers), choice.each
        mesh_of = named_schedule(*choice.order).mesh_of
        costs = tuple(self._fragments(each[mesh_of[number]], stage) for number, stage in enumerate(stages))
        sent = max(model.layer.received for model in models)
        rest = tuple(self._rest(each[mesh_of[number]], stage) for number, stage in enumerate(stages))
        return _clock(choice.order, costs, self._transfers(choice, sent), rest) + max(
            sum(self._end(here, stage) for number, stage in enumerate(stages) if mesh_of[number] == mesh)
            for mesh, here in enumerate(each)
        )

    def transfer(self, choice: Choice, sent: int) -> float:
        """Seconds from a stage to the next one, wherever both are."""
        return 0.0 if choice.meshes == 1 else _on_link(self._machine.link(choice.devices), sent)

    def _transfers(self, choice: Choice, sent: int) -> tuple[float, ...]:
        """Seconds from every mesh to the next one, and between those that are no neighbours; meshes lie one after the
        other."""
        if choice.meshes == 1:
            return ()
        ends = [0, *accumulate(each.data * each.model for each in choice.each)]
        pairs = [(first, last - 1) for first, last in zip(ends, ends[2:], strict=False)]
        return tuple(_on_link(self._machine.joining(*pair), sent) for pair in [*pairs, (0, ends[-1] - 1)])

    def _fragments(self, choice: Choice, stage: Stage) -> Fragments:
        """A stage's forward and backward on a microbatch, and the halves of that; gradients are added to what there is
        of them."""
        kinds = ("forward", "backward", "inputs", "own")
        forward, backward, inputs, own = (sum(getattr(p, kind) for p in stage.pieces) for kind in kinds)
        if choice.recompute:
            backward += forward
        added = self._added(choice, stage)
        return forward, backward + added, inputs, own + added

    def _added(self, choice: Choice, stage: Stage) -> float:
        """Seconds in which a microbatch's gradients are added to those before."""
        return ((3 * _GRADIENT * stage.elements) / self._machine.main_memory.rate) * (choice.microbatches > 1)

    def _rest(self, choice: Choice, stage: Stage) -> float:
        """Seconds of a stage's backward in which the stage before has what it waits for: ranks that have a mesh to
        themselves hand that on first."""
        shared = choice.data * choice.model > 1 or self._machine.processors is not None
        rest = 0.0 if shared else sum(piece.rest for piece in stage.pieces)
        return rest + self._added(choice, stage) if rest else 0.0

    def _end(self, choice: Choice, stage: Stage) -> float:
        """After the last microbatch: gradients are reduced, weights and states updated."""
        if choice.zero == 3:
            return stage.ending + self.update(choice, stage)
        reduced = self._over_data(choice, _REDUCED, _GRADIENT * stage.elements, stage.tensors)
        return reduced + self.update(choice, stage)

    def update(self, choice: Choice, stage: Stage) -> float:
        """Seconds in which an optimizer changes a stage's weights, and what it keeps."""
        touched = _GRADIENT * stage.elements + 2 * stage.weights + 2 * _STATE * self._states * stage.elements
        took = touched / (choice.data if choice.zero == 1 else 1) / self._machine.main_memory.rate
        return took + self._over_data(choice, _GATHERED, stage.weights, stage.tensors) * (choice.zero == 1)

    def kept(self, choice: Choice, elements: int) -> int:
        """Bytes that an optimizer keeps for so many elements of weights, as they lie."""
        return _STATE * self._states * elements // (choice.data if choice.zero == 1 else 1)

    def _over_data(self, choice: Choice, kind: CollectiveKind, nbytes: float, tensors: int) -> float:
        """A collective of each of so many whole tensors over the data axis."""
        group = choice.data
        received = nbytes * (group - 1) / group * (2 if kind is _REDUCED else 1) / max(1, tensors)
        return tensors * collective_time(self._machine, kind.name, received, choice.mesh, (DATA,)) if group > 1 else 0.0


@lru_cache(maxsize=512)
def named_schedule(name: str, meshes: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule of that name."""
    return Schedule.named(name, meshes=meshes, microbatches=microbatches, chunks=chunks)


def _stages(choice: Choice, models: Sequence[Model], layers: Sequence[int]) -> list[Stage]:
    """The pieces of every stage, as they are on its mesh."""
    mesh_of, last = named_schedule(*choice.order).mesh_of, len(layers) - 1
    return [models[mesh_of[n]].stage(count, n == 0, n == last) for n, count in enumerate(layers)]


def _kept(choice: Choice, stage: Stage) -> Held:
    """What a stage holds of a microbatch for its backward."""
    return Held(stage.pieces[0].taken) if choice.recompute else stage.held


def _held(choice: Choice, kept: Sequence[Held], sums: Sequence[float]) -> list[float]:
    """Per mesh: the bytes that it holds at most for backwards, of stages that keep so many of a microbatch, and of sums
    of gradients, from the first backward on."""
    schedule = named_schedule(*choice.order)
    if schedule.num_stages == schedule.num_meshes and not choice.halves:
        each = zip(_counts(choice.order), kept, sums, strict=True)
        return [max(most * mine.forward, later * mine.forward + own) for (most, later), mine, own in each]
    return peaks(schedule, dict(enumerate(kept)), dict(enumerate(sums)))


@lru_cache(maxsize=512)
def _counts(order: Order) -> tuple[tuple[float, float], ...]:
    """Per mesh: the microbatches that it holds at most; and from the first backward on."""
    schedule = named_schedule(*order)
    most, many = peaks(schedule), schedule.num_microbatches + 1
    with_sums = peaks(schedule, sums=dict.fromkeys(range(schedule.num_stages), float(many)))
    return tuple(zip(most, (each - many for each in with_sums), strict=True))


@lru_cache(maxsize=4096)
def _clock(order: Order, costs: tuple[Fragments, ...], transfers: tuple[float, ...], rest: tuple[float, ...]) -> float:
    """The schedule with these costs; `rest`: of every stage's backward, seconds after what it hands on first."""
    schedule = named_schedule(*order)
    if schedule.num_meshes == 1:
        return schedule.num_microbatches * sum(forward + backward for forward, backward, *_ in costs)

    def cost(action: Action) -> float:
        return costs[action.stage][_KINDS.index(action.kind)]

    def delay(source: int, target: int) -> float:
        first, last = sorted((schedule.mesh_of[source], schedule.mesh_of[target]))
        return transfers[first] if last == first + 1 else transfers[-1]

    def early(action: Action) -> float:
        return rest[action.stage] if action.kind == "B" else 0.0

    return timeline(schedule, cost, delay, early=early).makespan


def _on_link(link: Link, sent: int) -> float:
    return link.start + sent / link.rate
