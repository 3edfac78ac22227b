"""The micro-kernel in kernels that TileLang compiles for target "c" on its own."""

import re

import pytest
import tilelang
import tilelang.language as T
import torch
from tilelang.cpu.op.gemm.gemm_scalar import GEMM_INST_SCALAR, GemmScalar
from tilelang.tileop.gemm.registry import register_gemm_impl

import mesh_tensor as mt


@pytest.fixture
def flags():
    yield mt.register_cpu_gemm()
    register_gemm_impl("cpu.scalar", GEMM_INST_SCALAR, lambda target: target.kind.name in ("c", "llvm"), GemmScalar)


N, BLOCK = 96, 48
WAYS = [(False, False), (False, True), (True, False), (True, True)]  # which operands are transposed
DTYPES = ["float32", "float64", "int32"]


@T.macro
def product(A, B, C, way: T.int32, bx, by):
    A_shared = T.alloc_shared((BLOCK, BLOCK), A.dtype, scope="shared")
    B_shared = T.alloc_shared((BLOCK, BLOCK), A.dtype, scope="shared")
    acc = T.alloc_local((BLOCK, BLOCK), A.dtype)
    T.clear(acc)
    for ko in T.serial(N // BLOCK):
        if WAYS[way][0]:
            T.copy(A[ko * BLOCK, by * BLOCK], A_shared)
        else:
            T.copy(A[by * BLOCK, ko * BLOCK], A_shared)
        if WAYS[way][1]:
            T.copy(B[bx * BLOCK, ko * BLOCK], B_shared)
        else:
            T.copy(B[ko * BLOCK, bx * BLOCK], B_shared)
        T.gemm(A_shared, B_shared, acc, *WAYS[way])
    T.copy(acc, C[way, by * BLOCK, bx * BLOCK])


@T.macro
def in_all_ways(A, B, C, bx, by):
    product(A, B, C, 0, bx, by)
    product(A, B, C, 1, bx, by)
    product(A, B, C, 2, bx, by)
    product(A, B, C, 3, bx, by)


@T.prim_func
def products(
    A: T.Tensor((N, N), DTYPES[0]),
    B: T.Tensor((N, N), DTYPES[0]),
    C: T.Tensor((4, N, N), DTYPES[0]),
    A_double: T.Tensor((N, N), DTYPES[1]),
    B_double: T.Tensor((N, N), DTYPES[1]),
    C_double: T.Tensor((4, N, N), DTYPES[1]),
    A_int: T.Tensor((N, N), DTYPES[2]),
    B_int: T.Tensor((N, N), DTYPES[2]),
    C_int: T.Tensor((4, N, N), DTYPES[2]),
):
    """All of them in one kernel, as each compilation takes seconds."""
    with T.Kernel(N // BLOCK, N // BLOCK, threads=128) as (bx, by):
        in_all_ways(A, B, C, bx, by)
        in_all_ways(A_double, B_double, C_double, bx, by)
        in_all_ways(A_int, B_int, C_int, bx, by)


def test_products(flags):
    dtypes = [getattr(torch, dtype) for dtype in DTYPES]
    given = [tuple((torch.randn(N, N) * 5).to(dtype) for _ in range(2)) for dtype in dtypes]
    made = [torch.empty(4, N, N, dtype=dtype) for dtype in dtypes]
    kernel = tilelang.compile(products, target="c", execution_backend="cython", compile_flags=flags)
    kernel(*[tensor for (A, B), C in zip(given, made, strict=True) for tensor in (A, B, C)])
    source = kernel.get_kernel_source()
    for dtype, (A, B), C in zip(DTYPES, given, made, strict=True):
        for result, (trans_A, trans_B) in zip(C, WAYS, strict=True):
            expected = (A.T if trans_A else A).double() @ (B.T if trans_B else B).double()
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-3)
        assert len(re.findall(rf"\bmt_gemm_{dtype}\w*\(\(", source)) == (0 if dtype == "int32" else len(WAYS))
