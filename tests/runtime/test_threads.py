"""The threads that devices run in."""

import threading
import time

import pytest

from mesh_tensor.runtime.threads import DeviceThreads, cores, device_threads


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 17])
def test_every_index_is_done_once(threads, count):
    done = []
    DeviceThreads(threads).run(done.append, count)
    assert sorted(done) == list(range(count))


def test_devices_run_at_the_same_time():
    meeting = threading.Barrier(3, timeout=10)
    DeviceThreads(3).run(lambda index: meeting.wait(), 3)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_is_raised_after_all_ended(threads):
    ended = []

    def work(index):
        if index in (1, 2):
            raise ValueError(f"device {index}")
        time.sleep(0.01)
        ended.append(index)

    with pytest.raises(ValueError, match="device 1"):
        DeviceThreads(threads).run(work, 4)
    if threads > 1:
        assert sorted(ended) == [0, 3]


def test_threads_survive_errors_and_serve_several_callers():
    pool, totals = DeviceThreads(2), []
    with pytest.raises(ZeroDivisionError):
        pool.run(lambda index: 1 // 0, 2)

    def caller():
        for _ in range(50):
            done = []
            pool.run(done.append, 3)
            totals.append(len(done))

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=20)
    assert totals == [3] * 200


def test_one_set_of_threads_per_process():
    assert device_threads() is device_threads()
    assert cores() >= 1
