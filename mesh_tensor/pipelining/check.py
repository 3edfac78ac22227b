"""Whether a schedule can run: complete, possible in its order, and within a memory limit. Nothing runs for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any

from mesh_tensor.base.errors import refuse, shown

from .schedule import Action, Schedule

_SHOWN = 8  # problems that a message lists


@dataclass(frozen=True)
class Held:
    """What a stage holds of one microbatch: from F until its backward (or I), and from I until W. Any unit.

    What I leaves is as much as F left, where nothing else is said.
    """

    forward: float = 1
    weight: float | None = None

    def change(self, kind: str) -> float:
        """What an action of this kind adds to what is held."""
        after_input = self.forward if self.weight is None else self.weight
        changes = {"F": self.forward, "B": -self.forward, "I": after_input - self.forward, "W": -after_input}
        return changes[kind]


def peaks(
    schedule: Schedule, held: Mapping[int, Held] | None = None, sums: Mapping[int, float] | None = None
) -> list[float]:
    """Per mesh the most that it holds at a time, in microbatches of its stages or `held`'s unit; 0 without B. `sums`:
    what stays of each stage from the first of its backwards on that gives gradients of its weights."""
    return [most for most, _ in _peaks(schedule, held, sums)]


def _peaks(
    schedule: Schedule, held: Mapping[int, Held] | None, sums: Mapping[int, float] | None = None
) -> list[tuple[float, int]]:
    out = []
    for row in schedule.rows:
        live, most, at, left = 0.0, 0.0, 0, dict(sums or {})
        for position, action in enumerate(row if schedule.has_backward else ()):
            live += (held[action.stage] if held is not None else Held()).change(action.kind)
            live += left.pop(action.stage, 0.0) if action.kind in "BW" else 0.0
            if live > most:
                most, at = live, position
        out.append((most, at))
    return out


def check_schedule(
    schedule: Schedule,
    *,
    meshes: int | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    takes: Takes | None = None,
    held: Mapping[int, Held] | None = None,
    limit: float | Sequence[float] | None = None,
) -> None:
    """Refuse what can't run.

    It must be complete for so many stages and microbatches (by default those that it names), every action must find
    what it needs, and no mesh may hold more than `limit` (in microbatches, or in `held`'s unit).
    """
    problems = _sizes(schedule, meshes, stages, microbatches) or list(islice(_incomplete(schedule), _SHOWN + 1))
    if problems:
        refuse(
            problems[:_SHOWN] + ["and more"] * (len(problems) > _SHOWN),
            where=f"schedule {schedule.name!r}",
            fix="every stage runs F, and B or both of I and W, once per microbatch, all on one mesh",
        )
    _check_order(schedule, Dependencies(schedule, takes))
    _check_memory(schedule, held, limit)


def _sizes(schedule: Schedule, meshes: int | None, stages: int | None, microbatches: int | None) -> list[str]:
    wanted = [("mesh(es)", schedule.num_meshes, meshes), ("stage(s)", schedule.num_stages, stages)]
    wanted.append(("microbatch(es)", schedule.num_microbatches, microbatches))
    found = [f"it has {have} {what}, not {want}" for what, have, want in wanted if want is not None and have != want]
    if not schedule.num_stages:
        found.append("it has no action")
    return found


def _incomplete(schedule: Schedule) -> Iterator[str]:
    """What is wrong, as far as it is asked for: numbers in a list of one's own may be any."""
    count = Counter(action for row in schedule.rows for action in row)
    yield from (f"{action} is there {times} times" for action, times in count.items() if times > 1)
    for mesh, row in enumerate(schedule.rows):
        away = dict.fromkeys(a.stage for a in row if schedule.mesh_of[a.stage] != mesh)
        yield from (f"stage {s} is on mesh {schedule.mesh_of[s]} and on mesh {mesh}" for s in away)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            there = "".join(kind for kind in "FBIW" if Action(kind, stage, microbatch) in count)
            if there not in (("FB", "FIW") if schedule.has_backward else ("F",)):
                yield _what_is_wrong(there, stage, microbatch, schedule.has_backward)


def _what_is_wrong(there: str, stage: int, microbatch: int, backward: bool) -> str:
    if "B" in there and len(there) > 2:
        return (
            f"{stage}B{microbatch} is there beside {', '.join(f'{stage}{k}{microbatch}' for k in there if k in 'IW')}"
        )
    missing = [kind for kind in "F" if kind not in there]
    if backward and "B" not in there:
        missing += [kind for kind in "IW" if kind not in there] if set(there) & set("IW") else ["B"]
    verb = "are" if len(missing) > 1 else "is"
    return " and ".join(f"{stage}{kind}{microbatch}" for kind in missing) + f" {verb} missing"


def _check_order(schedule: Schedule, dependencies: Dependencies) -> None:
    """Run the lists without time; what is left when nothing can go on is what is wrong."""
    done: set[Action] = set()
    position = [0] * schedule.num_meshes
    progress = True
    while progress:
        progress = False
        for mesh, row in enumerate(schedule.rows):
            while position[mesh] < len(row) and all(need in done for need in dependencies.needs(row[position[mesh]])):
                done.add(row[position[mesh]])
                position[mesh] += 1
                progress = True
    heads = {mesh: row[position[mesh]] for mesh, row in enumerate(schedule.rows) if position[mesh] < len(row)}
    if heads:
        _refuse_order(schedule, dependencies, heads, done)


def _refuse_order(schedule: Schedule, dependencies: Dependencies, heads: dict[int, Action], done: set[Action]) -> None:
    waits = {mesh: next(n for n in dependencies.needs(a) if n not in done) for mesh, a in heads.items()}
    own = [mesh for mesh, need in waits.items() if schedule.mesh_of.get(need.stage) == mesh]
    first = own[0] if own else min(heads)
    facts = []
    for mesh in (first, *(m for m in heads if m != first)):
        at, need = schedule.rows[mesh].index(heads[mesh]), waits[mesh]
        on = schedule.mesh_of.get(need.stage)
        where = f"which comes later on mesh {on}" if on != mesh else "which comes later on the same mesh"
        facts.append(f"mesh {mesh} can't go on at its action {at}, {heads[mesh]}: it needs {need}, {where}")
    refuse(
        facts if len(facts) <= _SHOWN else [*facts[:_SHOWN], f"and {len(facts) - _SHOWN} more meshes"],
        where=f"schedule {schedule.name!r}",
        why="no mesh can run its next action" if not own else f"{heads[first]} stands before what it needs",
        fix="run an action after what it needs: a stage's F before its backward, earlier stages first in F, later in B",
    )


def is_amount(value: Any) -> bool:
    """Whether it is a number, of any kind, of at least 0."""
    return not isinstance(value, bool) and isinstance(value, Real) and float(value) >= 0


def _check_memory(schedule: Schedule, held: Mapping[int, Held] | None, limit: float | Sequence[float] | None) -> None:
    if limit is None:
        return
    limits: list[Any] = [*limit] if isinstance(limit, (list, tuple)) else [limit] * schedule.num_meshes
    if not all(map(is_amount, limits)) or len(limits) != schedule.num_meshes:
        refuse(
            f"limit={shown(limit)}",
            where=f"schedule {schedule.name!r} on {schedule.num_meshes} meshes",
            fix="give the microbatches that a mesh may hold at a time, at least 0, or one such number per mesh",
        )
    facts = []
    for mesh, ((most, _), allowed) in enumerate(zip(_peaks(schedule, held), limits, strict=True)):
        if most > allowed:
            at = _first_over(schedule, mesh, held, allowed)
            facts.append(
                f"mesh {mesh} can't run its action {at}, {schedule.rows[mesh][at]}, within {allowed:g}: "
                f"the schedule holds {most:g} there at its most"
            )
    if facts:
        refuse(
            facts,
            where=f"schedule {schedule.name!r}",
            why="what a forward leaves for its backward is held until then",
            fix="more and smaller microbatches, or a schedule that holds fewer (1f1b)",
        )


def _first_over(schedule: Schedule, mesh: int, held: Mapping[int, Held] | None, allowed: float) -> int:
    live = 0.0
    for position, action in enumerate(schedule.rows[mesh]):
        live += (held[action.stage] if held is not None else Held()).change(action.kind)
        if live > allowed:
            return position
    raise AssertionError("the limit is kept")


Takes = Mapping[int, Sequence[int]]


class Dependencies:
    """Which actions must have ended before another starts.

    `takes` says from which stages each stage takes values: from the one before it, where it isn't given. A backward
    takes the gradients from the stages that took its stage's values.
    """

    def __init__(self, schedule: Schedule, takes: Takes | None = None) -> None:
        stages = range(schedule.num_stages)
        self.takes = {s: tuple(takes.get(s, ())) if takes is not None else (s - 1,) * (s > 0) for s in stages}
        self.given_to: dict[int, list[int]] = {s: [] for s in stages}
        for stage, sources in self.takes.items():
            for source in sources:
                self.given_to.setdefault(source, []).append(stage)
        self._whole = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind == "B"}

    def gradient(self, stage: int, microbatch: int) -> Action:
        """The action that makes the gradient of what a stage took: its B, or its I."""
        return Action("B" if (stage, microbatch) in self._whole else "I", stage, microbatch)

    def needs(self, action: Action) -> list[Action]:
        """What must have ended before `action` starts."""
        kind, stage, microbatch = action
        if kind == "F":
            return [Action("F", source, microbatch) for source in self.takes[stage]]
        if kind == "W":
            return [Action("I", stage, microbatch)]
        later = self.given_to[stage]
        return [Action("F", stage, microbatch), *(self.gradient(target, microbatch) for target in later)]
