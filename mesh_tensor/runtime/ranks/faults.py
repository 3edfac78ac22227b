"""Faults: when a rank's step goes wrong, who is to blame, in words that every rank can raise.

A rank that fails says so where all can read it; one whose collective fails looks there for the others' words. Who says
nothing has ended, hangs, or is somewhere else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.version import __version__
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import Step
from mesh_tensor.targets.cpu import attention, gelu, rms_norm

from .calls import Calls, begin_alike, indented
from .lane import AGREEMENT, Lane
from .ranks import Ranks

_SILENT = "has ended, hangs, or is not in this collective"
_TOO = "failed, too"
_VAIN = "all ranks have to make the same calls: this one waited for what never comes"
VALUES = "values of"  # how a fact begins that tells of what ranks are given whole, to be kept
_SAME_STEPS = "compile the same kernel on every rank, and pass tensors of the same global shapes and dtypes"
_SAME_VALUES = (
    "give all ranks the same whole tensors: torch.manual_seed(...) before the model is made, or the state_dict of one "
    "rank's"
)
_OTHER = "was given other values for"
_ALIKE = (
    "pass the same numbers and whole tensors on every rank (torch.distributed.broadcast sends one rank's), or DTensors "
    "of what each rank has of its own"
)
_GRACE = 3.0  # seconds to wait for the others' words
_PAUSE = 0.02
_COMPILED = {
    "gelu": ("gelu_tanh", gelu.how),
    "attention": ("nn.attention", attention.how),
    "norms": ("nn.rms_norm", rms_norm.how),
}  # by torch where they aren't
_MOST = 8  # differences that a message tells of


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
        calls.tell(
            lane, {"waits": True, "doing": doing, "kernel": self._kernel, "run": lane.history[-1], "given": lane.given}
        )
        verdict = _verdict(calls, lane, [member for member in members if member != self._ranks.rank], doing)
        differs = any(_OTHER in words for words in verdict)
        calls.end("; ".join(verdict))
        refuse(
            verdict,
            where=f"{doing}, of kernel {self._kernel!r} on {self._ranks.mesh}; seen on rank {calls.places[calls.rank]}",
            why=_reason(error) if any(silent in words for words in verdict for silent in (_SILENT, _TOO)) else _VAIN,
            fix=f"{_ALIKE}; {calls.way_out()}" if differs else calls.way_out(),
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
        return [
            word
            for m, said in in_other_calls.items()
            for word in _given_otherwise(named[m], lane.given, said) or [_elsewhere(named[m], said)]
        ]
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


def _given_otherwise(who: str, mine: Mapping[str, str], said: dict[str, Any]) -> list[str]:
    """What another rank was given for what this one was given otherwise."""
    theirs = said.get("given", {})
    found = [
        f"{name!r} ({theirs[name]}, here {words})" for name, words in mine.items() if theirs.get(name, words) != words
    ]
    return [f"{who} {_OTHER} {', '.join(found)}"] if found else []


def _listen(calls: Calls, lane: Lane, others: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What the others say of this call: until one says that it raised, or all said something, or the mesh was ended, or
    time is up."""
    end = calls.clock.monotonic() + _GRACE * calls.connected  # who has not met can't say anything
    heard: dict[int, dict[str, Any]] = {}
    while True:
        ended = calls.why_ended()  # who ends it has said something before
        for member in range(calls.count):
            said = None if member in heard or member == calls.rank else calls.heard(lane, member)
            if said is not None and (member in others or "raised" in said):
                heard[member] = said
        done = any("raised" in said for said in heard.values()) or all(member in heard for member in others)
        if done or ended or calls.clock.monotonic() > end:
            return heard
        calls.clock.sleep(_PAUSE)


