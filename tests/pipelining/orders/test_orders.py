"""The orders that have names: Shardy's examples, and every size that they have."""

import pytest

from mesh_tensor.pipelining import SCHEDULES, Schedule, check_schedule
from mesh_tensor.pipelining.orders import make


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_can_run_at_every_size_that_it_has(name):
    made = 0
    for p in range(1, 6):
        for m in range(1, 12):
            for v in {SCHEDULES[name].chunks, *((1, 2, 3) if SCHEDULES[name].any_chunks else ())}:
                try:
                    schedule = make(name, p, m, v)
                except ValueError:
                    continue
                check_schedule(schedule, meshes=p, stages=p * v, microbatches=m)
                made += 1
    assert made >= 25


def test_1f1b_is_shardy_s():
    assert str(Schedule.named("1F1B", 3, 4)).splitlines()[1:] == [
        "mesh 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "mesh 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "mesh 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb_h1_is_shardy_s_where_its_halves_are_alike():
    rows = str(Schedule.named("ZeroBubbleH1", 4, 5)).splitlines()[1:]
    assert rows[1] == "mesh 1: 1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1I3 1W2 1I4 1W3 1W4"
    assert rows[3] == "mesh 3: 3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3W2 3W3 3W4"


def test_circular_goes_round_in_phases_of_as_many_microbatches_as_meshes():
    assert str(Schedule.named("circular", 2, 4, 2)).splitlines()[1:] == [
        "mesh 0: 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3 2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3",
        "mesh 1: 1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3 3B0 3B1 1B0 1B1 3B2 3B3 1B2 1B3",
    ]
    assert str(Schedule.named("CircularWithReversedBackward", 1, 2)).splitlines()[1:] == ["mesh 0: 0F0 0F1 0B1 0B0"]


def test_gpipe_with_1f1b_on_the_last_mesh_is_shardy_s():
    assert str(Schedule.named("GPipeBut1F1BForLastMesh", 2, 3)).splitlines()[1:] == [
        "mesh 0: 0F0 0F1 0F2 0B0 0B1 0B2",
        "mesh 1: 1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_rounds_that_are_not_equally_long():
    assert str(Schedule.named("interleaved", 2, 5)).splitlines()[1:] == [
        "mesh 0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4",
        "mesh 1: 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4",
    ]
    for name, order in SCHEDULES.items():
        for meshes, microbatches in ((2, 7), (3, 5), (3, 7), (4, 6)):
            if microbatches >= 2 * meshes or not order.fills_twice:
                check_schedule(make(name, meshes, microbatches, 3 if order.any_chunks else order.chunks))


def test_what_an_order_does_not_have_is_refused_by_size():
    with pytest.raises(
        ValueError, match=r"unknown schedule '1f1'; did you mean '1f1b'\?\n  fix: use one of 'gpipe', '1f1b'"
    ):
        make("1f1", 2, 4)
    with pytest.raises(ValueError, match=r"3 stages per mesh, but the order is made for 2\n  where: schedule 'zbv'"):
        make("zbv", 2, 4, 3)
    with pytest.raises(
        ValueError, match=r"2 stages per mesh, .* 1\n.*\n  fix: .*, as 'interleaved', .*; or cut into 3 stages"
    ):
        make("1f1b", 3, 4, 2)
    with pytest.raises(ValueError, match="3 microbatches, but 2 meshes need at least 4 to fill both directions"):
        make("dualpipev", 2, 3)
    with pytest.raises(ValueError, match="meshes is 0, but it is an int of at least 1"):
        make("1f1b", 0, 4)
