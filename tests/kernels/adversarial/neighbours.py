"""Kernels whose elements come from, or go to, other positions than their own."""

import tilelang.language as T
import torch
import torch.nn.functional as F

from kernels.catalogue.case import EXACT, FLOAT32, KernelCase, integers, normal, tensors
from kernels.catalogue.sizes import MN

N_SIZES = ({"N": 48}, {"N": 37}, {"N": 5})


def stencil(N, block=8):
    """`B[n] = A[n - 1] + A[n] + A[n + 1]`, with zeros outside."""

    @T.prim_func
    def stencil_kernel(A: T.Tensor((N,)), B: T.Tensor((N,))):
        with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
            out = T.alloc_fragment((block,), "float32")
            for i in T.Parallel(block):
                if bx * block + i < N:
                    out[i] = A[bx * block + i]
                    if bx * block + i > 0:
                        out[i] += A[bx * block + i - 1]
                    if bx * block + i + 1 < N:
                        out[i] += A[bx * block + i + 1]
            for i in T.Parallel(block):
                if bx * block + i < N:
                    B[bx * block + i] = out[i]

    return stencil_kernel


def stencil_reference(a):
    padded = F.pad(a, (1, 1))
    return padded[1:-1] + padded[:-2] + padded[2:]


def stencil_2d(M, N, block=8):
    """The four neighbours' mean inside; the border keeps its values."""

    @T.prim_func
    def stencil_2d_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            for i, j in T.Parallel(block, block):
                m = by * block + i
                n = bx * block + j
                if m < M and n < N:
                    if m > 0 and m < M - 1 and n > 0 and n < N - 1:
                        B[m, n] = 0.25 * (A[m - 1, n] + A[m + 1, n] + A[m, n - 1] + A[m, n + 1])
                    else:
                        B[m, n] = A[m, n]

    return stencil_2d_kernel


def stencil_2d_reference(a):
    out = a.clone()
    if min(a.shape) > 2:
        out[1:-1, 1:-1] = 0.25 * (a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:])
    return out


def convolution(N, taps=3, block=8):
    """`B[n] = sum_t A[n + t] * weight[t]`, without padding: B is shorter than A."""

    @T.prim_func
    def convolution_kernel(A: T.Tensor((N,)), weight: T.Tensor((taps,)), B: T.Tensor((N - taps + 1,))):
        with T.Kernel(T.ceildiv(N - taps + 1, block), threads=128) as bx:
            out = T.alloc_fragment((block,), "float32")
            T.clear(out)
            for t in T.serial(taps):
                for i in T.Parallel(block):
                    if bx * block + i < N - taps + 1:
                        out[i] += A[bx * block + i + t] * weight[t]
            T.copy(out, B[bx * block])

    return convolution_kernel