def _reason(error: BaseException) -> str:
    """What an error says, on one line, without where in gloo's source that was and gloo's advice."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line).split(" This is typically caused by", 1)[0]


_SUMMARY = struct.Struct(">32sQ")  # of what a rank has to say: its digest, and its length


def program_facts(program: Program, target: str, overlap: str | int) -> dict[str, str]:
    """All of a program that has to be the same on every rank, by topic, as text."""
    values = program.values.values()
    steps = [f"{step.words}: {step.uses}, {step.writes}" for part in program.parts for step in part.steps]
    ops = [str(step.call.expr) for part in program.parts for step in part.ops]
    kernels = [_text(step.func) for part in program.parts for step in part.kernels]
    return {
        **ways_of(ops),
        "kernel": program.name,
        "mesh": str(program.mesh),
        "shapes": ", ".join(f"{value.name} {value.shape}" for value in values),
        "dtypes": ", ".join(f"{value.name} {value.dtype}" for value in values),
        "layouts": ", ".join(f"{value.name} '{value.sharding}'" for value in values),
        "target": target,
        "overlap": str(overlap),
        "steps": f"digest {_digest(chr(10).join([*steps, *ops, *kernels]))[:12]}",
    }


def ways_of(ops: Iterable[str]) -> dict[str, str]:
    """What of a process decides how it computes these operators, as program_facts has it."""
    texts = list(ops)
    there = {topic: how for topic, (name, how) in _COMPILED.items() if any(name in text for text in texts)}
    return {"version of mesh_tensor": __version__, **{topic: how() for topic, how in there.items()}}


def agree(ranks: Ranks, faults: Faults, facts: Mapping[str, str], refusal: str = "", fix: str = "") -> None:
    """Return if all ranks have the same facts; else raise the same MeshTensorError on all of them.

    A rank that can't run the call takes part with its `refusal`: it returns, the others raise. `fix` adds to the way
    out. Ranks that talk for the first time do so over their own group, which notices at once that a rank has ended."""
    lane = ranks.calls.lane()
    lane.run(AGREEMENT)
    try:
        met = ranks.meet()
        gather = ranks.calls.gather if met else ranks.say
        if not met:
            facts = {**facts, "ranks of the mesh": str([ranks.place(rank) for rank in range(ranks.mesh.num_devices)])}
        mine = json.dumps([dict(facts), refusal]).encode()
        summary = _SUMMARY.pack(hashlib.sha256(mine).digest(), len(mine))
        summaries = [_SUMMARY.unpack(words) for words in gather(summary)]
        if met and len({digest for digest, _ in summaries}) == 1 and not refusal:
            return
        longest = max(length for _, length in summaries)
        everything = [json.loads(words) for words in gather(mine.ljust(longest))]
    except RuntimeError as error:
        faults.blame(error, f"the agreement on what to run{_asked(facts)}", range(ranks.mesh.num_devices))
    lane.said = True  # all have heard
    if refusal:
        return
    by_rank = dict(sorted((ranks.place(rank), found) for rank, found in enumerate(everything)))
    refused = [f"rank {rank} refused the call: {_facts_in(text)}" for rank, (_, text) in by_rank.items() if text]
    differences = _differences({rank: found for rank, (found, _) in by_rank.items()})
    are_values = not refused and differences and all(words.startswith(VALUES) for words in differences)
    refuse(
        refused or _shortened(differences) or "ranks call on different meshes of the same ranks",
        where=f"call of kernel {facts.get('kernel', '')!r} on {ranks.mesh}",
        why=f"all ranks of a mesh have to {'keep the same values' if are_values else 'run the same steps'}",
        fix=_SAME_VALUES if are_values else f"{_SAME_STEPS}{fix}",
    )


def anywhere(ranks: Ranks, faults: Faults, flags: Sequence[bool]) -> list[bool]:
    """Flag by flag, whether it is set on any rank. Part of a call that all ranks make."""
    try:
        found = ranks.calls.gather(bytes(flags))
    except RuntimeError as error:
        faults.blame(error, "the ranks' flags", range(ranks.mesh.num_devices))
    return [any(column) for column in zip(*found, strict=True)]


def settle(ranks: Ranks, faults: Faults, words: str) -> dict[int, str]:
    """What each rank has to say, by its number, if any has. Part of a call that all ranks make."""
    sent = words.encode()
    try:
        sizes = [int.from_bytes(said, "little") for said in ranks.calls.gather(len(sent).to_bytes(8, "little"))]
        texts = ranks.calls.gather(sent.ljust(max(sizes))) if any(sizes) else []
    except RuntimeError as error:
        faults.blame(error, "what each rank says of its part", range(ranks.mesh.num_devices))
    said = {
        ranks.place(rank): text[:size].decode() for rank, (text, size) in enumerate(zip(texts, sizes, strict=False))
    }
    return {rank: said[rank] for rank in sorted(said) if said[rank]}


def heard_by_all(ranks: Ranks) -> None:
    """All ranks are about to raise the same, and nothing is under way: they can go on with the next call."""
    lane = ranks.calls.lane()
    lane.said, lane.opened = True, 0


def digest_of(facts: Mapping[str, str]) -> int:
    """A number that tells what is sent for one run from what is sent for another."""
    return int(_digest(json.dumps(dict(facts), sort_keys=True))[:8], 16)


def _differences(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Per topic on which ranks differ: who has what."""
    found = []
    for topic in dict.fromkeys(topic for mine in facts.values() for topic in mine):
        ranks_with: dict[str, list[int]] = {}
        for rank, mine in facts.items():
            ranks_with.setdefault(mine.get(topic, "none"), []).append(rank)
        if len(ranks_with) > 1:
            sides = [f"{_named(ranks)}: {_short(text)}" for text, ranks in ranks_with.items()]
            found.append(f"{topic} differ between ranks: {'; '.join(sides)}")
    return found


def _shortened(found: list[str]) -> list[str]:
    return [*found[:_MOST], f"and {len(found) - _MOST} more"] if len(found) > _MOST else found


def _facts_in(refusal: str) -> str:
    """What was wrong, of a MeshTensorError's message, on one line."""
    lines = [line.strip() for line in refusal.splitlines()]
    end = next((i for i, line in enumerate(lines) if line.startswith(("where: ", "why: ", "fix: "))), len(lines))
    facts = lines[:end] if end < 2 else lines[1:end]
    return "; ".join(fact.removeprefix("- ") for fact in facts)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"digest {_digest(text)[:12]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _asked(facts: Mapping[str, str]) -> str:
    """What a rank is about to run, for those that are not."""
    asked = [facts[topic] for topic in ("shapes", "layouts of the arguments", "redistributions") if facts.get(topic)]
    return f" ({_short('; '.join(asked))})" if asked else ""


@functools.lru_cache(maxsize=256)
def _text(func: tirx.PrimFunc) -> str:
    return func.script(show_meta=True)
