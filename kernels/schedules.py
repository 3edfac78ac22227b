"""The order in which blocks are computed, and hints to the compiler: what is computed stays the same."""

import tilelang.language as T
import torch


def hinted_matmul(M, N, K, block_M=16, block_N=16, block_K=16, registers=True):
    """A product with all that TileLang lets its users say about how it is compiled."""

    @T.prim_func
    def hinted_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.use_swizzle(panel_size=10)
            if registers:
                T.set_max_nreg(240, 1)
            else:
                T.disable_warp_group_reg_alloc()
            T.assume(by * block_M < M)
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                T.sync_threads()
                T.gemm(A_shared, B_shared, total)
                T.sync_threads()
            T.copy(total, C[by * block_M, bx * block_N])

    return hinted_matmul_kernel


def waves_matmul(M, N, K, block_M=16, block_N=16, block_K=16, programs=6, group=2, out_dtype="float32"):
    """A persistent kernel: every program takes blocks of C in waves, in groups of `group` rows of blocks."""
    rows, columns = -(-M // block_M), -(-N // block_N // group) * group

    @T.prim_func
    def waves_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N), out_dtype)):
        with T.Kernel(programs, threads=128) as pid:
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            for wave in T.serial(T.ceildiv(rows * columns, programs)):
                tile = programs * wave + pid
                by = tile // group % rows
                bx = tile % group + tile // group // rows * group
                if bx * block_N < N and by * block_M < M:
                    T.clear(total)
                    for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                        T.copy(A[by * block_M, k * block_K], A_shared)
                        T.copy(B[k * block_K, bx * block_N], B_shared)
                        T.gemm(A_shared, B_shared, total)
                    T.copy(total, C[by * block_M, bx * block_N])

    return waves_matmul_kernel


