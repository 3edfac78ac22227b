"""Several kernels in one function that are refused."""

import pytest
import tilelang.language as T

import mesh_tensor as mt
from tests.refusals import refusal


def refused(func, layouts):
    return refusal(mt.lower, mt.annotate(func, {"x": 2}, layouts))


def test_memory_that_nothing_has_written():
    @T.prim_func
    def main(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        kept = T.alloc_global((8,), "float32")
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(4):
                B[bx * 4 + i] = kept[bx * 4 + i] + A[bx * 4 + i]
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(4):
                kept[bx * 4 + i] = A[bx * 4 + i]

    message = refused(main, {"A": {"x": 0}})
    assert "'kept' is read before it has been written" in message
    assert "function 'main'" in message
    assert "make it a parameter" in message


def test_what_stands_between_kernels():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(4):
                B[bx * 4 + i] = A[bx * 4 + i]
        B[0] = 3
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(4):
                B[bx * 4 + i] = B[bx * 4 + i] + 1

    message = refused(main, {"A": {"x": 0}})
    assert "BufferStore between kernels" in message
    assert "put it into a T.Kernel" in message


def test_kernels_over_tiles():
    helpers = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def main(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        helpers["annotate_mesh_tensor_info"]({A: {"block_shape": (2,), "program_id": (0,), "sharding": {"x": 0}}})
        (rows,) = helpers["get_tile_shape"](A)
        with T.Kernel(rows // 2, threads=32) as bx:
            for i in T.Parallel(2):
                B[bx * 2 + i] = A[bx * 2 + i]
        with T.Kernel(rows // 2, threads=32) as bx:
            for i in T.Parallel(2):
                B[bx * 2 + i] = B[bx * 2 + i] + 1.0

    with pytest.raises(mt.MeshTensorError) as error:
        mt.lower(main)
    assert "function 'main' has 2 kernels, and asks for tiles" in str(error.value)
    assert "each in a function of its own" in str(error.value)
