"""The steps of kernels in slabs: their order, their slabs, and that nothing is sent or computed twice."""

import mesh_tensor as mt
from kernels.matmul import batched_matmul
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.overlap import overlapped
from mesh_tensor.program.steps import CollectiveStep, KernelStep

from .test_overlap import BOTH, GATHERED, REDUCED, X2, program, small, words


def test_what_is_reduced_in_two_slabs():
    assert words(program(small(), X2, REDUCED, 2)) == [
        "kernel A[0:32] B C[0:32]",
        "start all_reduce C.1[0:32]",
        "kernel A[32:64] B C[32:64]",
        "start all_reduce C.1[32:64]",
        "wait C.1[0:32]",
        "wait C.1[32:64]",
    ]


def test_what_is_reduced_in_four_slabs():
    assert words(program(small(), X2, REDUCED, 4)) == [
        "kernel A[0:16] B C[0:16]",
        "start all_reduce C.1[0:16]",
        "kernel A[16:32] B C[16:32]",
        "start all_reduce C.1[16:32]",
        "kernel A[32:48] B C[32:48]",
        "wait C.1[0:16]",
        "start all_reduce C.1[32:48]",
        "kernel A[48:64] B C[48:64]",
        "wait C.1[16:32]",
        "start all_reduce C.1[48:64]",
        "wait C.1[32:48]",
        "wait C.1[48:64]",
    ]


def test_what_is_gathered():
    assert words(program(small(48), X2, GATHERED, 3)) == [
        "start all_gather A.1[0:16]",
        "start all_gather A.1[16:32]",
        "wait A.1[0:16]",
        "kernel A.1[0:16] B C[0:16]",
        "start all_gather A.1[32:48]",
        "wait A.1[16:32]",
        "kernel A.1[16:32] B C[16:32]",
        "wait A.1[32:48]",
        "kernel A.1[32:48] B C[32:48]",
    ]


def test_gathered_and_reduced_at_once():
    assert words(program(small(), {"x": 2, "y": 2}, BOTH, 2)) == [
        "start all_gather A.1[0:32]",
        "start all_gather A.1[32:64]",
        "wait A.1[0:32]",
        "kernel A.1[0:32] B C[0:32]",
        "start all_reduce C.1[0:32]",
        "wait A.1[32:64]",
        "kernel A.1[32:64] B C[32:64]",
        "start all_reduce C.1[32:64]",
        "wait C.1[0:32]",
        "wait C.1[32:64]",
    ]


def test_the_last_slab_takes_the_rest():
    made = program(small(75), X2, REDUCED, 3)
    assert [word for word in words(made) if "kernel" in word] == [
        "kernel A[0:32] B C[0:32]",
        "kernel A[32:48] B C[32:48]",
        "kernel A[48:75] B C[48:75]",
    ]


def test_slabs_of_a_dim_that_is_split_evenly_are_slabs_of_every_tile():
    made = program(small(), {"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}, 2)
    assert words(made)[0] == "kernel A[0:16] B C[0:16]"
    assert made.values["C[0:16]"].shape == (32, 32)
    assert made.values["C[0:16]"].tile_shape == (16, 32)


def test_slabs_after_leading_dims_of_one():
    func = batched_matmul(1, 64, 32, 32, 16, 16, 16)
    made = program(func, X2, {"A": {"x": 2}, "B": {"x": 1}, "C": {}}, 2)
    assert words(made)[:2] == ["kernel A[:, 0:32] B C[:, 0:32]", "start all_reduce C.1[:, 0:32]"]


def test_slabs_that_are_alike_have_one_kernel():
    made = program(small(), X2, REDUCED, 4)
    assert len({id(step.func) for step in made.steps if isinstance(step, KernelStep)}) == 1


def test_bytes_and_flops_stay():
    bulk = lower_to_program(mt.annotate(small(), X2, REDUCED))
    made = overlapped(bulk, 4)
    for kind, what in ((CollectiveStep, "bytes"), (KernelStep, "flops")):
        totals = [sum(getattr(s, what) for s in p.steps if isinstance(s, kind)) for p in (bulk, made)]
        assert totals[0] == totals[1] > 0
