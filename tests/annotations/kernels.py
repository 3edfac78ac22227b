"""A matmul written by hand and with the helpers, for the tests of the frontend."""

import tilelang.language as T

from mesh_tensor.annotations.annotate import INFO_ATTR, MESH_ATTR, TILES_ATTR


def bare(func):
    """The function without what annotating adds to it."""
    return func.without_attr(INFO_ATTR).without_attr(MESH_ATTR).without_attr(TILES_ATTR)


def state(ndim, **metadata):
    return {"block_shape": (1,) * ndim, "program_id": None, "sharding": {}, **metadata}


def matmul_by_hand(M, N, K, block_M=32, block_N=16, block_K=8):
    @T.prim_func
    def matmul(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(B[ko * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return matmul


def matmul_by_helpers(M, N, K, fns, block_M=32, block_N=16, block_K=8):
    copy_block = fns["mesh_tensor_copy"]

    @T.prim_func
    def matmul(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        fns["annotate_mesh_tensor_info"](
            {
                A: {"block_shape": (block_M, block_K), "program_id": 0, "sharding": {"x": 0, "y": 1}},
                B: {"block_shape": (block_K, block_N), "program_id": None, "sharding": {"y": 0}},
                C: {"block_shape": (block_M, block_N), "program_id": (0, 1), "sharding": {"x": 0, "y": None}},
            }
        )
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                fns["mesh_tensor_copy"](A, A_shared, src_coord=(by, ko))
                copy_block(B, B_shared, src_coord=(ko, bx))
                T.gemm(A_shared, B_shared, C_local)
            copy_block(C_local, C, dst_coord=(by, bx))

    return matmul
