"""Ranks that are about to run different things: all of them hear who has what, or, where one is left alone, what it was
about to run."""

import time
from types import SimpleNamespace

import pytest

from mesh_tensor.runtime.ranks import faults

from . import agreement_bodies as bodies
from .launcher import run


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (bodies.different_dtypes, "dtypes differ between ranks: rank 0: A float32, B float32, C float32"),
        (bodies.different_versions, "version of mesh_tensor differ between ranks: "),
        (bodies.different_targets, "target differ between ranks: rank 0: c; rank 1: interpret"),
        (bodies.different_options, "overlap differ between ranks: rank 0: off; rank 1: 2"),
        (bodies.different_layouts, "layouts differ between ranks: rank 0: A 'S[1]', B 'S[0]', C 'P[sum]', "),
        (bodies.different_blocks, "steps differ between ranks: rank 0: digest "),
        (bodies.different_axes, 'mesh differ between ranks: rank 0: Mesh({"x": 2}); rank 1: Mesh({"y": 2})'),
        (bodies.different_orders, "ranks of the mesh differ between ranks: "),
    ],
    ids=lambda body: getattr(body, "__name__", ""),
)
def test_first_call(body, what):
    first, second = run(body, 2)
    assert what in first
    assert what in second
    assert "all ranks of a mesh have to run the same steps" in first
    assert "compile the same kernel on every rank" in second


def test_versions():
    assert "rank 1: 99.0" in run(bodies.different_versions, 2)[0]


def test_sizes_that_differ_at_a_later_call():
    for known, new in run(bodies.sizes_that_differ, 2):
        assert "shapes differ between ranks: rank 0: A (6, 4), " in known
        assert "rank 1: A (10, 4), " in known
        assert "rank 0: A (14, 4), " in new
        assert "rank 1: A (18, 4), " in new


def test_layouts_that_differ_at_a_later_call():
    for text in run(bodies.layouts_that_differ, 2):
        assert "layouts of the arguments differ between ranks: rank 0: A 'S[1]'; rank 1: A 'R'" in text


def test_new_size_on_one_rank():
    first, second = run(bodies.new_size_on_one_rank, 2)
    assert "rank 1 waited in vain somewhere else, in step " in first
    assert "all_reduce(" in first.splitlines()[0]
    assert "where: the agreement on what to run (A (64, 4), " in first
    assert "rank 0 waited in vain somewhere else, in the agreement on what to run (A (64, 4), " in second
    assert "seen on rank 1" in second


def test_new_size_after_a_rank_has_ended():
    first, second = run(bodies.new_size_after_a_rank_has_ended, 2)
    assert second is None
    assert "rank 1 has ended, hangs, or is not in this collective" in first
    assert "the agreement on what to run (A (64, 4), " in first


def test_hangs_on_two_axes():
    sums = run(bodies.hangs_on_two_axes, 4, timeout=3)
    assert sums.pop() is None
    assert "rank 3 has ended, hangs, or is not in this collective" in sums[2]
    assert "all_reduce(" in sums[2]
    assert sums[:2] == [4 * 8 * 8.0] * 2


def test_others_go_on():
    texts = run(bodies.others_go_on, 4)
    assert texts.pop() is None
    for text in texts:
        assert "rank 3 has ended, hangs, or is not in this collective" in text


def test_group_of_another_device():
    for text in run(bodies.group_of_another_device, 2):
        assert "the kernel's tensors are on 'cuda', but the process group has gloo for it" in text
        assert "init_process_group('cuda:nccl')" in text


def test_what_a_rank_said_before_it_ended_the_mesh_is_heard():
    """It does both between two looks of this one."""
    words = {}

    def why_ended():
        words[1] = {"doing": "step 1 of 1"}
        return "rank 0 waited in vain"

    calls = SimpleNamespace(
        clock=time, connected=True, count=2, rank=0, heard=lambda lane, member: words.get(member), why_ended=why_ended
    )
    assert faults._listen(calls, None, [1]) == words
