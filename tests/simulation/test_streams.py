"""What events do to streams, and which of them the end waits for."""

import time

import pytest

from mesh_tensor.simulation.streams import RUN, SEND, START, WAIT, Event, critical, play


def ended(*events, links=2, busy=0.0):
    return play([Event(*event) for event in events], links, busy)


def test_one_after_the_other():
    assert ended((RUN, 1.0, 0), (RUN, 2.0, 0)) == (3.0, [1.0, 3.0])
    assert ended((RUN, 1.0, 0), (SEND, 2.0, 0), (RUN, 4.0, 0)) == (7.0, [1.0, 3.0, 7.0])


def test_what_is_started_runs_beside():
    events = [(RUN, 1.0, 0), (START, 3.0, 0), (RUN, 2.0, 0), (WAIT, 0.0, 1), (RUN, 1.0, 0)]
    assert ended(*events) == (5.0, [1.0, 4.0, 3.0, 4.0, 5.0])


def test_it_takes_its_share_of_what_computes():
    events = [(START, 4.0, 0), (RUN, 3.0, 0), (WAIT, 0.0, 0)]
    assert ended(*events, busy=0.25)[0] == 4.0
    assert ended(*events, busy=1.0)[0] == 7.0  # nothing is gained


def test_a_link_does_one_thing_at_a_time_and_two_links_two():
    assert ended((START, 2.0, 0), (START, 2.0, 0), (WAIT, 0.0, 1))[0] == 4.0
    assert ended((START, 2.0, 0), (START, 2.0, 1), (WAIT, 0.0, 0), (WAIT, 0.0, 1))[0] == 2.0
    assert ended((START, 2.0, 0), (SEND, 2.0, 0))[0] == 4.0


def test_what_nobody_waits_for_still_has_to_end():
    assert ended((RUN, 1.0, 0), (START, 5.0, 1))[0] == 6.0


def test_nothing_takes_no_time():
    assert ended() == (0.0, [])
    assert critical([], [], 0.0) == []


@pytest.mark.parametrize(
    ("events", "path"),
    [
        ([(RUN, 1.0, 0), (SEND, 1.0, 0), (RUN, 1.0, 0)], [0, 1, 2]),
        ([(RUN, 1.0, 0), (START, 3.0, 0), (RUN, 2.0, 0), (WAIT, 0.0, 1), (RUN, 1.0, 0)], [0, 1, 3, 4]),
        ([(RUN, 1.0, 0), (START, 1.0, 0), (RUN, 2.0, 0), (WAIT, 0.0, 1), (RUN, 1.0, 0)], [0, 2, 3, 4]),
        ([(START, 2.0, 0), (START, 2.0, 0), (RUN, 1.0, 0), (WAIT, 0.0, 1)], [0, 1, 3]),
    ],
)
def test_the_critical_path_is_what_the_end_waited_for(events, path):
    events = [Event(*event) for event in events]
    assert critical(events, play(events, 1, 0.0)[1], 0.0) == path


def test_the_critical_path_adds_up_to_the_time():
    """Where nothing takes a share of what computes."""
    events = [Event(RUN, 1.0, 0), Event(START, 2.5, 0), Event(RUN, 1.0, 0), Event(START, 2.0, 0), Event(RUN, 9.0, 0)]
    events += [Event(WAIT, 0.0, 1), Event(WAIT, 0.0, 3), Event(SEND, 0.5, 0)]
    time, ends = play(events, 1, 0.0)
    assert sum(events[each].seconds for each in critical(events, ends, 0.0)) == time == 11.5


def test_millions_of_steps_a_second():
    """Of the thread's own time: others may be busy here. A third of what is reached, which is 5 to 12 million."""
    events = [Event(RUN, 1e-6, 0), Event(START, 3e-6, 0), Event(RUN, 1e-6, 0), Event(WAIT, 0.0, 1)]
    events = [Event(e.kind, e.seconds, e.which + 4 * n * (e.kind == WAIT)) for n in range(25_000) for e in events]
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        play(events, 1, 0.1)
        best = min(best, time.thread_time() - start)
    assert len(events) / best > 1.5e6
