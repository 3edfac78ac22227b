"""Faults: when a rank's step goes wrong, who is to blame, in words that every rank can raise.

A rank that fails says so in the process group's store; one whose collective fails looks there for the others' words.
Who says nothing has ended, hangs, or is somewhere else.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from ...errors import refuse
from ...program import CollectiveStep, KernelStep, OpStep, Program, Step, WaitStep
from .ranks import Ranks, default_store

_GRACE = 3.0  # seconds to wait for the others' words
_PAUSE = 0.02


class Faults:
    """Who failed in the calls of one kernel on one mesh. Calls are counted, so that old words are not taken for new;
    ranks that agree on a call take the largest of their counts, as calls may have been refused before they counted."""

    def __init__(self, ranks: Ranks, kernel: str) -> None:
        self._ranks, self._kernel = ranks, kernel
        self._number = ranks.next_number(kernel)
        self.calls = 0

    def begin(self) -> None:
        """Another call begins."""
        self.calls += 1

    def tell(self, error: BaseException, doing: str) -> None:
        """Let the other ranks know what was raised here."""
        self._say({"raised": f"{type(error).__name__}: {_reason(error)}", "doing": doing})

    def explain(self, error: Exception, program: Program, step: Step | None) -> NoReturn:
        """What went wrong in a step, told to the others and raised: a collective's error as a MeshTensorError that
        names the ranks to blame, any other as it is."""
        number = next((i for i, s in enumerate(program.steps, 1) if s is step), 0)
        doing = f"step {number} of {len(program.steps)}, {_words(step)}"
        step = step.collective if isinstance(step, WaitStep) else step
        if isinstance(step, CollectiveStep) and isinstance(error, RuntimeError):
            self.blame(error, doing, self._ranks.mesh.group_of(self._ranks.rank, step.axes))
        self.tell(error, doing)
        raise error

    def blame(self, error: Exception, doing: str, members: Sequence[int]) -> NoReturn:
        """A collective of `members` failed: find out whose fault it is, and raise."""
        self._say({"waits": True, "doing": doing})
        others = [member for member in members if member != self._ranks.rank]
        try:
            heard = self._listen(others)
        except (RuntimeError, ValueError):
            heard = None
        refuse(
            self._verdict(others, heard, doing),
            where=f"{doing}, of kernel {self._kernel!r} on {self._ranks.mesh}; seen on rank {dist.get_rank()}",
            why=_reason(error),
            fix="see what that rank says; this process group can't be used any more: end its ranks, or destroy it "
            "and make a new one",
        )

    def _verdict(self, others: Sequence[int], heard: dict[int, dict[str, Any]] | None, doing: str) -> list[str]:
        place = self._ranks.place
        if heard is None:
            return [_STORE_GONE]
        raised = {member: said for member, said in heard.items() if "raised" in said}
        if raised:
            return [f"rank {place(m)} raised {said['raised']} (in {said['doing']})" for m, said in raised.items()]
        silent = [member for member in others if member not in heard]
        if silent:
            return [f"rank {place(m)} has ended, hangs, or is not in this collective" for m in silent]
        elsewhere = {m: said for m, said in heard.items() if said["doing"] != doing}
        if elsewhere:
            return [f"rank {place(m)} waited in vain somewhere else, in {s['doing']}" for m, s in elsewhere.items()]
        return [f"rank {place(m)} failed, too" for m in heard]

    def _listen(self, others: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What the others say: until one says that it raised, or all said something, or time is up."""
        store, end = default_store(), time.monotonic() + _GRACE
        heard: dict[int, dict[str, Any]] = {}
        while True:
            for member in others:
                if member not in heard and store.check([self._key(member)]):
                    heard[member] = json.loads(store.get(self._key(member)))
            if len(heard) == len(others) or any("raised" in said for said in heard.values()) or time.monotonic() > end:
                return heard
            time.sleep(_PAUSE)

    def _say(self, words: dict[str, Any]) -> None:
        try:
            default_store().set(self._key(self._ranks.rank), json.dumps(words))
        except (RuntimeError, ValueError):
            return  # the store is gone, and with it whoever could have listened

    def _key(self, rank: int) -> str:
        return f"mesh_tensor/faults/{self._kernel}/{self._number}/{self.calls}/{self._ranks.place(rank)}"


_STORE_GONE = (
    "a rank has ended: the one that keeps the process group's store (rank 0, unless torchrun started the ranks)"
)


def _reason(error: BaseException) -> str:
    """What an error says, on one line, without where in gloo's source that was and gloo's advice."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line).split(" This is typically caused by", 1)[0]


def _words(step: Step | None) -> str:
    if isinstance(step, CollectiveStep):
        op = f", {step.op}" if step.op else ""
        return f"{step.kind}({step.src}{op}) over {', '.join(step.axes)}"
    if isinstance(step, KernelStep):
        return f"kernel {step.name}"
    if isinstance(step, OpStep):
        return f"operator {step.call.name} ({step.where})"
    if isinstance(step, WaitStep):
        return f"the end of {_words(step.collective)}"
    return "memory" if step is None else f"{type(step).__name__}({step.value})"
