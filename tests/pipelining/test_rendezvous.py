"""Which schedules hang with which channels, where a send waits for its receive."""

import pytest

from mesh_tensor import MeshTensorError
from mesh_tensor.pipelining import SCHEDULES, Schedule
from mesh_tensor.pipelining.clock import hangs
from mesh_tensor.pipelining.orders import make

SIZES = [(p, m) for p in (2, 3, 4, 6) for m in (2 * p, 3 * p)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_channel_per_peer_and_direction_never_hangs(name):
    for p, m in SIZES:
        for channels in ("per peer and direction", "per message"):
            assert hangs(make(name, p, m), channels) == "", (p, m)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "interleaved", "zbv", "dualpipev"])
def test_a_channel_per_peer_hangs_where_both_send_at_once(name):
    for p, m in SIZES:
        assert "waits before" in hangs(make(name, p, m), "per peer"), (p, m)
        assert "waits before" in hangs(make(name, p, m), "one stream"), (p, m)


def test_gpipe_runs_on_one_stream():
    for p, m in SIZES:
        assert hangs(make("gpipe", p, m), "one stream") == ""


def test_where_it_hangs_is_said():
    schedule = Schedule.named("1f1b", 2, 4)
    assert hangs(schedule, "one stream").startswith("mesh 0 waits before 0B0; mesh 1 waits before ")
    assert hangs(Schedule.of(["0B0 0F0"])) == ""  # nothing is sent: that its order can't run, check_schedule says
    with pytest.raises(MeshTensorError, match="there are no channels 'two'"):
        hangs(schedule, "two")


def test_values_that_go_over_several_stages():
    schedule = Schedule.named("1f1b", 3, 6)
    assert hangs(schedule, takes={1: (0,), 2: (0, 1)}) == ""
