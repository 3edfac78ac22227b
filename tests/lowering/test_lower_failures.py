"""What lower refuses: the message says what, where, why and the way out."""

from functools import partial

import pytest
import tilelang.language as T

import mesh_tensor as mt
from tests.refusals import refusal

from .kernels import matmul, scale

refused = partial(refusal, mt.lower)


def test_a_kernel_without_annotations():
    message = refused(matmul(32, 32, 32))
    assert "'matmul'" in message
    assert "annotat" in message


def test_symbolic_sizes_have_no_program():
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(A: T.Tensor((rows,), "float32"), B: T.Tensor((rows,), "float32")):
        with T.Kernel(T.ceildiv(rows, 8), threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[bx * 8 + i] + 1.0

    from mesh_tensor.program.from_kernel import lower_to_program

    with pytest.raises(mt.MeshTensorError) as error:
        lower_to_program(mt.annotate(kernel, {"x": 2}, {"A": {"x": 0}}))
    message = str(error.value)
    assert "tensor 'A' has the symbolic shape" in message
    assert "specialize the kernel to sizes first" in message


def test_an_unknown_view():
    message = refused(mt.annotate(scale(32, 16), {"x": 2}, {"A": {"x": 0}}), view="sideways")
    assert "view 'sideways' is unknown" in message
    assert "auto, global, local" in message


@pytest.mark.parametrize("kind", ["quotient", "index"])
def test_integers_that_are_divided_by_0(kind):
    """bx is always 0: there is one program of it."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32"), B: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, 8, threads=32) as (bx, by):
            for j in T.serial(8):
                if kind == "quotient":
                    B[by, j] = A[by, j] * T.cast(8 // bx, "float32")
                else:
                    B[by, j] = A[by % bx, j]

    message = refused(mt.annotate(kernel, mt.Mesh({"x": 2}), {"A": {"x": 0}}))
    assert ("8 // bx" if kind == "quotient" else "by % bx") in message
    assert "divides by bx, which is always 0" in message
    assert "kernel 'kernel'" in message


def test_whole_numbers_that_outgrow_their_type():
    """TVM multiplies their terms out."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 40), "float32"), B: T.Tensor((32, 40), "float32")):
        with T.Kernel(5, 4, threads=32) as (bx, by):
            for i, j in T.Parallel(8, 8):
                drawn = ((by * 8 + i) * 40 + bx * 8 + j) * 1103515245 % 65537
                B[by * 8 + i, bx * 8 + j] = T.if_then_else(drawn % 4 == 0, 0.0, A[by * 8 + i, bx * 8 + j])

    with pytest.raises(mt.MeshTensorError, match="grows beyond its type"):
        mt.sharding_rule(kernel)
    message = refused(mt.annotate(kernel, mt.Mesh({"x": 2}), {"A": {"x": 0}}))
    assert "kernel 'kernel'" in message
    assert "exceeds maximum of int32" in message
    assert 'T.cast(i, "int64")' in message


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_positions_that_outgrow_their_type(dtype):
    """Whether terms are multiplied out or not; what stays inside, and what data says, is not refused."""
    factor = {"int32": 10**7, "int64": 6364136223846793005}[dtype]

    def hashed(rows, *, of_data=False):
        @T.prim_func
        def kernel(A: T.Tensor((rows,), "float32"), K: T.Tensor((rows,), dtype), B: T.Tensor((rows,), "float32")):
            with T.Kernel(rows, threads=1) as bx:
                drawn = (K[bx] if of_data else T.cast(bx, dtype)) * factor
                B[bx] = T.if_then_else(drawn >= T.cast(0, dtype), A[bx], 0.0)

        return kernel

    message = refused(mt.annotate(hashed(300), mt.Mesh({"x": 2}), {"A": {"x": 0}}))
    assert "grows beyond its type" in message
    assert f"up to {299 * factor}, exceeds maximum of {dtype}" in message
    for kernel in (hashed(300, of_data=True), hashed(2)):
        assert mt.sharding_rule(kernel).factors["m"] == "parallel"
