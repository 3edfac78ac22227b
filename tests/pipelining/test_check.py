"""What a schedule must be to run, and what it holds."""

import random

import pytest

from mesh_tensor import MeshTensorError
from mesh_tensor.pipelining import Action, Dependencies, Held, Schedule, check_schedule, peaks
from tests.refusals import refusal


def refused(rows, **options):
    return refusal(check_schedule, Schedule.of(rows), **options)


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        (["0F0 0B0 0F1 0B1", "1F0 1B0 1F1"], ["1B1 is missing"]),
        (["0F0 0I0"], ["0W0 is missing"]),
        (["0F0 0B0 0W0"], ["0B0 is there beside 0W0"]),
        (["0B0"], ["0F0 is missing"]),
        (["0F99999999999 0B99999999999"], ["0F0 and 0B0 are missing", "0F7 and 0B7 are missing", "and more"]),
        (["0F0 0F0 0B0"], ["0F0 is there 2 times"]),
        (["0F0 0B0", "0F1 0B1"], ["stage 0 is on mesh 0 and on mesh 1"]),
        (["0F0 0F1 2F0 2F1"], ["1F0 is missing", "1F1 is missing"]),
        ([""], ["it has no action"]),
    ],
)
def test_what_is_not_complete_is_refused(rows, facts):
    message = refused(rows)
    assert all(fact in message for fact in facts)
    assert "where: schedule 'own'" in message


def test_sizes_that_are_asked_for():
    message = refused(["0F0 0B0"], meshes=2, stages=3, microbatches=4)
    assert "it has 1 mesh(es), not 2" in message
    assert "it has 1 stage(s), not 3" in message
    assert "it has 1 microbatch(es), not 4" in message


def test_the_first_action_that_can_not_go_on_is_named():
    message = refused(["0F0 0F1 0B0 0B1", "1F0 1B1 1F1 1B0"])
    assert message.startswith(
        "2 problems:\n"
        "  - mesh 1 can't go on at its action 1, 1B1: it needs 1F1, which comes later on the same mesh\n"
        "  - mesh 0 can't go on at its action 2, 0B0: it needs 1B0, which comes later on mesh 1\n"
    )
    assert "why: 1B1 stands before what it needs" in message


def test_a_deadlock_between_meshes_names_both_sides():
    message = refused(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    assert "mesh 0 can't go on at its action 1, 0B0: it needs 1B0, which comes later on mesh 1" in message
    assert "mesh 1 can't go on at its action 1, 1F1: it needs 0F1, which comes later on mesh 0" in message
    assert "why: no mesh can run its next action" in message


def test_stages_that_take_values_from_others_than_the_one_before():
    rows = ["0F0 0B0", "1F0 1B0", "2F0 2B0"]
    check_schedule(Schedule.of(rows), takes={1: (0,), 2: (0,)})
    needs = Dependencies(Schedule.of(rows), {1: (0,), 2: (0,)}).needs(Action("B", 0, 0))
    assert needs == [Action("F", 0, 0), Action("B", 1, 0), Action("B", 2, 0)]
    assert "it needs 2F0, which comes later on mesh 2" in refused(rows, takes={0: (2,), 1: (0,), 2: (1,)})


def test_what_is_held_is_that_of_the_formulas():
    assert peaks(Schedule.named("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert peaks(Schedule.named("gpipe", 4, 8)) == [8] * 4
    assert peaks(Schedule.named("forward", 4, 8)) == [0] * 4
    assert max(peaks(Schedule.named("interleaved", 4, 8, 2))) == 11  # p + (p - 1) / v microbatches, in halves
    assert peaks(Schedule.named("zb-h1", 2, 4), {0: Held(10, 1), 1: Held(100, 7)}) == [20, 107]


def test_a_memory_limit_names_the_action_that_goes_over_it():
    check_schedule(Schedule.named("1f1b", 2, 4), limit=2)
    with pytest.raises(MeshTensorError) as raised:
        check_schedule(Schedule.named("gpipe", 2, 4), limit=(4, 2))
    assert str(raised.value).startswith(
        "mesh 1 can't run its action 2, 1F2, within 2: the schedule holds 4 there at its most\n  where: schedule"
    )


@pytest.mark.parametrize("limit", ["1 GB", (2,), [2, "2"], -1, True, float("nan")])
def test_a_memory_limit_that_is_none(limit):
    with pytest.raises(MeshTensorError, match=r"^limit=.*\n.*on 2 meshes\n.*one such number per mesh"):
        check_schedule(Schedule.named("1f1b", 2, 4), limit=limit)


def test_orders_that_keep_dependencies_pass_and_others_do_not():
    """Random lists against a brute-force run of the same dependencies."""
    draw, passed = random.Random(0), 0
    for _ in range(300):
        p, m = draw.randint(1, 3), draw.randint(1, 3)
        rows = [list(row) for row in Schedule.named("gpipe", p, m).rows]
        for row in rows:
            for _ in range(draw.randint(0, 2)):
                i = draw.randrange(len(row) - 1) if len(row) > 1 else 0
                row[i : i + 2] = reversed(row[i : i + 2])
        possible = runs(rows, p)
        if possible:
            check_schedule(Schedule.of(rows))
            passed += 1
        else:
            assert "can't go on" in refused(rows)
    assert 50 < passed < 290


def runs(rows, stages):
    rows, done = [list(row) for row in rows], set()
    while any(rows):
        ready = [row for row in rows if row and needs_of(row[0], stages) <= done]
        if not ready:
            return False
        done.add(ready[0].pop(0))
    return True


def needs_of(action, stages):
    kind, stage, i = action
    if kind == "F":
        return {Action("F", stage - 1, i)} if stage else set()
    return {Action("F", stage, i)} | ({Action("B", stage + 1, i)} if stage + 1 < stages else set())
