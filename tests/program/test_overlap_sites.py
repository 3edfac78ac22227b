"""Where a collective can't go along with a kernel, and why."""

import tilelang.language as T

from kernels.matmul import matmul, split_k_matmul
from mesh_tensor.program.steps import WaitStep

from .test_overlap import X2, bulk_reason, program, small


def test_a_scatter_along_the_rows():
    assert "it changes how dim 0, along which slabs would be, is split" in bulk_reason(
        small(), X2, {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 0}}
    )


def test_a_factor_that_is_split_unevenly():
    layouts = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
    assert "m is split unevenly over x" in bulk_reason(small(65), {"x": 2, "y": 2}, layouts)


def test_what_is_read_and_written():
    func = split_k_matmul(64, 32, 64, 2, 16, 16, 16)
    made = program(func, X2, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}, 2)
    assert not any(isinstance(step, WaitStep) for step in made.steps)
    assert all("C is read and written" in note for note in made.overlap)


def test_slabs_that_do_not_lie_in_one_piece():
    func = matmul(64, 32, 32, 16, 16, 16, trans_A=True)
    reason = bulk_reason(func, X2, {"A": {"x": 0}, "B": {"x": 0}, "C": {}})
    assert "m is dim 1 of A: its slabs don't lie in one piece" in reason


def test_what_is_reduced_can_not_be_walked_in_slabs():
    reason = bulk_reason(small(), X2, {"A": {"x": 0}, "B": {"x": 1}, "C": {"x": 0}})
    assert "k is reduced (sum)" in reason


def test_an_output_that_every_slab_would_write():
    @T.prim_func
    def two_outputs(A: T.Tensor((64, 32), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=128):
            total = T.alloc_fragment((1,), "float32")
            for i in T.serial(64):
                total[0] = 0.0
                for k in T.serial(32):
                    total[0] += A[i, k]
                B[i] = total[0]
            for k in T.serial(32):
                C[k] = 1.0

    reason = bulk_reason(two_outputs, X2, {"A": {"x": 1}})
    assert "m doesn't index C, which every slab would write" in reason
