"""A schedule runs on ranks: every rank goes through its mesh's row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mesh_tensor.base.errors import MeshTensorError, refuse, words_of
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.schedule import Action, Schedule
from mesh_tensor.pipelining.stages import Stage
from mesh_tensor.runtime.ambient import Computing
from mesh_tensor.runtime.ranks.alike import told
from mesh_tensor.runtime.ranks.faults import Faults, agree, digest_of, heard_by_all, settle
from mesh_tensor.runtime.ranks.lane import Lane
from mesh_tensor.runtime.ranks.transfers import NeverCame, RankTopology, never_came

from .carriers import Key, RankCarrier
from .rows import Row, fail

_AS_BEFORE = "nothing was changed; mend what raised, and call again on all ranks"


class RankRuns:
    """The calls of a pipeline on ranks. Every rank has to make the same ones."""

    def __init__(self, ranks: RankTopology, name: str) -> None:
        self.ranks, self._faults = ranks, Faults(ranks.world, f"pipeline of {name}")
        self._name, self._agreed, self._generation = name, set[int](), 0

    def call(
        self,
        prepare: Callable[[], tuple[Mapping[str, str], Any]],
        run: Callable[[Any], Any],
        whole: Callable[[Any], Mapping[str, Any]] = lambda prepared: {},
    ) -> Any:
        """`run(what prepare gives)` as one call: what has to be alike on all ranks, which `prepare` gives, too, is
        compared once, and a rank that refuses or raises is heard by all. `whole`: what of it ranks were given whole: it
        has to be the same on all of them each time."""
        calls = self.ranks.world.calls
        with calls.lane() as lane:
            try:
                return self._call(lane, prepare, run, whole)
            except BaseException as error:
                if lane.opened or calls.ended:  # others of this rank's mesh may wait for it there
                    self.ranks.end(error, lane.doing)
                raise

    def _call(
        self,
        lane: Lane,
        prepare: Callable[[], tuple[Mapping[str, str], Any]],
        run: Callable[[Any], Any],
        whole: Callable[[Any], Mapping[str, Any]],
    ) -> Any:
        world = self.ranks.world
        with self.as_call():
            facts, prepared = prepare()
        facts = {"kernel": f"pipeline of {self._name}", **facts}
        digest = digest_of(facts)
        if digest not in self._agreed:
            agree(world, self._faults, facts)
            self._agreed.add(digest)
        lane.run(digest, told(whole(prepared)))
        lane.opened += 1  # others wait for what comes in this call
        made = run(prepared)
        lane.opened -= 1
        return made

    @contextmanager
    def as_call(self) -> Iterator[None]:
        """What is raised within, before anything is sent, counts as a call: the other ranks make one, and hear of it
        there."""
        calls = self.ranks.world.calls
        with calls.lane():
            if self._generation != calls.generation:  # of a call that failed, not all may know what was agreed on
                self._agreed, self._generation = set(), calls.generation
            try:
                yield
            except Exception as error:
                if self._agreed:
                    self.ranks.tell(error)
                else:
                    agree(self.ranks.world, self._faults, {}, refusal=words_of(error))
                raise

    def row(self, schedule: Schedule, row: Row) -> None:
        """Run this rank's actions, in order."""
        lane, names = self.ranks.world.calls.lane(), self.ranks.topology.names
        row_of_mesh = schedule.rows[names.index(self.ranks.name)]
        with Computing():
            self._actions(lane, row_of_mesh, row)

    def _actions(self, lane: Lane, row_of_mesh: Sequence[Action], row: Row) -> None:
        for number, action in enumerate(row_of_mesh, 1):
            lane.doing = self._doing(action)
            try:
                for following in row_of_mesh[number : number + 1]:
                    row.expect(following)
                row.run(action)
                if number == len(row_of_mesh):
                    row.finish()
            except Exception as error:
                self.ranks.end(error, lane.doing)
                if never_came(error):
                    self.blame(error, lane.doing)
                fail(self.ranks.name, action, error)

    def _doing(self, action: Action) -> str:
        return f"{action}, {action.name} of stage {action.stage} on mesh {self.ranks.name!r}"

    def finish(self, schedule: Schedule, carrier: RankCarrier) -> None:
        """Wait until others have what this rank sent."""
        try:
            carrier.finish()
        except NeverCame as error:
            last = schedule.rows[self.ranks.topology.names.index(self.ranks.name)][-1]
            self.blame(error, f"the end of the run, after {self._doing(last)}, where others take what this rank sent")

    def settle(self, bad: Sequence[str], error: Exception | None, where: str) -> list[str]:
        """What is bad on any rank, if none raised an error in a part of a call in which nothing was exchanged; else all
        raise, and go on as they were."""
        words = (
            json.dumps({"raised": words_of(error) if error else "", "bad": list(bad)})
            if bad or error is not None
            else ""
        )
        said = {rank: json.loads(text) for rank, text in settle(self.ranks.world, self._faults, words).items()}
        raised = [f"rank {rank} raised {found['raised']}" for rank, found in said.items() if found["raised"]]
        if said:
            heard_by_all(self.ranks.world)
        if raised:
            try:
                refuse(raised, where=where, why="all ranks have to make the same calls", fix=_AS_BEFORE)
            except MeshTensorError as told:
                raise told from error
        return list(dict.fromkeys(name for found in said.values() for name in found["bad"]))

    def heard(self, words: str) -> list[str]:
        """What the ranks say, as far as they do, in their order. Part of a call that all ranks make."""
        return list(settle(self.ranks.world, self._faults, words).values())

    def blame(self, error: Exception, doing: str) -> None:
        """Find out why something never came, and raise it."""
        self._faults.blame(error, doing, range(self.ranks.topology.num_devices))

    def share(
        self,
        values: Mapping[Any, Any],
        owners: Mapping[Any, Stage],
        like: Mapping[Any, Any],
        start: int,
        together: int = 0,
    ) -> dict:
        """Whole tensors that stages have, on all ranks: by name and microbatch, or stage. `like` is shape and dtype;
        messages from `start`; tensors of at most `together` bytes go with others of their stage."""
        made: dict[Any, torch.Tensor] = {}
        for number, keys in enumerate(_messages(owners, like, together), start):
            (first, *_), owner, dtype = keys, owners[keys[0]], like[keys[0]][1]
            sizes = [math.prod(like[key][0]) for key in keys]
            there = [values[key] for key in keys if key in values]
            joint = torch.cat([value.reshape(-1) for value in there]) if len(there) > 1 else next(iter(there), None)
            blank = torch.empty(sum(sizes) if len(keys) > 1 else like[first][0], dtype=dtype, device="meta")
            try:
                found = self.ranks.share(joint, owner.mesh, number, blank)
            except NeverCame as error:
                self.blame(error, f"sharing {first[0]!r} of stage {owner.index} on mesh {owner.mesh!r}")
            parts = [found] if len(keys) == 1 else [part.clone() for part in found.split(sizes)]
            made |= {key: part.view(like[key][0]) for key, part in zip(keys, there or parts, strict=True)}
        return made


def _messages(owners: Mapping[Any, Stage], like: Mapping[Any, Any], most: int) -> list[list[Any]]:
    """The values by message: those of a stage and a dtype that have at most so many bytes go in one."""
    messages: dict[Any, list[Any]] = {}
    for key, owner in owners.items():
        shape, dtype = like[key]
        is_small = math.prod(shape) * dtype.itemsize <= most
        messages.setdefault((owner.index, dtype) if is_small else key, []).append(key)
    return list(messages.values())


def message_numbers(stages: Sequence[Stage], microbatches: int) -> dict[Key, int]:
    """A number for everything that goes from stage to stage in a call."""
    forward = [(name, source, stage.index) for stage in stages for name, source in stage.takes.items()]
    edges = [*forward, *((gradient_name(name), target, source) for name, source, target in forward)]
    return {(*edge, i): n * microbatches + i for n, edge in enumerate(edges) for i in range(microbatches)}
