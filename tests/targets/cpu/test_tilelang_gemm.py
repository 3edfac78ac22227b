"""The micro-kernel in kernels that TileLang compiles for target "c" on its own."""

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


def matmul(n, block, dtype, trans_A, trans_B):
    @T.prim_func
    def matmul_kernel(A: T.Tensor((n, n), dtype), B: T.Tensor((n, n), dtype), C: T.Tensor((n, n), dtype)):
        with T.Kernel(n // block, n // block, threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), dtype, scope="shared")
            B_shared = T.alloc_shared((block, block), dtype, scope="shared")
            acc = T.alloc_local((block, block), dtype)
            T.clear(acc)
            for ko in T.serial(n // block):
                if trans_A:
                    T.copy(A[ko * block, by * block], A_shared)
                else:
                    T.copy(A[by * block, ko * block], A_shared)
                if trans_B:
                    T.copy(B[bx * block, ko * block], B_shared)
                else:
                    T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, acc, trans_A, trans_B)
            T.copy(acc, C[by * block, bx * block])

    return matmul_kernel


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize(("trans_A", "trans_B"), [(False, False), (False, True), (True, False), (True, True)])
def test_products(flags, dtype, trans_A, trans_B):
    A, B = ((torch.randn(96, 96) * 5).to(getattr(torch, dtype)) for _ in range(2))
    C = torch.empty_like(A)
    func = matmul(96, 48, dtype, trans_A, trans_B)
    kernel = tilelang.compile(func, target="c", execution_backend="cython", compile_flags=flags)
    kernel(A, B, C)
    expected = (A.T if trans_A else A).double() @ (B.T if trans_B else B).double()
    torch.testing.assert_close(C.double(), expected, rtol=1e-5, atol=1e-3)
    assert (f"mt_gemm_{dtype}" in kernel.get_kernel_source()) == (dtype != "int32")