def waves_split_k(M, N, K, parts=4, block_M=16, block_N=16, block_K=16, programs=6):
    """`C = relu(A @ B)` in one launch: every program takes parts of the sums of blocks in waves, waits for all others,
    and adds up the parts of rows."""
    rows, columns, part = -(-M // block_M), -(-N // block_N), K // parts

    @T.prim_func
    def waves_split_k_kernel(
        A: T.Tensor((M, K)), B: T.Tensor((K, N)), partial: T.Tensor((parts, M, N)), C: T.Tensor((M, N))
    ):
        with T.Kernel(programs, threads=128) as pid:
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            row = T.alloc_fragment((N,), "float32")
            for wave in T.serial(T.ceildiv(rows * columns * parts, programs)):
                tile = programs * wave + pid
                at = tile % parts
                by = tile // parts % rows
                bx = tile // parts // rows
                if bx < columns:
                    T.clear(total)
                    for k in T.Pipelined(part // block_K, num_stages=2):
                        T.copy(A[by * block_M, at * part + k * block_K], A_shared)
                        T.copy(B[at * part + k * block_K, bx * block_N], B_shared)
                        T.gemm(A_shared, B_shared, total)
                    T.copy(total, partial[at, by * block_M : (by + 1) * block_M, bx * block_N : (bx + 1) * block_N])
            T.sync_grid()
            for wave in T.serial(T.ceildiv(M, programs)):
                m = programs * wave + pid
                if m < M:
                    T.clear(row)
                    for at in T.serial(parts):
                        for n in T.Parallel(N):
                            row[n] += partial[at, m, n]
                    for n in T.Parallel(N):
                        C[m, n] = T.max(row[n], 0)

    return waves_split_k_kernel


def waves_split_k_reference(a, b, parts=4):
    """Parts of the sums, and the whole, in float64."""
    a, b = a.double(), b.double()
    size = a.shape[1] // parts
    partial = torch.stack([x @ y for x, y in zip(a.split(size, 1), b.split(size), strict=True)])
    return partial.float(), partial.sum(0).relu().float()


def backwards_rows(M, N, block=16):
    """`B = 2 * A`, from the last block of rows to the first."""
    blocks = -(-M // block)

    @T.prim_func
    def backwards_rows_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
            tile = T.alloc_fragment((block, block), "float32")
            for step in T.serial(blocks):
                T.copy(A[(blocks - 1 - step) * block, bx * block], tile)
                for i, j in T.Parallel(block, block):
                    tile[i, j] = 2.0 * tile[i, j]
                T.copy(tile, B[(blocks - 1 - step) * block, bx * block])

    return backwards_rows_kernel


def running_sums(M, N, block_M=16):
    """`B[m, n] = A[m, 0] + ... + A[m, n]`."""

    @T.prim_func
    def running_sums_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            rows = T.alloc_shared((block_M, N), "float32")
            T.copy(A[bx * block_M, 0], rows)
            T.cumsum(rows, dim=1)
            T.copy(rows, B[bx * block_M, 0])

    return running_sums_kernel


def causal_product(rows, dim, block=16, start="row"):
    """`C = tril(S) @ V` (or `triu`, with `start` "row" or "on"): the loop over keys has bounds that depend on the rows;
    it goes on from the row's block ("on"), or back from it ("back")."""
    blocks = -(-rows // block)
    upper = start in ("row", "on")

    @T.prim_func
    def causal_product_kernel(S: T.Tensor((rows, rows)), V: T.Tensor((rows, dim)), C: T.Tensor((rows, dim))):
        with T.Kernel(blocks, threads=128) as by:
            S_shared = T.alloc_shared((block, block), "float32")
            V_shared = T.alloc_shared((block, dim), "float32")
            total = T.alloc_fragment((block, dim), "float32")
            first = by if start == "row" else 0
            last = blocks - by if start == "on" else blocks if upper else by + 1
            T.clear(total)
            for step in T.serial(first, last):
                k = by + step if start == "on" else by - step if start == "back" else step
                T.copy(S[by * block, k * block], S_shared)
                for i, j in T.Parallel(block, block):
                    if upper:
                        S_shared[i, j] = T.if_then_else(by * block + i <= k * block + j, S_shared[i, j], 0)
                    else:
                        S_shared[i, j] = T.if_then_else(by * block + i >= k * block + j, S_shared[i, j], 0)
                T.copy(V[k * block, 0], V_shared)
                T.gemm(S_shared, V_shared, total)
            T.copy(total, C[by * block, 0])

    return causal_product_kernel


def ragged_sums(batch, rows, N, block_M=16):
    """`C[b, n]` is the sum of `A[b, m, n]` over the first `lengths[b]` rows: the loop's extent is loaded."""

    @T.prim_func
    def ragged_sums_kernel(
        A: T.Tensor((batch, rows, N)), lengths: T.Tensor((batch,), "int32"), C: T.Tensor((batch, N))
    ):
        with T.Kernel(batch, threads=128) as bx:
            tile = T.alloc_fragment((block_M, N), "float32")
            total = T.alloc_fragment((N,), "float32")
            T.clear(total)
            length = lengths[bx]
            for k in T.serial(T.ceildiv(length, block_M)):
                T.copy(A[bx, k * block_M, 0], tile)
                for i, j in T.Parallel(block_M, N):
                    tile[i, j] = T.if_then_else(k * block_M + i < length, tile[i, j], 0)
                T.reduce_sum(tile, total, dim=0, clear=False)
            for j in T.Parallel(N):
                C[bx, j] = total[j]

    return ragged_sums_kernel


def scaled_mean_matmul(M, N, K, block_M=16, block_N=16, block_K=16):
    """`C = (A @ B) / D[0] + bias[n]`: a scalar is loaded before the loop and used behind it."""

    @T.prim_func
    def scaled_mean_matmul_kernel(
        A: T.Tensor((M, K)), B: T.Tensor((K, N)), D: T.Tensor((1,)), bias: T.Tensor((N,)), C: T.Tensor((M, N))
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            factor = T.alloc_var("float32")
            factor = 1.0 / D[0]
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, total)
            for i, j in T.Parallel(block_M, block_N):
                total[i, j] = T.tanh(total[i, j] * factor + bias[bx * block_N + j])
            T.copy(total, C[by * block_M, bx * block_N])

    return scaled_mean_matmul_kernel


def matmul_with_workspace(M, N, K, block_M=16, block_N=16, block_K=16):
    """A product whose signature has a tensor that this variant doesn't use."""

    @T.prim_func
    def matmul_with_workspace_kernel(
        A: T.Tensor((M, K)), B: T.Tensor((K, N)), workspace: T.Tensor((M, N)), C: T.Tensor((M, N))
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, total)
            T.copy(total, C[by * block_M, bx * block_N])

    return matmul_with_workspace_kernel


def chunk_sums(batch, chunks, heads, width, group=2, chunk=8):
    """`B[b, c * chunk + t, h, n]` is the sum of `A[b, c * chunk + s, h, n]` over s <= t, times `scale[b, h // group]`:
    one dim of the grid counts through batches, chunks and heads."""

    @T.prim_func
    def chunk_sums_kernel(
        A: T.Tensor((batch, chunks * chunk, heads, width)),
        scale: T.Tensor((batch, -(-heads // group))),
        B: T.Tensor((batch, chunks * chunk, heads, width)),
    ):
        with T.Kernel(batch * chunks * heads, threads=128) as at:
            b = at // (chunks * heads)
            c = at % (chunks * heads) // heads
            h = at % heads
            rows = T.alloc_shared((chunk, width), "float32")
            sums = T.alloc_shared((chunk, width), "float32")
            T.copy(A[b, c * chunk : (c + 1) * chunk, h, :], rows)
            for n in T.Parallel(width):
                sums[0, n] = rows[0, n] * scale[b, h // group]
            for t in T.serial(1, chunk):
                for n in T.Parallel(width):
                    sums[t, n] = sums[t - 1, n] + rows[t, n] * scale[b, h // group]
            T.copy(sums, B[b, c * chunk : (c + 1) * chunk, h, :])

    return chunk_sums_kernel


def chunk_sums_reference(a, scale, group=2, chunk=8):
    batch, rows, heads, width = a.shape
    scaled = a.double() * scale.double().repeat_interleave(group, 1)[:, None, :heads, None]
    return scaled.reshape(batch, rows // chunk, chunk, heads, width).cumsum(2).reshape(a.shape).float()
