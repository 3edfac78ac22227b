"""The design's worked example: C = gelu(A @ B + bias) on {"x": 2, "y": 2}, in float16 out of a float32 accumulator."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

import mesh_tensor as mt
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.steps import AllocStep, CollectiveStep, FreeStep, KernelStep

from .kernels import gelu, matmul
from .support import assert_right, local_kernels, lowered, nodes, outline, text

MESH = {"x": 2, "y": 2}
ALL_REDUCE = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
REDUCE_SCATTER = {**ALL_REDUCE, "C": {"x": 0, "y": 1}}
BLOCK = 16


def example(M, N, K, block=BLOCK):
    """The kernel in global view."""

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float16"),
        B: T.Tensor((K, N), "float16"),
        bias: T.Tensor((N,), "float32"),
        C: T.Tensor((M, N), "float16"),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_s = T.alloc_shared((block, block), "float16")
            B_s = T.alloc_shared((block, block), "float16")
            acc = T.alloc_fragment((block, block), "float32")
            out = T.alloc_fragment((block, block), "float16")
            for i, j in T.Parallel(block, block):
                acc[i, j] = bias[bx * block + j]
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_s)
                T.copy(B[ko * block, bx * block], B_s)
                T.gemm(A_s, B_s, acc)
            for i, j in T.Parallel(block, block):
                out[i, j] = gelu(acc[i, j])
            T.copy(out, C[by * block, bx * block])

    return kernel.with_attr("global_symbol", "example")


def first_local(M, N, K, block=BLOCK):
    """What a device with an (M, K) tile of A runs before the collective."""

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float16"),
        B: T.Tensor((K, N), "float16"),
        bias: T.Tensor((N,), "float32"),
        W: T.Tensor((M, N), "float32"),
        y: T.int32,
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_s = T.alloc_shared((block, block), "float16")
            B_s = T.alloc_shared((block, block), "float16")
            acc = T.alloc_fragment((block, block), "float32")
            for i, j in T.Parallel(block, block):
                acc[i, j] = T.if_then_else(y == 0, bias[bx * block + j], T.float32(0))
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_s)
                T.copy(B[ko * block, bx * block], B_s)
                T.gemm(A_s, B_s, acc)
            T.copy(acc, W[by * block, bx * block])

    return kernel.with_attr("global_symbol", "example_0")


def second_local(M, N, block=BLOCK):
    """What a device with an (M, N) tile of C runs after it."""

    @T.prim_func
    def kernel(C: T.Tensor((M, N), "float16"), W: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            acc = T.alloc_fragment((block, block), "float32")
            out = T.alloc_fragment((block, block), "float16")
            T.copy(W[by * block, bx * block], acc)
            for i, j in T.Parallel(block, block):
                out[i, j] = gelu(acc[i, j])
            T.copy(out, C[by * block, bx * block])

    return kernel.with_attr("global_symbol", "example_1")


def test_the_rule():
    assert str(mt.sharding_rule(example(64, 64, 64))) == ("A[m, k], B[k, n], bias[n] -> C[m, n]; m, n parallel; k sum")


def test_with_an_all_reduce():
    result = lowered(example(64, 48, 96), MESH, ALL_REDUCE)
    assert outline(result) == ["kernel(A, B, bias, acc_w1)", "all_reduce(acc_w1, sum, y)", "kernel(C, acc_w1.1)"]
    first, second = local_kernels(result)
    ir.assert_structural_equal(first, first_local(32, 48, 48))
    ir.assert_structural_equal(second, second_local(32, 48))


def test_with_a_reduce_scatter():
    result = lowered(example(64, 64, 96), MESH, REDUCE_SCATTER)
    assert outline(result) == [
        "kernel(A, B, bias, acc_w1)",
        "reduce_scatter(acc_w1, dim 1, sum, y)",
        "kernel(C, acc_w1.1)",
    ]
    first, second = local_kernels(result)
    ir.assert_structural_equal(first, first_local(32, 64, 48))
    ir.assert_structural_equal(second, second_local(32, 32))


def test_the_local_view_as_one_function():
    (func,) = mt.lower(mt.annotate(example(64, 48, 96), MESH, ALL_REDUCE)).functions.values()
    blocks = [block.name_hint for block in nodes(func, type(func.body.block))]
    assert blocks == ["tilelang_root", "all_reduce", "tilelang_root", "root"]
    assert text(func).count("T.mesh.all_reduce(") == 1
    assert "acc_w1 = T.sblock_alloc_buffer((32, 48), strides=(48, 1))" in text(func), "a float32 workspace"


@pytest.mark.parametrize(("layouts", "kind"), [(ALL_REDUCE, "all_reduce"), (REDUCE_SCATTER, "reduce_scatter")])
def test_the_program(layouts, kind):
    steps = lower_to_program(mt.annotate(example(64, 64, 96), MESH, layouts)).steps
    expected = {
        "all_reduce": [AllocStep, KernelStep, CollectiveStep, AllocStep, KernelStep, FreeStep],
        "reduce_scatter": [AllocStep, KernelStep, AllocStep, CollectiveStep, FreeStep, AllocStep, KernelStep, FreeStep],
    }
    assert [type(step) for step in steps] == expected[kind]
    (collective,) = (step for step in steps if isinstance(step, CollectiveStep))
    assert (collective.kind, collective.op, collective.axes) == (kind, "sum", ("y",))
    sent = {"all_reduce": 2 * 1 / 2, "reduce_scatter": 1 / 2}[kind]
    assert collective.bytes == sent * 32 * 64 * 4


def test_without_gelu_and_bias_the_output_is_reduced_in_place():
    result = lowered(matmul(64, 48, 96), MESH, ALL_REDUCE)
    assert outline(result) == ["kernel(A, B, C)", "all_reduce(C, sum, y)"]


def reference(a, b, bias):
    return torch.nn.functional.gelu(a.double() @ b.double() + bias.double(), approximate="tanh")


@pytest.mark.parametrize("layouts", [ALL_REDUCE, REDUCE_SCATTER], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("sizes", [(64, 64, 96), (33, 50, 41), (1, 1, 1), (5, 3, 2)], ids=str)
@pytest.mark.parametrize("mesh", [MESH, {"x": 1, "y": 3}, {"x": 3, "y": 2}], ids=str)
def test_numbers(layouts, sizes, mesh):
    M, N, K = sizes
    inputs = [torch.randn(M, K).half(), torch.randn(K, N).half(), torch.randn(N)]
    assert_right(example(M, N, K), mesh, layouts, inputs, reference, rtol=2e-3, atol=2e-3)
