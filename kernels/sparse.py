"""Products of which parts are left out, or that are many small ones: masks of blocks, groups of rows."""

import math

import tilelang.language as T
import torch


def block_sparse_matmul(M, N, K, block_M=16, block_N=16, block_K=16, swizzle=False):
    """`C = A @ B` where of every block of C only the blocks of k count that `mask` has."""

    @T.prim_func
    def block_sparse_matmul_kernel(
        A: T.Tensor((M, K), "float32"),
        B: T.Tensor((K, N), "float32"),
        mask: T.Tensor((T.ceildiv(M, block_M), T.ceildiv(N, block_N), T.ceildiv(K, block_K)), "bool"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.use_swizzle(panel_size=10, enable=swizzle)
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                if mask[by, bx, k]:
                    T.copy(A[by * block_M, k * block_K], A_shared)
                    T.copy(B[k * block_K, bx * block_N], B_shared)
                    T.gemm(A_shared, B_shared, total)
            T.copy(total, C[by * block_M, bx * block_N])

    return block_sparse_matmul_kernel


def block_sparse_matmul_reference(a, b, mask, block=16):
    """The same by blocks of k, in float64."""
    m, n = a.shape[0], b.shape[1]
    total = torch.zeros(m, n, dtype=torch.float64)
    for k in range(mask.shape[2]):
        part = slice(k * block, (k + 1) * block)
        counts = mask[:, :, k].repeat_interleave(block, 0)[:m].repeat_interleave(block, 1)[:, :n]
        total += counts * (a[:, part].double() @ b[part].double())
    return total.float()


def grouped_matmul_rows(groups, rows, N, K, block_M=16, block_N=16, block_K=16):
    """`C[i] = A[i] @ B[g]` for the rows i of group g, which start at `offsets[g]`: a program looks up its group."""
    starts = groups + 1

    @T.prim_func
    def grouped_matmul_rows_kernel(
        A: T.Tensor((rows, K), "float32"),
        B: T.Tensor((groups, K, N), "float32"),
        offsets: T.Tensor((starts,), "int32"),
        C: T.Tensor((rows, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, block_M), groups, T.ceildiv(N, block_N), threads=128) as (bx, by, bz):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            first = offsets[by]
            last = offsets[by + 1]
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[first + bx * block_M, k * block_K], A_shared)
                T.copy(B[by, k * block_K, bz * block_N], B_shared)
                T.gemm(A_shared, B_shared, total)
            for i, j in T.Parallel(block_M, block_N):
                if (first + bx * block_M + i < last) & (bz * block_N + j < N):
                    C[first + bx * block_M + i, bz * block_N + j] = total[i, j]

    return grouped_matmul_rows_kernel


def grouped_matmul_rows_reference(a, b, offsets):
    """Group by group."""
    starts = offsets.tolist()
    return torch.cat([a[i:j] @ b[g] for g, (i, j) in enumerate(zip(starts, starts[1:], strict=False))])


def padded_grouped_matmul(groups, rows, N, K, block_M=16, block_N=16, block_K=16):
    """The same where every group's rows are padded to whole blocks: `group_of` is the group of a block of rows."""

    @T.prim_func
    def padded_grouped_matmul_kernel(
        A: T.Tensor((rows, K), "float32"),
        B: T.Tensor((groups, K, N), "float32"),
        group_of: T.Tensor((T.ceildiv(rows, block_M),), "int32"),
        C: T.Tensor((rows, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, block_M), T.ceildiv(N, block_N), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            group = group_of[bx]
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[bx * block_M, k * block_K], A_shared)
                T.copy(B[group, k * block_K, by * block_N], B_shared)
                T.gemm(A_shared, B_shared, total)
            T.copy(total, C[bx * block_M, by * block_N])

    return padded_grouped_matmul_kernel


def padded_grouped_matmul_reference(a, b, group_of, block=16):
    """Block by block."""
    return torch.cat([part @ b[g] for part, g in zip(a.split(block), group_of.tolist(), strict=True)])


def expert_mlp(experts, tokens, hidden, model, block_M=16, block_N=16, block_K=16):
    """Both layers of a mixture's experts in one function: the second grid reads what the first one left in `up`."""

    @T.prim_func
    def expert_mlp_kernel(
        X: T.Tensor((experts, tokens, model), "float32"),
        W1: T.Tensor((experts, model, hidden), "float32"),
        W2: T.Tensor((experts, hidden, model), "float32"),
        up: T.Tensor((experts, tokens, hidden), "float32"),
        Y: T.Tensor((experts, tokens, model), "float32"),
    ):
        with T.Kernel(T.ceildiv(hidden, block_N), T.ceildiv(tokens, block_M), experts, threads=128) as (bx, by, bz):
            X_shared = T.alloc_shared((block_M, block_K), "float32")
            W_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(model, block_K), num_stages=2):
                T.copy(X[bz, by * block_M, k * block_K], X_shared)
                T.copy(W1[bz, k * block_K, bx * block_N], W_shared)
                T.gemm(X_shared, W_shared, total)
            for i, j in T.Parallel(block_M, block_N):
                total[i, j] = total[i, j] * T.sigmoid(total[i, j])
            T.copy(total, up[bz, by * block_M, bx * block_N])
        with T.Kernel(T.ceildiv(model, block_N), T.ceildiv(tokens, block_M), experts, threads=128) as (bx, by, bz):
            up_shared = T.alloc_shared((block_M, block_K), "float32")
            W_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(hidden, block_K), num_stages=2):
                T.copy(up[bz, by * block_M, k * block_K], up_shared)
                T.copy(W2[bz, k * block_K, bx * block_N], W_shared)
                T.gemm(up_shared, W_shared, total)
            T.copy(total, Y[bz, by * block_M, bx * block_N])

    return expert_mlp_kernel


def expert_mlp_reference(x, w1, w2):
    """What both grids leave: `up` and `Y`."""
    up = torch.nn.functional.silu(x @ w1)
    return up, up @ w2


def scaled_grouped_matmul(groups, rows, N, K, block_M=16, block_N=16, block_K=16):
    """`C = relu(A @ B[g] * scale[g])`: a block's group is looked up before the loop, its scale after it."""

    @T.prim_func
    def scaled_grouped_matmul_kernel(
        A: T.Tensor((rows, K), "float32"),
        B: T.Tensor((groups, K, N), "float32"),
        group_of: T.Tensor((T.ceildiv(rows, block_M),), "int32"),
        scale: T.Tensor((groups,), "float32"),
        C: T.Tensor((rows, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, block_M), T.ceildiv(N, block_N), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            group = group_of[bx]
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[bx * block_M, k * block_K], A_shared)
                T.copy(B[group, k * block_K, by * block_N], B_shared)
                T.gemm(A_shared, B_shared, total)
            for i, j in T.Parallel(block_M, block_N):
                total[i, j] = T.max(total[i, j] * scale[group], 0)
            T.copy(total, C[bx * block_M, by * block_N])

    return scaled_grouped_matmul_kernel


def scaled_grouped_matmul_reference(a, b, group_of, scale, block=16):
    """Block by block."""
    parts = zip(a.split(block), group_of.tolist(), strict=True)
    return torch.cat([(part @ b[g] * scale[g]).relu() for part, g in parts])


def searched_grouped_matmul(groups, rows, N, K, block_M=16, block_N=16, block_K=16):
    """`C = relu(A @ B[g])` for the rows of group g, `counts[g]` of them after those of the groups before it. Every
    program looks for its group, among groups that are padded to whole blocks."""

    @T.prim_func
    def searched_grouped_matmul_kernel(
        A: T.Tensor((rows, K), "float32"),
        B: T.Tensor((groups, K, N), "float32"),
        counts: T.Tensor((groups,), "int32"),
        C: T.Tensor((rows, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, block_M) + groups, T.ceildiv(N, block_N), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            group = T.alloc_var("int32")
            before = T.alloc_var("int32")
            before_padded = T.alloc_var("int32")
            seen = T.alloc_var("int32")
            seen_padded = T.alloc_var("int32")
            group = 0
            before = 0
            before_padded = 0
            seen = 0
            seen_padded = 0
            for g in range(groups):
                if bx * block_M >= seen_padded:
                    group = g
                    before = seen
                    before_padded = seen_padded
                seen = seen + counts[g]
                seen_padded = seen_padded + T.ceildiv(counts[g], block_M) * block_M
            first = before + bx * block_M - before_padded
            valid = T.max(0, T.min(block_M, before + counts[group] - first))
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[first : first + block_M, k * block_K : (k + 1) * block_K], A_shared)
                T.copy(B[group, k * block_K, by * block_N], B_shared)
                T.gemm(A_shared, B_shared, total)
            for i, j in T.Parallel(block_M, block_N):
                if (i < valid) & (by * block_N + j < N):
                    C[first + i, by * block_N + j] = T.max(total[i, j], 0)

    return searched_grouped_matmul_kernel


def searched_grouped_matmul_reference(a, b, counts):
    """Group by group."""
    return torch.cat([(part @ b[g]).relu() for g, part in enumerate(a.split(counts.tolist()))])


def block_sparse_attention(
    batch,
    heads,
    seq,
    dim,
    block=64,
    causal=False,
    behind=0,
    keys=None,
    lowest=None,
    dtype="float32",
    largest_of="all",
):
    """Attention over the blocks of keys that a mask names for every block of queries; with `causal`, a query sees keys
    up to so many `behind` it. `lowest`: what maxima are at least; `largest_of`: they are of all blocks, or the last."""
    scale = math.log2(math.e) / math.sqrt(dim)
    keys = keys or seq
    blocks = keys // block

    @T.prim_func
    def block_sparse_attention_kernel(
        Q: T.Tensor((batch, heads, seq, dim), dtype),
        K: T.Tensor((batch, heads, keys, dim), dtype),
        V: T.Tensor((batch, heads, keys, dim), dtype),
        mask: T.Tensor((batch, heads, seq // block, blocks), "bool"),
        Out: T.Tensor((batch, heads, seq, dim), dtype),
    ):
        with T.Kernel(seq // block, heads, batch, threads=128) as (bx, by, bz):
            Q_shared = T.alloc_shared((block, dim), dtype)
            K_shared = T.alloc_shared((block, dim), dtype)
            V_shared = T.alloc_shared((block, dim), dtype)
            scores = T.alloc_fragment((block, block), "float32")
            out = T.alloc_fragment((block, dim), "float32")
            largest = T.alloc_fragment((block,), "float32")
            before = T.alloc_fragment((block,), "float32")
            rescale = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            sums = T.alloc_fragment((block,), "float32")
            wanted = T.alloc_fragment((blocks,), "bool")
            T.copy(Q[bz, by, bx * block : (bx + 1) * block, :], Q_shared)
            T.copy(mask[bz, by, bx, :], wanted)
            T.clear(out)
            T.clear(sums)
            T.fill(largest, -T.infinity("float32"))
            for k in T.Pipelined(bx + 1 if causal else blocks, num_stages=1):
                if wanted[k] != 0:
                    T.copy(K[bz, by, k * block : (k + 1) * block, :], K_shared)
                    if causal:
                        for i, j in T.Parallel(block, block):
                            scores[i, j] = T.if_then_else(
                                bx * block + i >= k * block + j + behind, 0, -T.infinity("float32")
                            )
                    else:
                        T.clear(scores)
                    T.gemm(Q_shared, K_shared, scores, transpose_B=True)
                    T.copy(largest, before)
                    T.fill(largest, -T.infinity("float32"))
                    T.reduce_max(scores, largest, dim=1, clear=False)
                    if largest_of == "all":
                        for i in T.Parallel(block):
                            largest[i] = T.max(largest[i], before[i])
                    if lowest is not None:
                        for i in T.Parallel(block):
                            largest[i] = T.max(largest[i], lowest)
                    for i in T.Parallel(block):
                        rescale[i] = T.exp2((before[i] - largest[i]) * scale)
                    for i, j in T.Parallel(block, block):
                        scores[i, j] = T.exp2((scores[i, j] - largest[i]) * scale)
                    T.reduce_sum(scores, total, dim=1)
                    for i in T.Parallel(block):
                        sums[i] = sums[i] * rescale[i] + total[i]
                    for i, j in T.Parallel(block, dim):
                        out[i, j] *= rescale[i]
                    T.copy(V[bz, by, k * block : (k + 1) * block, :], V_shared)
                    T.gemm(scores, V_shared, out)
            for i, j in T.Parallel(block, dim):
                out[i, j] /= sums[i]
            T.copy(out, Out[bz, by, bx * block : (bx + 1) * block, :])

    return block_sparse_attention_kernel


def block_sparse_attention_reference(q, k, v, mask, causal=False, behind=0):
    """The same with all scores at once, in float64; rows that see nothing are NaN."""
    size = q.shape[2] // mask.shape[2]
    seen = mask.repeat_interleave(size, 2).repeat_interleave(size, 3)
    seen = seen.tril(-behind) if causal else seen
    scores = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v.double()).to(q.dtype)
