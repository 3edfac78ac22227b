"""A schedule runs on a virtual topology: a thread per mesh goes through its row, and values go from row to row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch

from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.pipeline.schedule import Action, Schedule
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.runtime.virtual.transfer import transfer

from .pipeline_stages import StageFragments, Values

Key = tuple[str, int, int]  # a value, the stage that takes it, the microbatch


class Stopped(Exception):
    """Another mesh failed: what is awaited won't come."""


class Mailbox:
    """What stages hand to each other. Taking waits until it is there, or until a mesh has failed."""

    def __init__(self) -> None:
        self._there: dict[Key, list[MeshTensor]] = {}
        self._changed = threading.Condition()
        self._failed = False

    def put(self, key: Key, value: MeshTensor) -> None:
        """Hand over a value."""
        with self._changed:
            self._there.setdefault(key, []).append(value)
            self._changed.notify_all()

    def take(self, key: Key) -> MeshTensor:
        """Wait for a value; it is gone then."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or key in self._there)
            if self._failed:
                raise Stopped
            values = self._there[key]
            value = values.pop(0)
            if not values:
                del self._there[key]
            return value

    def fail(self) -> None:
        """Wake up all who wait."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class Row:
    """One mesh's part of a run: its actions in order, with the values that its stages hold."""

    def __init__(
        self,
        stages: Callable[[int], Sequence[StageFragments]],
        mailbox: Mailbox,
        weights: Mapping[int, Values],
        inputs: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        self._stages, self._mailbox, self._weights, self._inputs = stages, mailbox, weights, inputs
        self._held: dict[tuple[int, int], Values] = {}
        self.results: dict[tuple[str, int], MeshTensor] = {}
        self.peak_bytes = 0
        self.peak_microbatches = 0

    def run(self, action: Action) -> None:
        """Run one action: take what it needs, compute, hand on what others need."""
        stages = self._stages(action.microbatch)
        _ACTIONS[action.kind](self, stages, stages[action.stage], action.microbatch)

    def forward(self, stages: Sequence[StageFragments], here: StageFragments, microbatch: int) -> None:
        """F: inputs are laid out, values of earlier stages taken, results handed on."""
        stage, fragment = here.stage, here.fragments["F"]
        values = dict(self._weights[stage.index])
        given = self._inputs[microbatch]
        values |= {name: here.place(name, given[name]) for name in stage.params if name in given}
        values |= {name: self._mailbox.take((name, stage.index, microbatch)) for name in stage.takes}
        made = fragment(values)
        for name, value in made.items():
            if name in stage.results:
                self.results[name, microbatch] = value
            for target in stages:
                if target.stage.takes.get(name) == stage.index:
                    self._hand(here, target, name, value, microbatch)

    def _hand(self, here: StageFragments, there: StageFragments, name: str, value: MeshTensor, microbatch: int) -> None:
        if there.stage.mesh != here.stage.mesh:
            value = transfer(value, there.mesh, there.layouts[name])
        self._mailbox.put((name, there.stage.index, microbatch), value)


_ACTIONS: dict[str, Callable[[Row, Sequence[StageFragments], StageFragments, int], None]] = {"F": Row.forward}


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
