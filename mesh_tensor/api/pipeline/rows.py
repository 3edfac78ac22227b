"""A schedule runs on a virtual topology: a thread per mesh goes through its row, and values go from row to row."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from mesh_tensor.base.errors import MeshTensorError, refuse, words_of
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.schedule import Action, Schedule
from mesh_tensor.runtime.backend import PutAway, fetched, put_away
from mesh_tensor.targets.tile_memory import memory_of

from ..fragments import StageFragments, Values
from .carriers import Carrier, Mailbox, Stopped
from .stopwatch import Stopwatch


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch: its inputs, the stages for its sizes, its share of the rows, and the gradient of the batch's
    loss by its own, of which all are taken times `scale`."""

    inputs: Mapping[str, torch.Tensor]
    stages: Sequence[StageFragments]
    share: float
    seed: float
    scale: float = 1.0


class Row:
    """One mesh's part of a run: its actions in order, with the values that its stages hold."""

    def __init__(
        self,
        carrier: Carrier,
        weights: Mapping[int, Values],
        microbatches: Sequence[Microbatch],
        loss: str | None,
        memory: Mapping[str, str] | None = None,
    ) -> None:
        """`memory`: the kind of memory in which values, by name, are held for backwards.

        state   per stage what its last forward left for the next one, in place of weights"""
        self._carrier, self._weights, self._microbatches, self._loss = carrier, weights, microbatches, loss
        self._memory = memory or {}
        self.state: dict[int, Values] = {}
        self._held: dict[tuple[int, int], Values] = {}
        self._kept: dict[tuple[int, int], dict[str, Any]] = {}  # what torch keeps for its gradients, by the place
        self._sizes: dict[tuple[int, int], int] = {}
        self._bytes, self._handed_on = 0, False
        self.results: dict[tuple[str, int], Any] = {}
        self.gradients: dict[int, Values] = {}
        self.peak_bytes = 0
        self.peak_microbatches = 0
        self.watch = Stopwatch()

    def run(self, action: Action) -> None:
        """Run one action: take what it needs, compute, hand on what others need."""
        here = self._microbatches[action.microbatch].stages[action.stage]
        _ACTIONS[action.kind](self, here, action)
        self._count(here, action)
        self.watch.ended(action, self._bytes)

    def expect(self, action: Action) -> None:
        """Make ready for what the next action takes from other meshes."""
        part = self._microbatches[action.microbatch]
        here = part.stages[action.stage]
        for name, there in _awaited(here, part.stages, action.kind):
            self._carrier.expect(here, there, name, action.microbatch)

    def forward(self, here: StageFragments, action: Action) -> None:
        """F: inputs are laid out, values of earlier stages taken, results handed on."""
        stage, microbatch = here.stage, action.microbatch
        part = self._microbatches[microbatch]
        given = {name: part.inputs[name] for name in stage.params if name in part.inputs}
        held = {name: self._carrier.place(here, name, tensor) for name, tensor in given.items()}
        held |= self._state_of(here)  # backwards take what their forward took, not what others left since
        for name, there in _awaited(here, part.stages, "F"):
            held[name] = self._carrier.take(here, there, name, microbatch)
        made = self._run(here, action, held)
        left = {name: self._carrier.laid(made[value], here.layouts[name]) for name, value in stage.state.items()}
        self.state |= {stage.index: left} if left else {}
        self.results |= {(name, microbatch): made[name] for name in stage.results}
        for name in stage.gives:
            for there in part.stages:
                if there.stage.takes.get(name) == stage.index:
                    self._carrier.hand(here, there, name, made[name], microbatch)
        if later := here.later["F"]:
            known = {**held, **made}
            kept = {name: known[name] for name in later & known.keys()}
            self._held[stage.index, microbatch] = self._put_away(kept) if self._memory else kept
        else:
            self._kept.pop((stage.index, microbatch), None)

    def _state_of(self, here: StageFragments) -> Values:
        """The stage's state, as the forward before left it."""
        stage, weights = here.stage, self._weights[here.stage.index]
        if stage.index in self.state:
            return self.state[stage.index]
        return {name: fetched(weights[name], self._carrier.moved) for name in stage.state}

    def backward(self, here: StageFragments, action: Action) -> None:
        """B, I or W: gradients of later stages are taken; those of weights are added up, the others handed on."""
        stage, place = here.stage, (action.stage, action.microbatch)
        fragment, held = here.fragments.get(action.kind), self._held.setdefault(place, {})
        if fragment is not None:
            weights = self._weights[stage.index]
            for name in fragment.takes:
                if name not in held and name not in weights:
                    held[name] = self._seed(here, name, action.microbatch)
            if self._memory:
                held |= {name: fetched(held[name], self._carrier.moved) for name in fragment.takes if name in held}
            sums, known = self.gradients.setdefault(stage.index, {}), frozenset[int]()
            if here.sums[action.kind].keys() - sums.keys():
                known = frozenset(self._storages((*held.values(), *weights.values())))
            self._handed_on = False
            made = self._run(here, action, held)
            held |= made
            self._deliver(here, made, known, action)
        for name in held.keys() - here.later[action.kind]:
            del held[name]
        if not held:
            self._held.pop(place, None)
            self._kept.pop(place, None)

    def _put_away(self, held: Values) -> Values:
        """What is held, in the memory that is stated for it."""
        kept = dict(held)
        for name in self._memory.keys() & held.keys():
            tile = next(iter(self._carrier.tiles(held[name])))
            kept[name] = put_away(held[name], tile.device, self._memory[name], self._carrier.moved)
        return kept

    def _run(self, here: StageFragments, action: Action, held: Values) -> Values:
        """What a fragment makes of weights, and of what is held; what a backward is the last to take isn't any more,
        and gradients of weights that were added to earlier microbatches' are no part of what it makes."""
        self.watch.began()
        fragment, weights, carrier = here.fragments[action.kind], self._weights[here.stage.index], self._carrier
        values = [held[name] if name in held else weights[name] for name in fragment.takes]
        if self._memory:
            values = [fetched(value, carrier.moved) for value in values]
        if action.kind != "F":
            for name in held.keys() & here.lasts[action.kind]:
                del held[name]
        kept = self._kept.setdefault((action.stage, action.microbatch), {})
        sums, numbers = self.gradients.get(here.stage.index, {}), here.sums[action.kind]
        totals = {number: sums[weight] for weight, number in numbers.items() if weight in sums}
        left = totals.copy()
        results = carrier.run(fragment, values, kept, left, partial(self._hand_on, here, action))
        added = totals.keys() - left.keys()
        sums |= {weight: results[number] for weight, number in numbers.items() if number in added}
        return {name: results[n] for n, name in enumerate(fragment.gives) if n not in added}

    def _hand_on(self, here: StageFragments, action: Action, made: Mapping[int, Any]) -> None:
        """Hand gradients of what the stage took, as results of a fragment by their numbers, to those who made it."""
        stage, gives = here.stage, here.fragments[action.kind].gives
        for number, value in made.items():
            there = self._microbatches[action.microbatch].stages[stage.takes[here.valued[gives[number]]]]
            if gives[number] in there.taken:
                self._carrier.hand(here, there, gives[number], value, action.microbatch)
        self._handed_on = True

    def _deliver(self, here: StageFragments, made: Values, known: Collection[int], action: Action) -> None:
        """Hand gradients of what the stage took to those who made it, unless that is done; add up those of weights.
        `known`: the storages that there were before, where some weight has no gradient yet."""
        gives = here.fragments[action.kind].gives
        if not self._handed_on:
            taken = {n: made[name] for n, name in enumerate(gives) if here.valued.get(name) in here.stage.takes}
            self._hand_on(here, action, taken)
        users = Counter(self._storages(made.values())) if known else Counter[int]()
        of_weights = {of: value for name, value in made.items() if (of := here.valued.get(name, "")) in here.own}
        self._add_up(here, of_weights, {storage for storage, count in users.items() if count == 1}.difference(known))

    def _storages(self, values: Iterable[Any]) -> Iterator[int]:
        """Those of the values' tiles."""
        tiles = self._carrier.tiles
        return (memory_of(tile) for value in values if not isinstance(value, PutAway) for tile in tiles(value))

    def _add_up(self, here: StageFragments, of_weights: Values, own: Collection[int]) -> None:
        """Add a microbatch's gradients to the weights'. Parts of a sum stay parts until the end, if all microbatches'
        are. `own`: storages that nothing else has."""
        carrier, sums = self._carrier, self.gradients[here.stage.index]
        pairs: dict[str, tuple[Any, Any]] = {}
        for weight, value in of_weights.items():
            total = sums.get(weight)
            if total is None:
                free = all(memory_of(tile) in own and _is_all(tile) for tile in carrier.tiles(value))
                sums[weight] = carrier.widened(value, torch.promote_types(value.dtype, torch.float32), free)
                continue
            one, other = carrier.layout(total), carrier.layout(value)
            if one is not other and one != other:
                layout = here.layouts[gradient_name(weight)]
                total, value = carrier.laid(total, layout), carrier.laid(value, layout)
            pairs[weight] = total, value
        if pairs:
            totals, values = zip(*pairs.values(), strict=True)
            sums |= zip(pairs, carrier.accumulate(totals, values), strict=True)

    def finish(self) -> None:
        """Reduce the weights' gradients, once for all microbatches, where devices have parts of them, and take the
        scale out of them."""
        self.watch.at_end(self._reduce)

    def _reduce(self) -> None:
        scale = self._microbatches[0].scale
        for stage, sums in self.gradients.items():
            here = self._microbatches[0].stages[stage]
            for weight, total in sums.items():
                made = self._carrier.laid(total, here.layouts[gradient_name(weight)])
                sums[weight] = made if scale == 1.0 else self._carrier.moved(made, lambda tile: tile / scale)

    def _seed(self, here: StageFragments, name: str, microbatch: int) -> Any:
        """The gradient of a value that the stage gives: the sum of what its takers found, in their order."""
        part, carrier = self._microbatches[microbatch], self._carrier
        value = here.valued[name]
        dtype = here.types[value][1]
        total = None
        if value == self._loss:
            total = carrier.place(here, name, torch.tensor(part.seed * part.scale, dtype=dtype))
        for there in _takers(here, part.stages, value):
            found = carrier.take(here, there, name, microbatch)
            total = found if total is None else carrier.add(total, found)
        if total is not None:
            return total
        shape, dtype = here.types[value]
        return carrier.place(here, name, torch.zeros(shape, dtype=dtype))

    def _count(self, here: StageFragments, action: Action) -> None:
        """What is held for backwards now, against the most there was; a stage and microbatch changed."""
        place = action.stage, action.microbatch
        size = here.held_bytes.get(action.kind)
        if size is None:
            held = [value for value in self._held.get(place, {}).values() if not isinstance(value, PutAway)]
            tiles = {t.data_ptr(): t.nbytes for value in held for t in self._carrier.tiles(value)}
            tiles |= {t.data_ptr(): t.nbytes for kept in self._kept.get(place, {}).values() for t in kept}
            size = here.held_bytes[action.kind] = sum(tiles.values())
        self._bytes += size - self._sizes.pop(place, 0)
        if size:
            self._sizes[place] = size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self.peak_microbatches = max(self.peak_microbatches, len(self._held))


