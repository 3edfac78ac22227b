"""Loop variables as values: where tiles have to be whole blocks."""

import tilelang.language as T

from .kernels import analysis, factor


def test_a_block_index_used_as_a_value_asks_for_whole_blocks():
    def on_grid(value):
        @T.prim_func
        def func(B: T.Tensor((32,), "float32")):
            with T.Kernel(4, threads=8) as bx:
                for i in T.Parallel(8):
                    B[bx * 8 + i] = value(bx, i)

        return factor(analysis(func), "B")

    assert on_grid(lambda bx, i: T.Cast("float32", bx * 8 + i)).aligned is None
    assert on_grid(lambda bx, i: T.Cast("float32", (bx * 8 + i) // 3)).aligned is None
    assert "bx is used as a value" in on_grid(lambda bx, i: T.Cast("float32", bx)).aligned
    assert "i is used as a value" in on_grid(lambda bx, i: T.Cast("float32", i)).aligned
    assert "is used as a value" in on_grid(lambda bx, i: T.Cast("float32", bx * 9 + i)).aligned
