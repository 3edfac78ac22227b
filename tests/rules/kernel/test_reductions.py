"""How factors combine: what keeps a factor from being split."""

import pytest
import tilelang.language as T

from .kernels import analysis, factor, why_blocked


@pytest.mark.parametrize("meets_all", [False, True])
def test_a_carried_value_blocks_where_iterations_walk_more_than_their_own(meets_all):
    @T.macro
    def body(A, B, a, b, bx):
        T.clear(b)
        for k in T.serial(48):
            for u in T.serial(48 if meets_all else 1):
                for i in T.Parallel(8):
                    b[i] = T.sin(b[i]) + (a[i, u] if meets_all else a[i, k])

    reason = why_blocked(body)
    assert "the store to b keeps one of many coordinates' values" in reason if meets_all else reason is None


@pytest.mark.parametrize("step", [1.0, 0.5])
def test_counting_blocks_goes_on_from_device_to_device(step):
    @T.prim_func
    def func(A: T.Tensor((32, 48), "float32"), B: T.Tensor((32,), "float32"), n: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            a = T.alloc_fragment((8, 16), "float32")
            b = T.alloc_fragment((8,), "float32")
            count = T.alloc_fragment((8,), "float32")
            T.clear(b)
            T.clear(count)
            for ko in T.serial(3):
                T.copy(A[bx * 8, ko * 16], a)
                T.reduce_sum(a, b, dim=1, clear=False)
                for i in T.Parallel(8):
                    count[i] = count[i] * step + 1.0
            T.copy(b, B[bx * 8])
            T.copy(count, n[bx * 8])

    found = analysis(func)
    columns = factor(found, "A", 1)
    assert columns.blocked is None
    assert set(found.reductions[columns].scan.names) == {"b", "count"}


def test_a_value_that_starts_anew_in_every_block_blocks():
    @T.prim_func
    def func(A: T.Tensor((32, 48), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            a = T.alloc_fragment((8, 16), "float32")
            b = T.alloc_fragment((8,), "float32")
            for ko in T.serial(3):
                T.copy(A[bx * 8, ko * 16], a)
                T.reduce_sum(a, b, dim=1)
            T.copy(b, B[bx * 8])

    reason = factor(analysis(func), "A", 1).blocked
    assert reason == "T.reduce into b starts anew in every block of it and keeps the last block's value only"
