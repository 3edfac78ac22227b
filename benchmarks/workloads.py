"""What the benchmarks lower and run."""

from __future__ import annotations

import tilelang.language as T
from tilelang import tvm

import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.mlp import mlp_down, mlp_up

K_SPLIT = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
M_SPLIT = {"A": {"x": 0}, "C": {"x": 0}}
_BLOCKS = {"block_M": 512, "block_N": 256, "block_K": 256}


def matmul_on_grid(side: int, size: int = 8192) -> tvm.tirx.PrimFunc:
    """A square matmul with M split over x and K over y, on a mesh of `side` x `side` devices."""
    return mt.annotate(matmul(size, size, size), mt.Mesh({"x": side, "y": side}), K_SPLIT)


def matmul_for_c(size: int = 8192) -> tvm.tirx.PrimFunc:
    """The same matmul as TileLang itself compiles it for a CPU: with memory scopes that its back end knows."""

    @T.prim_func
    def matmul_kernel(
        A: T.Tensor((size, size), "float32"), B: T.Tensor((size, size), "float32"), C: T.Tensor((size, size), "float32")
    ):
        with T.Kernel(T.ceildiv(size, 64), T.ceildiv(size, 64), threads=128) as (bx, by):
            A_shared = T.alloc_shared((64, 32), "float32", scope="shared")
            B_shared = T.alloc_shared((32, 64), "float32", scope="shared")
            C_local = T.alloc_local((64, 64), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(size, 32), num_stages=2):
                T.copy(A[by * 64, ko * 32], A_shared)
                T.copy(B[ko * 32, bx * 64], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * 64, bx * 64])

    return matmul_kernel


def matmul_rows(size: int, devices: int) -> tuple[tvm.tirx.PrimFunc, tvm.tirx.PrimFunc]:
    """A square matmul unsharded, and with its rows split over `devices`."""
    kernel = matmul(size, size, size, block_M=128, block_N=128, block_K=128)
    return kernel, mt.annotate(kernel, mt.Mesh({"x": devices}), M_SPLIT)


def matmul_on_gpu(
    size: int, block_M: int, block_N: int, block_K: int, num_stages: int, threads: int
) -> tvm.tirx.PrimFunc:
    """A square bfloat16 matmul on a mesh of one device."""
    blocks = {"block_M": block_M, "block_N": block_N, "block_K": block_K}
    kernel = matmul(size, size, size, **blocks, num_stages=num_stages, threads=threads, dtype="bfloat16")
    return mt.annotate(kernel, mt.Mesh({"x": 1}), {"A": {}, "B": {}, "C": {}})


def matmul_k_split(size: int, devices: int, depth: int = 0) -> tvm.tirx.PrimFunc:
    """A matmul that contracts a split dim, in blocks for a CPU; square unless there is a `depth`."""
    kernel = matmul(size, size, depth or size, **_BLOCKS)
    return mt.annotate(kernel, mt.Mesh({"x": devices}), {"A": {"x": 1}, "B": {"x": 0}, "C": {}})


def matmul_gathered(size: int, devices: int, depth: int = 0) -> tvm.tirx.PrimFunc:
    """The same with the columns split, where A comes split along the dim that is contracted and has to be gathered."""
    kernel = matmul(size, size, depth or size, **_BLOCKS)
    return mt.annotate(kernel, mt.Mesh({"x": devices}), {"A": {"x": 1}, "B": {"x": 1}, "C": {"x": 1}})


def megatron_mlp(tokens: int, model: int, hidden: int, devices: int) -> tuple[tvm.tirx.PrimFunc, tvm.tirx.PrimFunc]:
    """Both kernels of a perceptron with its hidden features split over `devices`, in blocks for a CPU."""
    mesh = mt.Mesh({"x": devices})
    up = mlp_up(tokens, hidden, model, **_BLOCKS)
    down = mlp_down(tokens, hidden, model, **_BLOCKS)
    return (
        mt.annotate(up, mesh, {"x": {}, "w1": {"x": 1}, "h": {"x": 1}}),
        mt.annotate(down, mesh, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}),
    )


def chain(length: int, size: int = 256) -> tvm.tirx.PrimFunc:
    """An element-wise kernel of `length` statements, its rows split over x."""

    @T.prim_func
    def chain_kernel(A: T.Tensor((size, size), "float32"), B: T.Tensor((size, size), "float32")):
        with T.Kernel(T.ceildiv(size, 32), T.ceildiv(size, 32), threads=128) as (bx, by):
            tile = T.alloc_fragment((32, 32), "float32")
            T.copy(A[by * 32, bx * 32], tile)
            for _ in list(range(length)):  # a list: the loop is unrolled while the kernel is built
                for i, j in T.Parallel(32, 32):
                    tile[i, j] = tile[i, j] * 0.5 + A[by * 32 + i, bx * 32 + j]
            T.copy(tile, B[by * 32, bx * 32])

    return mt.annotate(chain_kernel, mt.Mesh({"x": 2, "y": 2}), {"A": {"x": 0}, "B": {"x": 0}})
