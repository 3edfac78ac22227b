"""Schedules in any order that dependencies allow."""

from __future__ import annotations

from random import Random

from mesh_tensor.pipelining import Action, Schedule


def random_schedule(random: Random, meshes: int, stages: int, microbatches: int) -> Schedule:
    """Of stages on any meshes, with backwards that are whole or in halves: of all that can go on, one is drawn each
    time."""
    where = [*range(meshes), *random.choices(range(meshes), k=stages - meshes)]
    random.shuffle(where)
    todo = {Action("F", stage, i) for stage in range(stages) for i in range(microbatches)}
    for _, stage, i in sorted(todo):
        todo |= {Action(kind, stage, i) for kind in random.choice(("B", "IW"))}
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in range(meshes)]
    while todo:
        action = random.choice(sorted(a for a in todo if _can_go(a, done, stages)))
        todo.remove(action)
        done.add(action)
        rows[where[action.stage]].append(action)
    return Schedule.of(rows)


def _can_go(action: Action, done: set[Action], stages: int) -> bool:
    kind, stage, i = action
    if kind == "F":
        return stage == 0 or Action("F", stage - 1, i) in done
    if kind == "W":
        return Action("I", stage, i) in done
    later = {Action(each, stage + 1, i) for each in "BI"}
    return Action("F", stage, i) in done and (stage == stages - 1 or not later.isdisjoint(done))
