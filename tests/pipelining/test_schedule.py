"""Actions and schedules: made, printed, read back."""

import pytest

from mesh_tensor import MeshTensorError
from mesh_tensor.pipelining import SCHEDULES, Action, Schedule
from mesh_tensor.pipelining.orders import make


def test_an_action_prints_as_it_is_read():
    action = Action("W", stage=12, microbatch=3)
    assert str(action) == "12W3"
    assert Action.parse(" 12W3 ") == action
    assert action.name == "weight gradient"


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip(name):
    schedule = make(name, 3, 6)
    assert Schedule.from_csv(schedule.to_csv(), name) == schedule


def test_csv_of_torch_with_what_is_sent_and_gathered():
    text = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD\n,1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0\n"
    assert Schedule.from_csv(text) == Schedule.of(["0F0 0B0", "1F0 1B0"], "csv")


def test_a_schedule_knows_its_sizes():
    schedule = Schedule.named("zbv", meshes=3, microbatches=5)
    assert (schedule.num_meshes, schedule.num_stages, schedule.num_microbatches) == (3, 6, 5)
    assert schedule.mesh_of == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}
    assert schedule.has_backward
    assert not Schedule.named("forward", 2, 2).has_backward


def test_own_lists_are_read_in_any_form():
    assert (
        Schedule.of([["0F0", Action("B", 0, 0)], [("F", 1, 0), "1B0"]]).rows == Schedule.of(["0F0 0B0", "1F0 1B0"]).rows
    )


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (
            lambda: Action.parse("F0"),
            "'F0' is no action\n  fix: write stage, kind (F, B, I or W) and microbatch, as in 2F0",
        ),
        (lambda: Schedule.of([[("X", 0, 0)]]), "('X', 0, 0) is no action"),
        (lambda: Schedule.of([[("F", 0, -1)]]), "('F', 0, -1) is no action"),
        (lambda: Schedule.of([[3]]), "3 is no action"),
        (lambda: Schedule.of([3, "0F0"]), "3 is no list of actions"),
        (lambda: Schedule.of("0F0 0B0"), "'0F0 0B0' is no list of actions\n  fix: pass a list per mesh"),
        (lambda: Schedule.from_csv(None), "None is no CSV"),
        (
            lambda: Schedule.from_csv("0F0,0X0\n1F0,,0"),
            "2 problems:\n  - '0X0' in row 1, cell 2, is no action\n  - '0' in row 2",
        ),
    ],
)
def test_what_is_no_action_is_refused(make_it, message):
    with pytest.raises(MeshTensorError) as raised:
        make_it()
    assert message in str(raised.value)
