"""A schedule's own clock against closed forms, exactly."""

from fractions import Fraction

import pytest

from mesh_tensor import MeshTensorError
from mesh_tensor.pipelining import Schedule, peaks, timeline

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 33)]


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (Fraction(3, 7), Fraction(5, 7))])
def test_gpipe_and_1f1b(forward, backward):
    for p, m in SIZES:
        for name, live in (("gpipe", [m] * p), ("1f1b", [min(p - s, m) for s in range(p)])):
            schedule = Schedule.named(name, p, m)
            times = timeline(schedule, {"F": forward, "B": backward})
            assert times.makespan == (m + p - 1) * (forward + backward), (name, p, m)
            assert [Fraction(times.idle(s)) / times.makespan for s in range(p)] == [Fraction(p - 1, m + p - 1)] * p
            assert peaks(schedule) == live


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (Fraction(3), Fraction(5))])
def test_stages_that_go_round(name, forward, backward):
    """Also where a round has more microbatches than others."""
    for p, m in SIZES:
        for v in (2, 3) if m % p == 0 or p < m < 3 * p else ():
            times = timeline(Schedule.named(name, p, m, v), {"F": forward, "B": backward})
            assert Fraction(times.idle(0)) / times.makespan == Fraction(p - 1, v * m + p - 1), (p, m, v)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 3, 2), (2, 2, 1), (3, 2, 2)])
def test_zero_bubble(f, i, w):
    """H1's bubble, and H2's in the first mesh's window (optimizer steps don't wait for each other there)."""
    for p, m in SIZES:
        if m >= p:
            schedule = Schedule.named("zb-h1", p, m)
            assert timeline(schedule, {"F": f, "I": i, "W": w}).idle(0) == (p - 1) * (f + i - w), (p, m)
            assert max(peaks(schedule)) == p
        if m >= 2 * p - 1:
            schedule = Schedule.named("zb-h2", p, m)
            assert timeline(schedule, {"F": f, "I": i, "W": w}).idle_inside(0) == (p - 1) * (f + i - 2 * w), (p, m)
            assert max(peaks(schedule)) == 2 * p - 1


def test_zbv_has_no_bubble_inside_where_all_take_equally_long():
    for p in range(1, 9):
        for m in range(2 * p, 33, 3):
            schedule = Schedule.named("zbv", p, m)
            times = timeline(schedule, {"F": 1, "I": 1, "W": 1})
            assert [times.idle_inside(s) for s in range(p)] == [0] * p, (p, m)
            assert max(peaks(schedule)) == 2 * p


def test_dualpipev_s_windows():
    """A mesh's bubble shrinks by one down the meshes (F = I = W; a backward is both)."""
    times = timeline(Schedule.named("dualpipev", 4, 10), {"F": 1, "I": 1, "W": 1})
    assert [times.idle_inside(s) for s in range(4)] == [3, 2, 1, 0]


def test_a_transfer_takes_time_between_meshes_only():
    one, two = Schedule.of(["0F0 1F0 1B0 0B0"]), Schedule.named("1f1b", 2, 1)
    assert timeline(one, {"F": 1, "B": 2}, transfer=5).makespan == 6
    assert timeline(two, {"F": 1, "B": 2}, transfer=5).makespan == 16
    assert timeline(two, {"F": 1, "B": 2}, transfer=lambda source, target: 5 if source < target else 0).makespan == 11


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_with_gradients_handed_on_before_those_of_weights_only_these_are_waited_for(name):
    """Filling and draining take (p - 1) (f + i), whatever the gradients of weights take."""
    for p, m in ((1, 3), (2, 2), (3, 6), (4, 9)):
        for f, i, w in ((1, 1, 1), (3, 4, 2)):
            costs, early = {"F": f, "B": i + w}, lambda action, w=w: w if action.kind == "B" else 0
            times = timeline(Schedule.named(name, p, m), costs, early=early)
            assert times.makespan == m * (f + i + w) + (p - 1) * (f + i), (p, m)


def test_costs_may_differ_by_action():
    times = timeline(Schedule.named("gpipe", 2, 2), lambda action: 4 if action.stage else 1)
    assert times.makespan == 1 + 4 * 4 + 1
    assert repr(times) == "Timeline(makespan=18, bubble=0.444)"


def test_what_has_no_cost_or_can_not_run_is_refused():
    with pytest.raises(MeshTensorError, match=r"no cost for I \(input gradient\)\n  - no cost for W"):
        timeline(Schedule.named("zb-h1", 2, 2), {"F": 1, "B": 2})
    with pytest.raises(
        MeshTensorError, match=r"the cost of B \(backward\) is -2\n  - the cost of F \(forward\) is '1'"
    ):
        timeline(Schedule.named("1f1b", 2, 2), {"F": "1", "B": -2})
    with pytest.raises(MeshTensorError, match="mesh 0 can't go on at its action 0, 0B0"):
        timeline(Schedule.of(["0B0 0F0"]), {"F": 1, "B": 2})
