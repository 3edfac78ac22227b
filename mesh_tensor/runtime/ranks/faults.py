"""Faults: when a rank's step goes wrong, who is to blame, in words that every rank can raise.

A rank that fails says so where all can read it; one whose collective fails looks there for the others' words. Who says
nothing has ended, hangs, or is somewhere else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

from mesh_tensor.base.errors import refuse
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import Step

from .calls import Calls, begin_alike, indented
from .lane import Lane
from .ranks import Ranks

_SILENT = "has ended, hangs, or is not in this collective"
_TOO = "failed, too"
_VAIN = "all ranks have to make the same calls: this one waited for what never comes"
_GRACE = 3.0  # seconds to wait for the others' words
_PAUSE = 0.02


class Faults:
    """Who failed in the calls of one kernel on one mesh."""

    def __init__(self, ranks: Ranks, kernel: str) -> None:
        self._ranks, self._kernel = ranks, kernel

    def explain(self, error: Exception, program: Program, step: Step) -> NoReturn:
        """What went wrong in a step, raised: a collective's error as a MeshTensorError that names the ranks to blame,
        any other as it is."""
        number = next((i for i, s in enumerate(program.steps, 1) if s is step), 0)
        doing = f"step {number} of {len(program.steps)}, {step.words}"
        if step.collective is not None and isinstance(error, RuntimeError):
            self.blame(error, doing, program.mesh.group_of(self._ranks.rank, step.collective.axes))
        self._ranks.calls.lane().doing = doing
        raise error

    def blame(self, error: Exception, doing: str, members: Sequence[int]) -> NoReturn:
        """A collective of `members` failed: find out whose fault it is, end the mesh on all ranks, and raise."""
        calls = self._ranks.calls
        lane = calls.lane()
        calls.tell(lane, {"waits": True, "doing": doing, "kernel": self._kernel, "run": lane.history[-1]})
        verdict = _verdict(calls, lane, [member for member in members if member != self._ranks.rank], doing)
        calls.end("; ".join(verdict))
        refuse(
            verdict,
            where=f"{doing}, of kernel {self._kernel!r} on {self._ranks.mesh}; seen on rank {calls.places[calls.rank]}",
            why=_reason(error) if any(silent in words for words in verdict for silent in (_SILENT, _TOO)) else _VAIN,
            fix=calls.way_out(),
        )


def _verdict(calls: Calls, lane: Lane, others: Sequence[int], doing: str) -> list[str]:
    """Who is to blame, as far as the others say."""
    heard = _listen(calls, lane, others)
    named = {member: f"rank {calls.places[member]}" for member in range(calls.count)}
    raised = {member: said for member, said in heard.items() if "raised" in said}
    if raised:
        return [f"{named[m]} raised {indented(said['raised'], said['doing'])}" for m, said in raised.items()]
    in_other_calls = {m: said for m, said in heard.items() if not begin_alike(lane.history[-1], said["run"])}
    silent = [member for member in others if member not in heard]
    if in_other_calls:
        return [_elsewhere(named[m], said) for m, said in in_other_calls.items()]
    if silent and (why := calls.why_ended()):
        return [why]
    if silent:
        return [f"{named[m]} {_SILENT}" for m in silent]
    mine = doing, lane.history[-1]
    elsewhere = {m: said for m, said in heard.items() if (said["doing"], said["run"]) != mine}
    if elsewhere:
        return [_elsewhere(named[m], said) for m, said in elsewhere.items()]
    return [f"{named[m]} {_TOO}" for m in heard]


def _elsewhere(who: str, said: dict[str, Any]) -> str:
    return f"{who} waited in vain somewhere else, in {said['doing']}, of kernel {said['kernel']!r}"


def _listen(calls: Calls, lane: Lane, others: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What the others say of this call: until one says that it raised, or all said something, or the mesh was ended, or
    time is up."""
    end = calls.clock.monotonic() + _GRACE * calls.connected  # who has not met can't say anything
    heard: dict[int, dict[str, Any]] = {}
    while True:
        for member in range(calls.count):
            said = None if member in heard or member == calls.rank else calls.heard(lane, member)
            if said is not None and (member in others or "raised" in said):
                heard[member] = said
        done = any("raised" in said for said in heard.values()) or all(member in heard for member in others)
        if done or calls.why_ended() or calls.clock.monotonic() > end:
            return heard
        calls.clock.sleep(_PAUSE)


def _reason(error: BaseException) -> str:
    """What an error says, on one line, without where in gloo's source that was and gloo's advice."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line).split(" This is typically caused by", 1)[0]