def _is_all(tile: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    return tile.is_contiguous() and tile.untyped_storage().nbytes() == tile.nbytes


def _takers(here: StageFragments, stages: Sequence[StageFragments], value: str) -> Iterator[StageFragments]:
    """The stages that take a stage's value, and give its gradient."""
    gradient = gradient_name(value)
    for there in stages:
        if there.stage.takes.get(value) == here.stage.index and gradient in there.given:
            yield there


def _awaited(here: StageFragments, stages: Sequence[StageFragments], kind: str) -> Iterator[tuple[str, StageFragments]]:
    """What an action of a stage takes from others, by name, with the stage that gives it."""
    if kind == "F":
        yield from ((name, stages[source]) for name, source in here.stage.takes.items())
    fragment = here.fragments.get(kind)
    if kind == "F" or fragment is None:
        return
    before = here.fragments["I"].takes if kind == "W" and "I" in here.fragments else ()
    for name in fragment.takes:
        value = here.valued.get(name)
        if value in here.stage.gives and name not in before:
            yield from ((name, there) for there in _takers(here, stages, value))


_ACTIONS: dict[str, Callable[[Row, StageFragments, Action], None]] = {
    "F": Row.forward,
    **dict.fromkeys("BIW", Row.backward),
}


def run_rows(schedule: Schedule, rows: Sequence[Row], names: Sequence[str], mailbox: Mailbox) -> None:
    """Run every row in a thread of its own, which share torch's threads: with more, these would wait for cores, in
    turns around nothing. What fails on one mesh ends all, and is raised here."""
    failures: list[tuple[str, Action, BaseException]] = []
    inference, threads = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def work(mesh: int) -> None:
        torch.get_num_threads()  # else the first operation would undo what follows
        torch.set_num_threads(max(1, threads // len(names)))  # of this thread; and of threads to come
        with torch.inference_mode(inference):
            for action in schedule.rows[mesh]:
                try:
                    mailbox.check()
                    rows[mesh].run(action)
                    if action is schedule.rows[mesh][-1]:
                        rows[mesh].finish()
                except Stopped:
                    return
                except BaseException as error:
                    failures.append((names[mesh], action, error))
                    mailbox.fail()
                    return

    def run(mesh: int) -> None:
        try:
            work(mesh)
        finally:
            ended[mesh].set()

    ended = [threading.Event() for _ in names]
    meshes = [threading.Thread(target=run, args=(mesh,), name=f"mesh {name}") for mesh, name in enumerate(names)]
    try:
        for thread in meshes:
            thread.start()
        for each in ended:  # unlike join, this may be interrupted, and threads waited for again
            each.wait()
    except BaseException:
        mailbox.fail()
        raise
    finally:
        for thread in meshes:
            if thread.ident is not None:
                thread.join()
        torch.set_num_threads(threads)
    if failures:
        fail(*failures[0])


def fail(mesh: str, action: Action, error: BaseException) -> NoReturn:
    """Raise what went wrong in an action, by its name and its mesh's."""
    if not isinstance(error, Exception):
        raise error
    try:
        refuse(words_of(error), where=f"{action} ({action.name} of stage {action.stage}) on mesh {mesh!r}")
    except MeshTensorError as told:
        raise told from error
