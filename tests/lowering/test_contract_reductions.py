"""Clauses 1 and 3: a split reduction is completed before its first use that needs it whole, in its own dtype."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

import mesh_tensor as mt
from mesh_tensor.lowering.pipeline import lower_kernel

from .kernels import gelu, matmul
from .support import assert_right, local_kernels, lowered, outline, run, text

K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}}


def activated(M, N, K, activation, block=16, out="float32"):
    """C = activation(A @ B), accumulated in float32."""

    @T.prim_func
    def kernel(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), out)):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            for i, j in T.Parallel(block, block):
                C_local[i, j] = activation(C_local[i, j])
            T.copy(C_local, C[by * block, bx * block])

    return kernel


def test_a_partial_output_is_reduced_where_it_is():
    result = lowered(matmul(32, 48, 64), {"x": 2}, K_SPLIT)
    assert outline(result) == ["kernel(A, B, C)", "all_reduce(C, sum, x)"]
    ir.assert_structural_equal(local_kernels(result)[0], matmul(32, 48, 32))
    assert {t.storage for t in result.tensors.values() if t.name.startswith("C")} == {"C"}, "no workspace"


def test_axes_of_one_reduction_are_reduced_in_one_step():
    layouts = {"A": {"x": 1, "y": 1}, "B": {"x": 0, "y": 0}}
    result = lowered(matmul(32, 48, 64), {"x": 2, "y": 2}, layouts)
    assert outline(result) == ["kernel(A, B, C)", "all_reduce(C, sum, x, y)"]


@pytest.mark.parametrize("dim", [0, 1])
def test_an_output_on_the_same_axis_is_reduce_scattered(dim):
    result = lowered(matmul(32, 48, 64), {"x": 2}, {**K_SPLIT, "C": {"x": dim}})
    assert outline(result) == ["kernel(A, B, C)", f"reduce_scatter(C, dim {dim}, sum, x)"]
    (_, _, left) = result.parameters[-1]
    assert result.tensors[left].sharding.dim_of("x") == dim


def test_an_output_that_is_annotated_partial_is_left_partial():
    @T.prim_func
    def kernel(A: T.Tensor((32, 64), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            a = T.alloc_fragment((8, 64), "float32")
            b = T.alloc_fragment((8,), "float32")
            T.copy(A[bx * 8, 0], a)
            T.reduce_sum(a, b, dim=1)
            T.copy(b, B[bx * 8])

    partial = mt.Sharding.make({"x": 2}, 1, partial={"x": "sum"})
    annotated = mt.annotate(kernel, {"x": 2}, {"A": {"x": 1}, "B": partial})
    result = lower_kernel(annotated)
    assert outline(result) == ["kernel(A, B)"]
    assert str(result.tensors["B"].sharding) == "P[sum]"


@pytest.mark.parametrize("activation", [gelu, lambda v: T.max(v, 0.0), lambda v: v * v, T.abs, lambda v: v * 0.5])
def test_a_use_that_is_not_linear_comes_after_the_reduction(activation):
    result = lowered(activated(32, 48, 64, activation), {"x": 2}, K_SPLIT)
    assert outline(result) == [
        "kernel(A, B, C_local_w1)",
        "all_reduce(C_local_w1, sum, x)",
        "kernel(C, C_local_w1.1)",
    ]
    first, second = local_kernels(result)
    assert "T.gemm" in text(first)
    assert "T.gemm" not in text(second)
    assert len(text(second).split("for i in T.parallel")) == 2, "the activation is in the second kernel"
    assert "T.parallel" not in text(first)


def test_a_use_that_is_not_linear_works_on_what_the_reduce_scatter_leaves():
    result = lowered(activated(32, 48, 64, gelu), {"x": 2}, {**K_SPLIT, "C": {"x": 0}})
    assert outline(result) == [
        "kernel(A, B, C_local_w1)",
        "reduce_scatter(C_local_w1, dim 0, sum, x)",
        "kernel(C, C_local_w1.1)",
    ]
    second = local_kernels(result)[1]
    assert [tuple(map(int, b.shape)) for b in second.buffer_map.values()] == [(16, 48), (16, 48)]
    assert 'T.thread_binding(1, thread="blockIdx.y")' in text(second), "half of m: one block of rows instead of two"


@pytest.mark.parametrize("layout", [{}, {"C": {"x": 0}}, {"C": {"x": 1}}], ids=str)
@pytest.mark.parametrize("sizes", [(32, 48, 64), (19, 21, 37), (3, 5, 1)], ids=str)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    ("activation", "reference"),
    [(lambda v: v * 1.0, lambda v: v), (gelu, lambda v: torch.nn.functional.gelu(v, approximate="tanh"))],
    ids=["linear", "gelu"],
)
def test_numbers(layout, sizes, devices, activation, reference):
    M, N, K = sizes
    inputs = [torch.randn(M, K), torch.randn(K, N)]
    func = activated(M, N, K, activation)
    assert_right(func, {"x": devices}, {**K_SPLIT, **layout}, inputs, lambda a, b: reference(a.double() @ b.double()))


def test_reductions_that_are_not_sums():
    @T.prim_func
    def kernel(A: T.Tensor((16, 40), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            a = T.alloc_fragment((8, 40), "float32")
            b = T.alloc_fragment((8,), "float32")
            T.copy(A[bx * 8, 0], a)
            T.reduce_max(a, b, dim=1)
            for i in T.Parallel(8):
                b[i] = b[i] * 2.0 + 1.0
            T.copy(b, B[bx * 8])

    result = lowered(kernel, {"x": 3}, {"A": {"x": 1}})
    assert outline(result)[1] == "all_reduce(b_w1, max, x)"
    assert_right(kernel, {"x": 3}, {"A": {"x": 1}}, [-1 - torch.rand(16, 40)], lambda a: a.amax(1) * 2 + 1)


# -- clause 3 ----------------------------------------------------------------------------------------------------------


def test_the_accumulator_is_reduced_and_not_what_it_is_cast_to():
    result = lowered(matmul(32, 48, 64, dtype="float16", out="float16"), {"x": 2}, K_SPLIT)
    assert outline(result) == [
        "kernel(A, B, C_local_w1)",
        "all_reduce(C_local_w1, sum, x)",
        "kernel(C, C_local_w1.1)",
    ]
    assert {t.name: t.dtype for t in result.tensors.values() if "w1" in t.name} == {
        "C_local_w1": "float32",
        "C_local_w1.1": "float32",
    }
    assert result.tensors["C"].dtype == "float16"


def test_an_integer_accumulator_is_reduced_as_it_is():
    result = lowered(matmul(32, 48, 64, dtype="int8", accum="int32", out="int8"), {"x": 2}, K_SPLIT)
    assert result.tensors["C_local_w1"].dtype == "int32"


def test_partial_sums_that_float16_could_not_hold():
    a = torch.full((16, 64), 200.0, dtype=torch.float16)
    a[:, 32:] *= -1
    b = torch.full((64, 16), 200.0, dtype=torch.float16)
    b[0] += 100
    func = matmul(16, 16, 64, dtype="float16", out="float16")
    result = run(func, {"x": 2}, K_SPLIT, a, b)
    expected = a.double() @ b.double()
    assert (a[:, :32].double() @ b[:32].double()).abs().max() > torch.finfo(torch.float16).max, "the test is one"
    torch.testing.assert_close(result.double(), expected, rtol=1e-3, atol=0)