def max_of_pairs(N, block=8):
    """`B[n] = max(A[2n], A[2n + 1])` for an even number of elements, the last odd one dropped."""

    @T.prim_func
    def max_of_pairs_kernel(A: T.Tensor((N,)), B: T.Tensor((N // 2,))):
        with T.Kernel(T.ceildiv(N // 2, block), threads=128) as bx:
            A_shared = T.alloc_shared((2 * block,), "float32")
            out = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * 2 * block], A_shared)
            for i in T.Parallel(block):
                out[i] = T.max(A_shared[2 * i], A_shared[2 * i + 1])
            T.copy(out, B[bx * block])

    return max_of_pairs_kernel


def _move(name, shape, source, in_shape=None):
    """A kernel that writes every element of its output from one element of its input: `B[m, n] = A[source(m, n)]`."""

    def build(M, N, block=8):
        rows, columns = shape(M, N)
        A_shape = in_shape(M, N) if in_shape else (M, N)

        @T.prim_func
        def move_kernel(A: T.Tensor(A_shape), B: T.Tensor((rows, columns))):
            with T.Kernel(T.ceildiv(columns, block), T.ceildiv(rows, block), threads=128) as (bx, by):
                for i, j in T.Parallel(block, block):
                    if by * block + i < rows and bx * block + j < columns:
                        B[by * block + i, bx * block + j] = A[source(by * block + i, bx * block + j, M, N)]

        return move_kernel.with_attr("global_symbol", name)

    return build


flip_rows = _move("flip_rows", lambda M, N: (M, N), lambda m, n, M, N: (M - 1 - m, n))
roll_columns = _move("roll_columns", lambda M, N: (M, N), lambda m, n, M, N: (m, (n + 1) % N))
downsample = _move("downsample", lambda M, N: (M // 2, N), lambda m, n, M, N: (2 * m, n))
repeat_rows = _move("repeat_rows", lambda M, N: (3 * M, N), lambda m, n, M, N: (m // 3, n))
skip_rows = _move("skip_rows", lambda M, N: (M - 2, N), lambda m, n, M, N: (m + 2, n))
reshape = _move("reshape", lambda M, N: (M, N), lambda m, n, M, N: (m * N + n,), in_shape=lambda M, N: (M * N,))
skew = _move("skew", lambda M, N: (M, N), lambda m, n, M, N: (m, (m + n) % N))


def diagonal(N, block=8):
    """`B[n] = A[n, n]`."""

    @T.prim_func
    def diagonal_kernel(A: T.Tensor((N, N)), B: T.Tensor((N,))):
        with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
            for i in T.Parallel(block):
                if bx * block + i < N:
                    B[bx * block + i] = A[bx * block + i, bx * block + i]

    return diagonal_kernel


def swap_seq_heads(batch, seq, heads, dim, block=8):
    """(batch, seq, heads, dim) becomes (batch, heads, seq, dim)."""

    @T.prim_func
    def swap_seq_heads_kernel(x: T.Tensor((batch, seq, heads, dim)), out: T.Tensor((batch, heads, seq, dim))):
        with T.Kernel(T.ceildiv(seq, block), heads, batch, threads=128) as (bx, by, bz):
            x_shared = T.alloc_shared((block, dim), "float32")
            T.copy(x[bz, bx * block : (bx + 1) * block, by, 0:dim], x_shared)
            T.copy(x_shared, out[bz, by, bx * block, 0])

    return swap_seq_heads_kernel


def concatenate(M, N, block=8):
    """`C = [A; B]`: two loops write two halves of one output."""

    @T.prim_func
    def concatenate_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N)), C: T.Tensor((2 * M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            for i, j in T.Parallel(block, block):
                if by * block + i < M and bx * block + j < N:
                    C[by * block + i, bx * block + j] = A[by * block + i, bx * block + j]
                    C[M + by * block + i, bx * block + j] = B[by * block + i, bx * block + j]

    return concatenate_kernel


def histogram(N, bins, block=8):
    """`counts[ids[n]] += 1`: positions that are written come from data."""

    @T.prim_func
    def histogram_kernel(ids: T.Tensor((N,), "int32"), counts: T.Tensor((bins,), "int32")):
        with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
            for i in T.Parallel(block):
                if bx * block + i < N:
                    T.atomic_add(counts[ids[bx * block + i]], 1)

    return histogram_kernel


def histogram_reference(ids, counts):
    return counts + torch.bincount(ids, minlength=counts.numel()).int()


def scatter_rows(tokens, N, block=8):
    """`out[ids[t], :] = x[t, :]`, where every id occurs once; the other half of `out` stays as it is."""

    @T.prim_func
    def scatter_rows_kernel(
        ids: T.Tensor((tokens,), "int32"), x: T.Tensor((tokens, N)), out: T.Tensor((2 * tokens, N))
    ):
        with T.Kernel(T.ceildiv(N, block), tokens, threads=128) as (bx, by):
            for j in T.Parallel(block):
                if bx * block + j < N:
                    out[ids[by], bx * block + j] = x[by, bx * block + j]

    return scatter_rows_kernel


def scatter_rows_reference(ids, x, out):
    return out.index_copy(0, ids.long(), x)


def _distinct_ids(generator, sizes):
    return torch.randperm(2 * sizes["tokens"], generator=generator)[: sizes["tokens"]].int()


def _vector_case(kernel, reference, tolerance=EXACT):
    return KernelCase(kernel.__name__, kernel, reference, N_SIZES, tensors(normal("N")), ("B",), tolerance)


def _move_case(name, build, reference, sizes=MN):
    return KernelCase(name, build, reference, sizes, tensors(normal("M N")), ("B",), EXACT)


NEIGHBOUR_CASES = (
    _vector_case(stencil, stencil_reference, FLOAT32),
    _vector_case(max_of_pairs, lambda a: a[: a.numel() // 2 * 2].view(-1, 2).amax(1)),
    KernelCase(
        "convolution",
        convolution,
        lambda a, weight: F.conv1d(a[None, None].double(), weight[None, None].double())[0, 0].float(),
        N_SIZES,
        tensors(normal("N"), normal("3")),
        ("B",),
    ),
    KernelCase("stencil_2d", stencil_2d, stencil_2d_reference, MN, tensors(normal("M N")), ("B",)),
    _move_case("flip_rows", flip_rows, lambda a: a.flip(0)),
    _move_case("roll_columns", roll_columns, lambda a: a.roll(-1, 1)),
    _move_case("downsample", downsample, lambda a: a[: a.shape[0] // 2 * 2 : 2].contiguous()),
    _move_case("repeat_rows", repeat_rows, lambda a: a.repeat_interleave(3, 0)),
    _move_case("skip_rows", skip_rows, lambda a: a[2:].contiguous()),
    _move_case("skew", skew, lambda a: torch.stack([row.roll(-m) for m, row in enumerate(a)])),
    *(
        KernelCase(
            f"reshape_{m}x{n}",
            reshape,
            lambda a, m=m, n=n: a.reshape(m, n),
            ({"M": m, "N": n},),
            lambda generator, sizes: [torch.randn(sizes["M"] * sizes["N"], generator=generator)],
            ("B",),
            EXACT,
        )
        for m, n in ((24, 48), (13, 30))
    ),
    KernelCase(
        "diagonal", diagonal, lambda a: a.diagonal().contiguous(), N_SIZES, tensors(normal("N N")), ("B",), EXACT
    ),
    KernelCase(
        "swap_seq_heads",
        swap_seq_heads,
        lambda x: x.transpose(1, 2).contiguous(),
        (
            {"batch": 2, "seq": 16, "heads": 4, "dim": 8},
            {"batch": 3, "seq": 13, "heads": 5, "dim": 7},
            {"batch": 1, "seq": 3, "heads": 2, "dim": 5},
        ),
        tensors(normal("batch seq heads dim")),
        ("out",),
        EXACT,
    ),
    KernelCase(
        "concatenate",
        concatenate,
        lambda a, b: torch.cat([a, b]),
        MN,
        tensors(normal("M N"), normal("M N")),
        ("C",),
        EXACT,
    ),
    KernelCase(
        "histogram",
        histogram,
        histogram_reference,
        ({"N": 48, "bins": 12}, {"N": 37, "bins": 7}, {"N": 5, "bins": 3}),
        tensors(integers("N", 0, "bins"), integers("bins", 0, 10)),
        ("counts",),
        EXACT,
        inouts=("counts",),
    ),
    KernelCase(
        "scatter_rows",
        scatter_rows,
        scatter_rows_reference,
        ({"tokens": 12, "N": 24}, {"tokens": 7, "N": 13}, {"tokens": 2, "N": 3}),
        lambda generator, sizes: [
            _distinct_ids(generator, sizes),
            torch.randn(sizes["tokens"], sizes["N"], generator=generator),
            torch.randn(2 * sizes["tokens"], sizes["N"], generator=generator),
        ],
        ("out",),
        EXACT,
        inouts=("out",),
    ),
)
