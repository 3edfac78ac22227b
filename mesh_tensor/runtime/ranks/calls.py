"""Calls: what ranks do together on a mesh is numbered, so that everything that one sends says what it belongs to.

A call takes a number, whatever becomes of it: ranks that refuse the same call go on with the next one and still mean
the same. Only calls that exchange nothing have none, as ranks may make these by themselves. What a call sends carries a
tag made of its number, of a digest of what it runs, and of the thread that makes it: messages of different calls never
meet. A rank that waits for a message that doesn't come finds out what the others are doing, and raises.

Once one has waited in vain, nothing that is under way can be trusted to arrive: the mesh is ended on all ranks, and
every later call says why, until all of them resume.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch

from mesh_tensor.base.errors import refuse

from .lane import AGREEMENT, Board, Lane, Wire

_REPORT_AFTER = 0.3  # seconds of waiting until a rank says what it is doing
_PAUSE = 0.01


class Clock(Protocol):
    """The time, in seconds."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Calls:
    """The calls of rank `rank` of a mesh, thread by thread. `places`: by which numbers the user knows the ranks;
    `where` is the mesh in words."""

    def __init__(self, rank: int, places: Sequence[int], where: str, clock: Clock = time) -> None:
        self.rank, self.places, self.where, self.clock = rank, places, where, clock
        self.count = len(places)
        self.generation, self.ended, self.is_forked = 0, "", False
        self.wire: Wire | None = None
        self.name, self.timeout = "", timedelta()
        self._board: Board | None = None
        self._connect: Callable[[int], Wire] | None = None
        self._lanes: dict[str, Lane] = {}
        self._names: set[str] = set()  # of all threads that ever called
        self._here, self.lock = threading.local(), threading.RLock()

    # --- threads

    def lane(self) -> Lane:
        """The calls of this thread."""
        try:
            lane: Lane = self._here.lane
            if not lane.ended:
                return lane
        except AttributeError:
            pass
        return self._new_lane()

    def _new_lane(self) -> Lane:
        name = threading.current_thread().name
        with self.lock:
            if name in self._names:
                refuse(
                    f"two threads named {name!r} call on one mesh",
                    where=self.where,
                    why="calls of threads of the same name on all ranks belong together",
                    fix="give every thread a name of its own, the same on all ranks: threading.Thread(name=...)",
                )
            self._names.add(name)
            self._lanes = {name: lane for name, lane in self._lanes.items() if lane.owner.is_alive()}
            self._here.lane = self._lanes[name] = Lane(self, name)
            return self._here.lane

    # --- life

    @property
    def connected(self) -> bool:
        """Whether the ranks have met."""
        return self._connect is not None

    def begin(self, name: str, board: Board, connect: Callable[[int], Wire], timeout: timedelta) -> None:
        """The ranks have met, and call that `name`: `connect` makes connections for a generation. All ranks have to
        begin at the same time."""
        self.name, self._board, self.timeout = name, board, timeout
        self.wire = connect(self.generation) if self.count > 1 else None
        self._connect = connect

    def check(self) -> None:
        """Raise a MeshTensorError if the mesh was ended, or is another process's."""
        if self.is_forked:
            refuse_forked(self.where)
        if self.ended:
            refuse(
                f"nothing can run on these ranks since a call failed: {self.ended}",
                where=self.where,
                why="what the ranks sent each other since then may never arrive",
                fix=self.way_out(),
            )

    def way_out(self) -> str:
        """What helps where a call has failed."""
        return RESUME if self.connected else START_AGAIN

    def end(self, why: str) -> None:
        """Nothing can run on the mesh any more. Who waits is woken, here and elsewhere."""
        with self.lock:
            if self.ended:
                return
            self.ended = why
            if not self.connected:
                return
            self.say(f"{self.generation}/ended", why)
            if self.wire is not None:
                self.wire.cut()

    def why_ended(self) -> str | None:
        """Why the mesh was ended, here or elsewhere."""
        return self.ended or self.read(f"{self.generation}/ended")

    def resume(self) -> None:
        """Begin again, with the next generation: all ranks have to. What is under way is dropped."""
        if self.is_forked:
            refuse_forked(self.where)
        if not self.connected:
            return
        with self.lock:
            if self.wire is not None:
                self.wire.cut()
            following = self.generation + 1
            self._await_all(f"resume/{following}")
            assert self._connect is not None
            try:
                self.wire = self._connect(following) if self.count > 1 else None
            except RuntimeError as error:
                self._not_resumed([], str(error))
            for lane in self._lanes.values():
                lane.ended = True
            self._lanes, self.generation, self.ended = {}, following, ""
            self._names.clear()
        with self.lane() as lane:  # nobody goes on, and perhaps ends, while others are still connecting
            lane.run(AGREEMENT)
            self.gather(b" ")

    def let_go(self) -> None:
        """Forget the connections, for good."""
        for lane in self._lanes.values():
            lane.ended = True
        self.wire = self._board = self._connect = None

    def _await_all(self, key: str) -> None:
        self.say(f"{key}/{self.rank}", "here")
        end = self.clock.monotonic() + self.timeout.total_seconds()
        missing = list(range(self.count))
        while missing:
            missing = [rank for rank in missing if self.read(f"{key}/{rank}") != "here"]
            if missing and self.clock.monotonic() > end:
                self.say(f"{key}/{self.rank}", "gone")
                self._not_resumed(missing, f"waited {self.timeout.total_seconds():g} seconds")
            if missing:
                self.clock.sleep(_PAUSE)

    def _not_resumed(self, missing: list[int], why: str) -> None:
        self.ended = self.ended or "not all ranks resumed"
        who = ", ".join(str(self.places[rank]) for rank in missing) or "unknown"
        refuse(
            f"the ranks can't resume: mt.resume was not called on rank{'s' if len(missing) > 1 else ''} {who}",
            where=f"{self.where}; seen on rank {self.places[self.rank]}",
            why=why,
            fix="call mt.resume(mesh) on all ranks; where one has ended, start all of them again",
        )

    # --- words

    def say(self, key: str, words: str) -> None:
        """Let the others know."""
        if self._board is not None:
            self._board.say(key, words)

    def read(self, key: str) -> str | None:
        """What the others said."""
        try:
            return None if self._board is None else self._board.read(key)
        except (RuntimeError, ValueError):
            return None

    def key(self, lane: Lane, who: int | str) -> str:
        """Where a rank says what became of a call."""
        return f"{self.generation}/{lane.name}/{lane.number}/{who}"

    def tell(self, lane: Lane, words: dict[str, Any]) -> None:
        """Let the others know what became of this rank's call."""
        lane.said = True
        self.say(self.key(lane, self.rank), json.dumps(words))
        if "raised" in words:
            self.say(self.key(lane, "raised"), "")

    def heard(self, lane: Lane, member: int) -> dict[str, Any] | None:
        """What another rank told of the call of this one."""
        words = self.read(self.key(lane, member)) or self.read(self.key(lane, f"{lane.kernel}/{member}"))
        return None if words is None else json.loads(words)

    def failed(self, lane: Lane, error: BaseException) -> None:
        """A call ends with an error."""
        lane.waiting = False
        if not self.connected:
            return
        words = {"raised": f"{type(error).__name__}: {str(error).strip()}", "doing": lane.doing}
        if lane.alone and not lane.counted:
            key = f"{self.generation}/{lane.name}/{lane.number + 1}/{lane.kernel}"
            self.say(f"{key}/{self.rank}", json.dumps(words))
            self.say(f"{key}/raised", "")
        elif not lane.said:
            lane.count()
            self.tell(lane, words)
        if lane.opened:  # the others would wait for what was under way
            self.end(f"rank {self.places[self.rank]} raised {indented(words['raised'], lane.doing)}")
        lane.opened = 0

    # --- messages

    def gather(self, words: bytes) -> list[bytes]:
        """What each rank says, in order of rank; all say as much. Part of a call."""
        sent = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        return [got.numpy().tobytes() for got in self.gather_tensors(sent)]

    def gather_tensors(self, sent: torch.Tensor) -> list[torch.Tensor]:
        """What each rank sends, in order of rank; contiguous, in CPU memory, and as large on all ranks."""
        if self.wire is None or not sent.numel():
            return [sent] * self.count
        lane = self.lane()
        tag, wire = lane.tag(), self.wire
        others = [(self.rank + step) % self.count for step in range(1, self.count)]
        got = {self.rank: sent, **{other: torch.empty_like(sent) for other in others}}
        lane.opened += 1
        works = [wire.send(sent, other, tag) for other in others]
        works += [wire.receive(got[other], other, tag) for other in others]
        lane.wait(works)
        return [got[rank] for rank in range(self.count)]

    def meet(self) -> None:
        """Return when all ranks are in this call, in which they go on to exchange what says nothing of itself."""
        lane = self.lane()
        if not lane.met:
            self.gather(b" ")
            lane.met = True

    # --- watching

    def watch(self, now: float) -> None:
        """End the mesh if a thread waits for what never comes. Called again and again, by another thread."""
        for lane in list(self._lanes.values()):
            mark = (lane.number, lane.waits)
            if not lane.waiting or lane.mark != mark:
                lane.mark, lane.since = mark, now
            elif not self.ended and self._in_vain(lane, now - lane.since >= _REPORT_AFTER):
                self._wake(lane)

    def _wake(self, lane: Lane) -> None:
        if self.lock.acquire(blocking=False):  # whoever has it ends what is under way, too
            try:
                if lane.waiting and self.wire is not None:
                    self.wire.cut()
            finally:
                self.lock.release()

    def _in_vain(self, lane: Lane, report: bool) -> bool:
        ends = (self.key(lane, "raised"), self.key(lane, f"{lane.kernel}/raised"), f"{self.generation}/ended")
        if any(self.read(key) is not None for key in ends):
            return True
        if not report:
            return False
        key = f"{self.generation}/waits/{lane.name}"
        self.say(f"{key}/{self.rank}", lane.report())
        mine = {number: tuple(run) for number, *run in list(lane.history)}
        for other in range(self.count):
            words = self.read(f"{key}/{other}") if other != self.rank else None
            if words is not None and any(
                number in mine and not begin_alike(mine[number], run) for number, *run in json.loads(words)
            ):
                return True
        return False


def refuse_forked(where: str) -> NoReturn:
    """Refuse a call of a process that was forked from a rank, and has its connections."""
    refuse(
        "this process was forked from one that is a rank",
        where=where,
        why="both have the same connections, and one would take what the other is sent",
        fix="call on the ranks from the process that initialized the process group; start others with "
        "multiprocessing.get_context('spawn')",
    )


def begin_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two runs of a call may be the same, as far as they have come."""
    return all(a == b for a, b in zip(one, other, strict=False))


def indented(raised: str, doing: str) -> str:
    """What a rank raised, its whole text, as part of another's."""
    first, *lines = raised.splitlines()
    return "\n".join([f"{first} (in {doing})", *(f"    {line}" for line in lines)])


RESUME = (
    "call mt.resume(mesh) on all ranks, then go on; where a rank has ended, start all of them again. Values that were "
    "updated in place may be half done"
)
START_AGAIN = (
    "the ranks have not met yet, so there is nothing to resume, and the process group they use to meet may be broken: "
    "call torch.distributed.destroy_process_group() and init_process_group() on all ranks, or start all of them again"
)
