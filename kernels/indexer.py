"""What a small attention with shared keys finds of every key: which ones sparse attention looks at."""

import tilelang.language as T
import torch


def index_scores(M, N, heads=4, dim=16, block_M=8, block_N=16):
    """`S[m, n] = sum_h W[m, h] * relu(Q[m, h] . K[n])`: the heads of a block of rows are multiplied as rows of one
    matrix, and the product is viewed with a dim of heads, to be reduced along it."""

    @T.prim_func
    def index_scores_kernel(
        Q: T.Tensor((M * heads, dim), "float32"),
        K: T.Tensor((N, dim), "float32"),
        W: T.Tensor((M, heads), "float32"),
        S: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            Q_shared = T.alloc_shared((block_M * heads, dim), "float32")
            K_shared = T.alloc_shared((block_N, dim), "float32")
            W_local = T.alloc_fragment((block_M, heads), "float32")
            products = T.alloc_fragment((block_M * heads, block_N), "float32")
            of_heads = T.reshape(products, (block_M, heads, block_N))
            scores = T.alloc_fragment((block_M, block_N), "float32")
            T.copy(Q[bx * block_M * heads, 0], Q_shared)
            T.copy(W[bx * block_M, 0], W_local)
            for n in T.Pipelined(T.ceildiv(N, block_N), num_stages=2):
                T.copy(K[n * block_N, 0], K_shared)
                T.gemm(Q_shared, K_shared, products, transpose_B=True, clear_accum=True)
                for i, h, j in T.Parallel(block_M, heads, block_N):
                    of_heads[i, h, j] = T.max(of_heads[i, h, j], 0.0) * W_local[i, h]
                T.reduce_sum(of_heads, scores, dim=1)
                T.copy(scores, S[bx * block_M, n * block_N])

    return index_scores_kernel


def index_scores_reference(q, k, w):
    """The same of whole tensors."""
    products = torch.relu(q.double() @ k.double().T).reshape(*w.shape, len(k))
    return (products * w.double()[..., None]).sum(1).to(q.dtype)
