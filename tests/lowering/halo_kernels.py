"""Kernels of which every position reads a bounded window of another tensor, with what they compute in torch."""

import tilelang.language as T
import torch
import torch.nn.functional as F


def stencil(n, block=8):
    """`B[x] = A[x - 1] + A[x] + A[x + 1]`, with zeros outside."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=8) as bx:
            for i in T.Parallel(block):
                x = bx * block + i
                if x < n:
                    B[x] = T.if_then_else(x > 0, A[x - 1], 0) + A[x] + T.if_then_else(x < n - 1, A[x + 1], 0)

    return kernel


def stencil_reference(a):
    padded = F.pad(a, (1, 1))
    return padded[:-2] + padded[1:-1] + padded[2:]


def indexed(index, n, m, block=8):
    """`B[x] = A[index(x)]`, of n and m elements."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, block), threads=8) as bx:
            for i in T.Parallel(block):
                if bx * block + i < m:
                    B[bx * block + i] = A[index(bx * block + i)]

    return kernel


def staged(n, block=8):
    """`B[x] = A[x] + 2 * A[x + 1] + 3 * A[x + 2]`, from blocks that are copied with their margins."""

    @T.prim_func
    def kernel(A: T.Tensor((n + 2,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=8) as bx:
            rows = T.alloc_shared((block + 2,), "float32")
            T.copy(A[bx * block : bx * block + block + 2], rows)
            for i in T.Parallel(block):
                B[bx * block + i] = rows[i] + 2 * rows[i + 1] + 3 * rows[i + 2]

    return kernel


def max_pool(n, block=8):
    """`B[x] = max(A[2 * x], A[2 * x + 1])`, by blocks on chip."""

    @T.prim_func
    def kernel(A: T.Tensor((2 * n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=8) as bx:
            rows = T.alloc_shared((2 * block,), "float32")
            out = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * 2 * block], rows)
            for i in T.Parallel(block):
                out[i] = T.max(rows[2 * i], rows[2 * i + 1])
            T.copy(out, B[bx * block])

    return kernel


def convolution_2d(height, width, size=3, stride=1, block_h=4, block_w=8):
    """`O[y, x] = sum_rc A[stride * y + r, stride * x + c] * K[r, c]`."""
    rows, columns = (height - size) // stride + 1, (width - size) // stride + 1

    @T.prim_func
    def kernel(
        A: T.Tensor((height, width), "float32"),
        K: T.Tensor((size, size), "float32"),
        O: T.Tensor((rows, columns), "float32"),  # noqa: E741
    ):
        with T.Kernel(T.ceildiv(columns, block_w), T.ceildiv(rows, block_h), threads=32) as (bx, by):
            out = T.alloc_fragment((block_h, block_w), "float32")
            T.clear(out)
            for r in T.serial(size):
                for c in T.serial(size):
                    for i, j in T.Parallel(block_h, block_w):
                        if by * block_h + i < rows and bx * block_w + j < columns:
                            out[i, j] += A[(by * block_h + i) * stride + r, (bx * block_w + j) * stride + c] * K[r, c]
            T.copy(out, O[by * block_h, bx * block_w])

    return kernel


def convolution_reference(a, k, stride):
    return F.conv2d(a[None, None].double(), k[None, None].double(), stride=stride)[0, 0].float()


def sliding_attention(seq, dim, window, block=8):
    """Attention of every position to itself and the `window - 1` positions before it; blocks of keys out of its reach
    are skipped."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((seq, dim), "float32"),
        K: T.Tensor((seq, dim), "float32"),
        V: T.Tensor((seq, dim), "float32"),
        O: T.Tensor((seq, dim), "float32"),  # noqa: E741
    ):
        with T.Kernel(T.ceildiv(seq, block), threads=32) as bx:
            q = T.alloc_shared((block, dim), "float32")
            k = T.alloc_shared((block, dim), "float32")
            v = T.alloc_shared((block, dim), "float32")
            p = T.alloc_shared((block, block), "float32")
            scores = T.alloc_fragment((block, block), "float32")
            out = T.alloc_fragment((block, dim), "float32")
            total = T.alloc_fragment((block,), "float32")
            part = T.alloc_fragment((block,), "float32")
            T.copy(Q[bx * block : (bx + 1) * block, :], q)
            T.clear(out)
            T.clear(total)
            start = T.max(0, (bx * block - window) // block)
            for ko in T.serial(bx + 1 - start):
                T.copy(K[(ko + start) * block : (ko + start + 1) * block, :], k)
                T.copy(V[(ko + start) * block : (ko + start + 1) * block, :], v)
                T.clear(scores)
                T.gemm(q, k, scores, transpose_B=True)
                for i, j in T.Parallel(block, block):
                    behind = bx * block + i - ((ko + start) * block + j)
                    scores[i, j] = T.if_then_else(behind >= 0 and behind < window, T.exp(scores[i, j]), 0)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(block):
                    total[i] += part[i]
                T.copy(scores, p)
                T.gemm(p, v, out)
            for i, j in T.Parallel(block, dim):
                out[i, j] = out[i, j] / total[i]
            T.copy(out, O[bx * block : (bx + 1) * block, :])

    return kernel


def sliding_reference(q, k, v, window):
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    scores = (q.double() @ k.double().T).masked_fill((behind < 0) | (behind >= window), -torch.inf)
    return (scores.softmax(-1) @ v.double()).float()
