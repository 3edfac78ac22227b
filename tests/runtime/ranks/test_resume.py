"""One rank catches what it raised and goes on: no later call is wrong without a word, nobody waits for the timeout, and
once all resume, calls are right again."""

from . import resume_bodies as bodies
from .launcher import run

REASON = "parameter 'A': (4, 4) torch.float64 on cpu, but expected (4, 4) torch.float32 on cpu"


def test_refused_on_one_rank():
    (woken, *first), (own, *second) = run(bodies.refused_on_one_rank, 2)
    assert own.startswith(REASON)
    for text in (woken, *first, *second):
        assert f"rank 1 raised MeshTensorError: {REASON}" in text
        assert "fix: pass this rank's part of every tensor, or its whole tile" in text
        assert "call mt.resume(mesh) on all ranks" in text
    assert "nothing can run on these ranks since a call failed" in first[0]


def test_refused_alike():
    run(bodies.refused_alike, 2)


def test_other_calls():
    first, second = run(bodies.other_calls, 2)
    assert "dim" in second[0]
    assert "4 arguments, but expected 2 (A, B) or 3 (A, B, C)" in second[1]
    for woken, own in zip(first[:2], second[:2], strict=True):
        assert own.splitlines()[0] in woken


def test_other_sizes():
    first, second = run(bodies.other_sizes, 2)
    assert "rank 1 waited in vain somewhere else, in step 3 of 3, all_reduce" in first
    assert "rank 0 waited in vain somewhere else, in step 3 of 3, all_reduce" in second
    assert "why: all ranks have to make the same calls" in first


def test_two_threads():
    assert run(bodies.two_threads, 2) == [[], []]


def test_first_calls_of_two_threads():
    assert run(bodies.first_calls_of_two_threads, 2) == [[], []]


def test_late_at_the_first_call():
    for rank, (first, again, resumed) in enumerate(run(bodies.late_at_the_first_call, 2)):
        assert f"rank {1 - rank} has ended, hangs, or is not in this collective" in first
        assert f"nothing can run on these ranks since a call failed: rank {1 - rank} has ended, hangs" in again
        for text in (first, again):
            assert "mt.resume" not in text
            assert "call torch.distributed.destroy_process_group() and init_process_group() on all ranks" in text
        assert "there is nothing to resume" in resumed
        assert "where the first call on it has failed, destroy the process group and initialize it again" in resumed


def test_threads_of_one_name():
    for text in run(bodies.threads_of_one_name, 2):
        assert "two threads named 'worker' call on one mesh" in text
        assert "threading.Thread(name=...)" in text


def test_resumes_without_a_rank():
    first, second = run(bodies.resumes_without_a_rank, 2)
    assert second is None
    assert "the ranks can't resume: mt.resume was not called on rank 1" in first
    assert "waited 2 seconds" in first
    assert "start all of them again" in first


def test_hangs_on_a_device_mesh():
    first, second = run(bodies.hangs_on_a_device_mesh, 2)
    assert second is None
    assert "rank 1 has ended, hangs, or is not in this collective" in first


def test_nothing_to_resume():
    for nothing, nonsense in run(bodies.nothing_to_resume, 2):
        assert "there is nothing to resume" in nothing
        assert "no call has run on ranks of this mesh" in nothing
        assert "MESH_TENSOR_TIMEOUT is 'soon'" in nonsense
        assert "set it to a number like 60" in nonsense
