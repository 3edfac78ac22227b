"""Clause 2: what an accumulator starts from counts once, not once per device."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

import mesh_tensor as mt

from .support import assert_right, coordinates, local_kernels, lowered, outline, run, text


def bias_first(M, N, K, block=16):
    """C = A @ B + bias; the accumulator starts as the bias."""

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float32"),
        B: T.Tensor((K, N), "float32"),
        bias: T.Tensor((N,), "float32"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            for i, j in T.Parallel(block, block):
                C_local[i, j] = bias[bx * block + j]
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return kernel


def bias_first_local(M, N, K, block=16):
    """What a device runs of `bias_first` with a split k: the bias on the first device only."""

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float32"),
        B: T.Tensor((K, N), "float32"),
        bias: T.Tensor((N,), "float32"),
        C: T.Tensor((M, N), "float32"),
        x: T.int32,
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            for i, j in T.Parallel(block, block):
                C_local[i, j] = T.if_then_else(x == 0, bias[bx * block + j], T.float32(0))
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return kernel


K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}}


def test_the_bias_is_added_on_the_first_device_only():
    result = lowered(bias_first(32, 48, 64), {"x": 2}, K_SPLIT)
    assert outline(result) == ["kernel(A, B, bias, C)", "all_reduce(C, sum, x)"]
    ir.assert_structural_equal(local_kernels(result)[0], bias_first_local(32, 48, 32))


def test_on_the_first_device_of_every_axis_that_splits_it():
    layouts = {"A": {"x": 1, "y": 1}, "B": {"x": 0, "y": 0}}
    (kernel,) = local_kernels(lowered(bias_first(32, 48, 64), {"x": 2, "y": 2}, layouts))
    assert "if_then_else(x == 0 and y == 0, bias[" in text(kernel)


def test_without_a_split_reduction_nothing_is_gated():
    (kernel,) = local_kernels(lowered(bias_first(32, 48, 64), {"x": 2}, {"A": {"x": 0}, "C": {"x": 0}}))
    assert coordinates(kernel) == []
    assert "if_then_else" not in text(kernel)


@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("sizes", [(32, 48, 64), (13, 21, 19)], ids=str)
def test_bias_numbers(mesh, sizes):
    M, N, K = sizes
    layouts = {"A": dict.fromkeys(mesh, 1), "B": dict.fromkeys(mesh, 0)}
    inputs = [torch.randn(M, K), torch.randn(K, N), torch.randn(N)]
    assert_right(bias_first(M, N, K), mesh, layouts, inputs, lambda a, b, c: a.double() @ b.double() + c.double())


# -- clear=False -------------------------------------------------------------------------------------------------------


def onto(start, reduce, M=16, N=40, block=8):
    """B[m] = reduce of A[m, :] onto `start`."""

    @T.prim_func
    def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
            a = T.alloc_fragment((block, N), "float32")
            b = T.alloc_fragment((block,), "float32")
            T.fill(b, start)
            T.copy(A[bx * block, 0], a)
            reduce(a, b, dim=1, clear=False)
            T.copy(b, B[bx * block])

    return kernel


def test_a_fill_that_is_not_neutral_is_neutral_on_the_other_devices():
    first = local_kernels(lowered(onto(5.0, T.reduce_sum), {"x": 2}, {"A": {"x": 1}}))[0]
    assert coordinates(first) == ["x"]
    lines = [line.strip() for line in text(first).splitlines()]
    at = lines.index("if x == 0:")
    assert "T.float32(5.0)" in lines[at + 1]
    assert lines[at + 2] == "else:"
    assert "T.float32(0.0)" in lines[at + 3]


def test_a_start_of_a_maximum_may_count_on_every_device():
    (first, *_) = local_kernels(lowered(onto(5.0, T.reduce_max), {"x": 2}, {"A": {"x": 1}}))
    assert coordinates(first) == []


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    ("reduce", "reference"),
    [
        (T.reduce_sum, lambda a: a.double().sum(1) + 1.25),
        (T.reduce_max, lambda a: a.amax(1).clamp(min=1.25)),
        (T.reduce_min, lambda a: a.amin(1).clamp(max=1.25)),
    ],
    ids=["sum", "max", "min"],
)
def test_start_numbers(reduce, reference, devices):
    assert_right(onto(1.25, reduce), {"x": devices}, {"A": {"x": 1}}, [torch.randn(16, 40)], reference)


# -- in-out buffers ----------------------------------------------------------------------------------------------------


def histogram(op):
    """B[j] op= A[i, j], atomically."""
    atomic = {"sum": T.atomic_add, "max": T.atomic_max, "min": T.atomic_min}[op]

    @T.prim_func
    def kernel(A: T.Tensor((32, 16), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(4, threads=16) as bx:
            for i, j in T.Parallel(8, 16):
                atomic(B[j], A[bx * 8 + i, j])

    return kernel


def test_what_is_added_to_comes_in_on_one_device():
    result = lowered(histogram("sum"), {"x": 2}, {"A": {"x": 0}})
    assert outline(result) == ["to_partial(B, sum, x)", "kernel(A, B.1)", "all_reduce(B.1, sum, x)"]


def test_what_a_maximum_is_taken_with_comes_in_everywhere():
    result = lowered(histogram("max"), {"x": 2}, {"A": {"x": 0}})
    assert [step.split("(")[0] for step in outline(result)] == ["kernel", "all_reduce"]


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("layout", [{}, {"x": 0}], ids=["replicated", "sharded"])
@pytest.mark.parametrize(
    ("op", "reference"),
    [
        ("sum", lambda a, b: b.double() + a.double().sum(0)),
        ("max", lambda a, b: torch.maximum(b, a.amax(0))),
        ("min", lambda a, b: torch.minimum(b, a.amin(0))),
    ],
    ids=["sum", "max", "min"],
)
def test_in_out_numbers(op, reference, layout, mesh):
    a, b = torch.randn(32, 16), torch.randn(16)
    expected = reference(a, b)
    layouts = {"A": dict.fromkeys(mesh, 0), "B": layout}
    torch.testing.assert_close(run(histogram(op), mesh, layouts, a, b), expected.float())
    torch.testing.assert_close(b, expected.float(), msg="b is updated where it is")


@pytest.mark.parametrize("devices", [2, 3])
def test_an_accumulator_loaded_from_the_output(devices):
    """C += A @ B with C copied into the accumulator first."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 48), "float32"), B: T.Tensor((48, 16), "float32"), C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=128):
            A_shared = T.alloc_shared((16, 16), "float32")
            B_shared = T.alloc_shared((16, 16), "float32")
            C_local = T.alloc_fragment((16, 16), "float32")
            T.copy(C, C_local)
            for ko in T.Pipelined(3, num_stages=2):
                T.copy(A[0, ko * 16], A_shared)
                T.copy(B[ko * 16, 0], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C)

    a, b, c = torch.randn(16, 48), torch.randn(48, 16), torch.randn(16, 16)
    expected = c.double() + a.double() @ b.double()
    assert mt.sharding_rule(kernel).inputs["C"] == ("m", "n")
    result = run(kernel, {"x": devices}, K_SPLIT, a, b, c)
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-5)
