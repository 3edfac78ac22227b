"""The threads that devices run in."""

import subprocess
import sys
import threading
import time

import pytest
import torch

import mesh_tensor as mt
from mesh_tensor.runtime.elementwise import DeviceThreads, cores, device_threads
from mesh_tensor.runtime.virtual import operators


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 17])
def test_every_index_is_done_once(threads, count):
    done = []
    DeviceThreads(threads).run(done.append, count)
    assert sorted(done) == list(range(count))


def test_devices_run_at_the_same_time():
    meeting = threading.Barrier(3, timeout=60)
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
        thread.join(timeout=60)
    assert totals == [3] * 200


def test_closed_threads_end_and_new_ones_start():
    pool = DeviceThreads(3)
    for _ in range(2):
        done, before = [], set(threading.enumerate())
        pool.run(done.append, 7)
        pool.close()
        assert sorted(done) == list(range(7))
        assert set(threading.enumerate()) <= before


def test_python_ends_while_a_helper_is_busy():
    script = """if True:
        import time, torch
        from mesh_tensor.runtime import elementwise as threads
        pool = threads.device_threads()
        pool._start(1)
        tensor = torch.ones(1 << 26)
        pool._jobs.put(threads._Job(lambda index: torch.add(tensor, tensor, out=tensor), 3))
        time.sleep(0.02)
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_one_set_of_threads_per_process():
    assert device_threads() is device_threads()
    assert cores() >= 1


@pytest.mark.parametrize(("side", "threads"), [(16, 1), (1024, 2)])
def test_devices_hand_on_operators_that_take_long_enough(monkeypatch, side, threads):
    """Handing on an operator of a few microseconds takes longer than the operator."""
    pool, seen = DeviceThreads(2), set()
    monkeypatch.setattr(operators, "device_threads", lambda: pool)
    run_all = operators._run_all

    def watched(work, count, run):
        def late(index):
            seen.add(threading.get_ident())
            time.sleep(0.01)
            end = time.monotonic() + 30
            while len(seen) < threads and time.monotonic() < end:
                time.sleep(0.001)
            work(index)

        run_all(late, count, run)

    monkeypatch.setattr(operators, "_run_all", watched)
    linear = torch.nn.Linear(side, side)
    x = torch.randn(2 * side, side)
    module = mt.from_torch(torch.export.export(linear, (x,)), check=False)
    run = mt.distribute_module(module.mod, {"x": 2}, {"input": {"x": 0}}, weights=module.params)
    with torch.no_grad():
        torch.testing.assert_close(run(x), linear(x))
    pool.close()
    assert len(seen) == threads
