"""CUDA code is generated, and compiled where nvcc is found, without a GPU; where there is one, it runs."""

import shutil

import pytest
import tilelang.language as T
import torch

from mesh_tensor.runtime.cuda import compile_for_cuda, cuda_binary, cuda_source


def matmul(M, N, K, dtype="float16", block=(64, 64, 32)):
    bM, bN, bK = block

    @T.prim_func
    def matmul_kernel(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, bN), T.ceildiv(M, bM), threads=128) as (bx, by):
            A_shared = T.alloc_shared((bM, bK), dtype)
            B_shared = T.alloc_shared((bK, bN), dtype)
            acc = T.alloc_fragment((bM, bN), "float32")
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(K, bK), num_stages=2):
                T.copy(A[by * bM, ko * bK], A_shared)
                T.copy(B[ko * bK, bx * bN], B_shared)
                T.gemm(A_shared, B_shared, acc)
            T.copy(acc, C[by * bM, bx * bN])

    return matmul_kernel


@pytest.mark.parametrize(("arch", "instruction"), [("sm_80", "mma_sync"), ("sm_90a", "wgmma")])
def test_source_of_a_matmul(arch, instruction):
    source = cuda_source(matmul(256, 256, 128), arch)
    assert "matmul_kernel" in source
    assert "__global__" in source
    assert instruction in source


def test_a_matmul_compiles_to_machine_code():
    if shutil.which("nvcc") is None:
        assert "__global__" in cuda_source(matmul(256, 256, 128))
        return
    for arch in ("sm_80", "sm_90a"):
        binary = cuda_binary(matmul(256, 256, 128), arch)
        assert binary[:4] == b"\x7fELF"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_matmul_runs():
    A = torch.randn(250, 120, device="cuda", dtype=torch.float16)
    B = torch.randn(120, 130, device="cuda", dtype=torch.float16)
    C = torch.empty(250, 130, device="cuda")
    compile_for_cuda(matmul(250, 130, 120))(A, B, C)
    torch.testing.assert_close(C, A.float() @ B.float(), rtol=1e-2, atol=1e-2)
