"""A schedule runs on a virtual topology: a thread per mesh goes through its row, and values go from row to row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.pipeline.fragments import gradient_name
from mesh_tensor.pipeline.schedule import Action, Schedule
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.runtime.virtual.transfer import transfer

from .pipeline_stages import StageFragments, Values

Key = tuple[str, int, int, int]  # a value, the stage that makes it, the stage that takes it, the microbatch


class Stopped(Exception):
    """Another mesh failed: what is awaited won't come."""


class Mailbox:
    """What stages hand to each other. Taking waits until it is there, or until a mesh has failed."""

    def __init__(self) -> None:
        self._there: dict[Key, MeshTensor] = {}
        self._changed = threading.Condition()
        self._failed = False

    def put(self, key: Key, value: MeshTensor) -> None:
        """Hand over a value."""
        with self._changed:
            self._there[key] = value
            self._changed.notify_all()

    def take(self, key: Key) -> MeshTensor:
        """Wait for a value; it is gone then."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or key in self._there)
            if self._failed:
                raise Stopped
            return self._there.pop(key)

    def fail(self) -> None:
        """Wake up all who wait."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch: its inputs, the stages for its sizes, and what it counts for in the mean of the losses."""

    inputs: Mapping[str, torch.Tensor]
    stages: Sequence[StageFragments]
    share: float


class Row:
    """One mesh's part of a run: its actions in order, with the values that its stages hold."""

    def __init__(
        self, mailbox: Mailbox, weights: Mapping[int, Values], microbatches: Sequence[Microbatch], loss: str | None
    ) -> None:
        self._mailbox, self._weights, self._microbatches, self._loss = mailbox, weights, microbatches, loss
        self._held: dict[tuple[int, int], Values] = {}
        self.results: dict[tuple[str, int], MeshTensor] = {}
        self.gradients: dict[int, Values] = {}
        self.peak_bytes = 0
        self.peak_microbatches = 0

    def run(self, action: Action) -> None:
        """Run one action: take what it needs, compute, hand on what others need."""
        here = self._microbatches[action.microbatch].stages[action.stage]
        _ACTIONS[action.kind](self, here, action)
        self._count()

    def forward(self, here: StageFragments, action: Action) -> None:
        """F: inputs are laid out, values of earlier stages taken, results handed on."""
        stage, microbatch = here.stage, action.microbatch
        part = self._microbatches[microbatch]
        held = {name: here.place(name, part.inputs[name]) for name in stage.params if name in part.inputs}
        for name, source in stage.takes.items():
            held[name] = self._mailbox.take((name, source, stage.index, microbatch))
        made = here.fragments["F"](self._weights[stage.index] | held)
        self.results |= {(name, microbatch): made[name] for name in stage.results}
        for name in stage.gives:
            for there in part.stages:
                if there.stage.takes.get(name) == stage.index:
                    self._hand(here, there, name, made[name], microbatch)
        if later := _needed(here, "BIW"):
            self._held[stage.index, microbatch] = {k: v for k, v in {**held, **made}.items() if k in later}

    def backward(self, here: StageFragments, action: Action) -> None:
        """B, I or W: gradients of later stages are taken; those of weights are added up, the others handed on."""
        stage, place = here.stage, (action.stage, action.microbatch)
        fragment, held = here.fragments.get(action.kind), self._held.get(place, {})
        if fragment is not None:
            for name in fragment.takes:
                if name not in held and name not in self._weights[stage.index]:
                    held[name] = self._seed(here, name, action.microbatch)
            made = fragment(self._weights[stage.index] | held)
            held |= made
            for name, value in made.items():
                self._deliver(here, name, value, action.microbatch)
        later = _needed(here, "W") if action.kind == "I" else set()
        for name in [name for name in held if name not in later]:
            del held[name]
        if not held:
            self._held.pop(place, None)

    def _deliver(self, here: StageFragments, name: str, value: MeshTensor, microbatch: int) -> None:
        stage = here.stage
        weight = next((w for w in stage.params if gradient_name(w) == name), None)
        taken = next((v for v in stage.takes if gradient_name(v) == name), None)
        if weight is not None:
            sums = self.gradients.setdefault(stage.index, {})
            if weight not in sums:
                wide = torch.promote_types(value.dtype, torch.float32)
                sums[weight] = here.place(name, torch.zeros(value.shape, dtype=wide))
            sums[weight] = sums[weight] + value
        elif taken is not None:
            there = self._microbatches[microbatch].stages[stage.takes[taken]]
            self._hand(here, there, name, value, microbatch)

    def _seed(self, here: StageFragments, name: str, microbatch: int) -> MeshTensor:
        """The gradient of a value that the stage gives: the sum of what its takers found, in their order."""
        part, stage = self._microbatches[microbatch], here.stage
        value = next(v for v in stage.gives if gradient_name(v) == name)
        total = here.place(name, torch.tensor(part.share)) if value == self._loss else None
        for there in part.stages:
            if there.stage.takes.get(value) == stage.index and _gives(there, name):
                found = self._mailbox.take((name, there.stage.index, stage.index, microbatch))
                total = found if total is None else total + found
        if total is not None:
            return total
        like = self.results[value, microbatch]
        return here.place(name, torch.zeros(like.shape, dtype=like.dtype))

    def _hand(self, here: StageFragments, there: StageFragments, name: str, value: MeshTensor, microbatch: int) -> None:
        layout = there.layouts[name]
        if there.stage.mesh != here.stage.mesh:
            value = transfer(value, there.mesh, layout)
        else:
            value = value.redistribute(layout)
        self._mailbox.put((name, here.stage.index, there.stage.index, microbatch), value)

    def _count(self) -> None:
        """What is held for backwards now, against the most there was."""
        tiles = {t.data_ptr(): t.nbytes for v in self._held.values() for x in v.values() for t in x.tiles()}
        self.peak_bytes = max(self.peak_bytes, sum(tiles.values()))
        self.peak_microbatches = max(self.peak_microbatches, len(self._held))


_ACTIONS: dict[str, Callable[[Row, StageFragments, Action], None]] = {
    "F": Row.forward,
    "B": Row.backward,
    "I": Row.backward,
    "W": Row.backward,
}


def _needed(here: StageFragments, kinds: str) -> set[str]:
    """What fragments of these kinds take."""
    return {name for kind in kinds if kind in here.fragments for name in here.fragments[kind].takes}


def _gives(there: StageFragments, name: str) -> bool:
    return any(name in fragment.gives for fragment in there.fragments.values())


def run_rows(schedule: Schedule, rows: Sequence[Row], names: Sequence[str], mailbox: Mailbox) -> None:
    """Run every row in a thread of its own. What fails on one mesh ends all, and is raised here."""
    failures: list[tuple[str, Action, BaseException]] = []
    inference = torch.is_inference_mode_enabled()

    def work(mesh: int) -> None:
        with torch.inference_mode(inference):
            for action in schedule.rows[mesh]:
                try:
                    rows[mesh].run(action)
                except Stopped:
                    return
                except BaseException as error:
                    failures.append((names[mesh], action, error))
                    mailbox.fail()
                    return

    threads = [threading.Thread(target=work, args=(mesh,), name=f"mesh {name}") for mesh, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        _fail(*failures[0])


def _fail(mesh: str, action: Action, error: BaseException) -> NoReturn:
    if not isinstance(error, Exception):
        raise error
    what = str(error) if isinstance(error, MeshTensorError) else f"{type(error).__name__}: {error}"
    try:
        refuse(what, where=f"{action} ({action.name} of stage {action.stage}) on mesh {mesh!r}")
    except MeshTensorError as told:
        raise told from error
