"""OnRanks: on which ranks the calls of a module run, and what these hear of one that can't take part. Turns: calls that
go on from the state that the one before left, one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

from mesh_tensor.base.errors import MeshTensorError, refuse, words_of
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.runtime.ranks import is_dtensor, ranks_of
from mesh_tensor.runtime.ranks.faults import Faults, agree
from mesh_tensor.runtime.ranks.lane import Lane
from mesh_tensor.targets.kernels import Target

from .rank_ports import MESH_FIX

T = TypeVar("T")


class OnRanks:
    """What is called on all ranks of a mesh, or on a virtual mesh."""

    mesh: Mesh
    _function: str
    _device_mesh: Any
    _target: Target

    @property
    def is_on_ranks(self) -> bool:
        """Whether all calls run on the ranks of one DeviceMesh; else only those with DTensors run on ranks."""
        return self._device_mesh is not None

    def _has_run(self, lane: Lane) -> bool:
        """Whether the calls of this thread have run something: ranks need not agree on that again."""
        raise NotImplementedError

    def on_all_ranks(
        self,
        what: str,
        work: Callable[[int], T],
        given: Iterable[Any] = (),
        facts: Callable[[T], Mapping[str, str]] = lambda made: {},
    ) -> T:
        """What `work` gives on this rank of the mesh (0 on a virtual mesh), if no rank refuses; all ranks have to ask
        for the same, and to have the same `facts` of what it gives."""
        device_mesh = self._device_mesh or device_mesh_of(given)
        if device_mesh is None:
            return work(0)
        ranks = ranks_of(self.mesh, device_mesh, self._target.device_type)
        faults = Faults(ranks, self._function)
        with ranks.calls.lane():
            try:
                found = [words for tensor in given if is_dtensor(tensor) and (words := ranks.elsewhere(tensor))]
                if found:
                    refuse(f"a DTensor {found[0]}", where=what, fix=MESH_FIX)
                made = work(ranks.rank)
            except MeshTensorError as error:
                agree(ranks, faults, {}, refusal=str(error))
                raise
            agree(ranks, faults, {"kernel": f"{self._function}: {what}", **facts(made)})
            return made

    @contextmanager
    def as_call(self, given: Iterable[Any] = ()) -> Iterator[None]:
        """What is raised within, before anything is sent, counts as a call of the module: the other ranks make one, and
        hear of it there. On a virtual mesh nobody has to."""
        device_mesh = self._device_mesh or device_mesh_of(given)
        if device_mesh is None:
            yield
            return
        ranks = ranks_of(self.mesh, device_mesh, self._target.device_type)
        with ranks.calls.lane() as lane:
            try:
                yield
            except Exception as error:
                if not (lane.counted or self._has_run(lane)):  # the others are about to agree
                    agree(ranks, Faults(ranks, self._function), {}, refusal=words_of(error))
                raise

    def refuse_call(self, error: Exception, given: Iterable[Any] = ()) -> NoReturn:
        """Raise `error` instead of a call."""
        with self.as_call(given):
            raise error


def device_mesh_of(tensors: Iterable[Any]) -> Any:
    """The DeviceMesh of the DTensors among the tensors, if there are any."""
    return next((tensor.device_mesh for tensor in tensors if is_dtensor(tensor)), None)


class Turns:
    """Who goes on from a state: a thread, whose call may make others of the same state. `as_call`: within what it gives
    for a call's tensors, a refusal counts as a call, of which other ranks hear."""

    def __init__(self, as_call: Callable[[Iterable[Any]], AbstractContextManager[None]]) -> None:
        self._as_call, self._lock, self._within = as_call, threading.RLock(), ""

    @contextmanager
    def one(self, what: str, given: Iterable[Any] = (), *, of_several: bool = False) -> Iterator[None]:
        """Within, no other thread has a turn, nor this one another: code of a caller's that runs on the way, or as
        Python collects garbage, might take it. `of_several`: what is made of calls that take turns themselves. It does
        not wait for one: on ranks, threads of several orders would wait for each other. Refused where another thread
        has one, or this thread's is closed."""
        with self._as_call(given):
            self._take(what)
        try:
            with nullcontext() if of_several else self.closed(what):
                yield
        finally:
            self._lock.release()

    def _take(self, what: str) -> None:
        if not self._lock.acquire(blocking=False):
            refuse(
                f"{what}, while another thread's is under way",
                why="each goes on from the state that the one before left: one of them would be lost",
                fix="make these calls from one thread, or give every thread a module of its own",
            )
        if self._within:
            self._lock.release()
            refuse(
                f"{what}, from within {self._within}",
                why="that goes on from the state that this call would leave",
                fix="use a module of its own there: distribute it once more",
            )

    @contextmanager
    def closed(self, within: str) -> Iterator[None]:
        """Within, this thread, which has a turn, gets no other one: it runs what a caller gave."""
        before, self._within = self._within, within
        try:
            yield
        finally:
            self._within = before
