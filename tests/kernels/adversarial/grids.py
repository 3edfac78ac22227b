"""Grids and loops that reach blocks by other maps than `program id * block`."""

import tilelang.language as T

from kernels.catalogue.case import EXACT, KernelCase, normal, tensors
from kernels.catalogue.sizes import MN, MNK
from kernels.matmul import matmul_reference


def grouped_matmul(M, N, K, block=8, group=2):
    """A 1-D grid whose programs walk C in groups of `group` rows of blocks, for the sake of the cache."""
    rows, columns = -(-M // block), -(-N // block)

    @T.prim_func
    def grouped_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N))):
        with T.Kernel(rows * columns, threads=128) as pid:
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            first_row = pid // (group * columns) * group
            height = T.min(rows - first_row, group)
            by = first_row + pid % (group * columns) % height
            bx = pid % (group * columns) // height
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return grouped_matmul_kernel


def persistent_matmul(M, N, K, block=8, programs=5):
    """A fixed number of programs, each of which takes every `programs`-th block of C."""
    columns = -(-N // block)
    blocks = -(-M // block) * columns

    @T.prim_func
    def persistent_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N))):
        with T.Kernel(programs, threads=128) as pid:
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            for wave in T.serial(T.ceildiv(blocks, programs)):
                index = wave * programs + pid
                if index < blocks:
                    T.clear(C_local)
                    for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                        T.copy(A[index // columns * block, ko * block], A_shared)
                        T.copy(B[ko * block, index % columns * block], B_shared)
                        T.gemm(A_shared, B_shared, C_local)
                    T.copy(C_local, C[index // columns * block, index % columns * block])

    return persistent_matmul_kernel


def tilelang_persistent_scale(M, N, block=8, programs=3):
    """The same with TileLang's own `T.Persistent`, doubling A."""

    @T.prim_func
    def tilelang_persistent_scale_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(programs, threads=128) as pid:
            tile = T.alloc_fragment((block, block), "float32")
            for by, bx in T.Persistent([T.ceildiv(M, block), T.ceildiv(N, block)], programs, pid):
                T.copy(A[by * block, bx * block], tile)
                for i, j in T.Parallel(block, block):
                    tile[i, j] = 2.0 * tile[i, j]
                T.copy(tile, B[by * block, bx * block])

    return tilelang_persistent_scale_kernel


def reversed_loop_matmul(M, N, K, block=8):
    """K is walked from its end."""
    steps = -(-K // block)

    @T.prim_func
    def reversed_loop_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for ko in T.serial(steps):
                T.copy(A[by * block, (steps - 1 - ko) * block], A_shared)
                T.copy(B[(steps - 1 - ko) * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return reversed_loop_matmul_kernel


def reversed_grid_scale(M, N, block=8):
    """Programs take rows of blocks from the last to the first."""
    rows = -(-M // block)

    @T.prim_func
    def reversed_grid_scale_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), rows, threads=128) as (bx, by):
            tile = T.alloc_fragment((block, block), "float32")
            T.copy(A[(rows - 1 - by) * block, bx * block], tile)
            for i, j in T.Parallel(block, block):
                tile[i, j] = 2.0 * tile[i, j]
            T.copy(tile, B[(rows - 1 - by) * block, bx * block])

    return reversed_grid_scale_kernel


def fused_batch_heads(batch, heads, seq, dim, block=8):
    """`out[b, h, s, d] = x[b, h, s, d] * scale[h]` with batch and heads in one grid index."""

    @T.prim_func
    def fused_batch_heads_kernel(
        x: T.Tensor((batch, heads, seq, dim)), scale: T.Tensor((heads,)), out: T.Tensor((batch, heads, seq, dim))
    ):
        with T.Kernel(T.ceildiv(seq, block), batch * heads, threads=128) as (bx, bz):
            tile = T.alloc_fragment((block, dim), "float32")
            T.copy(x[bz // heads, bz % heads, bx * block, 0], tile)
            for i, j in T.Parallel(block, dim):
                tile[i, j] = tile[i, j] * scale[bz % heads]
            T.copy(tile, out[bz // heads, bz % heads, bx * block, 0])

    return fused_batch_heads_kernel


def one_program_matmul(M, N, K):
    """One program, whose blocks are the whole tensors."""

    @T.prim_func
    def one_program_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N))):
        with T.Kernel(1, threads=128) as _:
            A_shared = T.alloc_shared((M, K), "float32")
            B_shared = T.alloc_shared((K, N), "float32")
            C_local = T.alloc_fragment((M, N), "float32")
            T.copy(A, A_shared)
            T.copy(B, B_shared)
            T.clear(C_local)
            T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C)

    return one_program_matmul_kernel


def looped_rows_scale(M, N, block=8):
    """One program walks all rows of blocks in a serial loop, two of them per step."""

    @T.prim_func
    def looped_rows_scale_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_fragment((block, N), "float32")
            for step in T.serial(T.ceildiv(M, 2 * block)):
                for half in T.unroll(2):
                    T.copy(A[(step * 2 + half) * block, 0], tile)
                    for i, j in T.Parallel(block, N):
                        tile[i, j] = 2.0 * tile[i, j]
                    T.copy(tile, B[(step * 2 + half) * block, 0])

    return looped_rows_scale_kernel


def naive_matmul(M, N, K, block=8):
    """No copies, no gemm: elements of the tensors are loaded where they are needed."""

    @T.prim_func
    def naive_matmul_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for k in T.serial(K):
                for i, j in T.Parallel(block, block):
                    if by * block + i < M and bx * block + j < N:
                        C_local[i, j] += A[by * block + i, k] * B[k, bx * block + j]
            for i, j in T.Parallel(block, block):
                if by * block + i < M and bx * block + j < N:
                    C[by * block + i, bx * block + j] = C_local[i, j]

    return naive_matmul_kernel


def redundant_programs(M, N, block=8):
    """Two programs per block write the same values."""

    @T.prim_func
    def redundant_programs_kernel(A: T.Tensor((M, N)), B: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), 2, threads=128) as (bx, by, _):
            tile = T.alloc_fragment((block, block), "float32")
            T.copy(A[by * block, bx * block], tile)
            for i, j in T.Parallel(block, block):
                tile[i, j] = 2.0 * tile[i, j]
            T.copy(tile, B[by * block, bx * block])

    return redundant_programs_kernel


def dynamic_matmul(M, N, K, block=8):
    """The number of rows is a symbol that is bound at the call."""
    rows = T.dynamic("rows")

    @T.prim_func
    def dynamic_matmul_kernel(A: T.Tensor((rows, K)), B: T.Tensor((K, N)), C: T.Tensor((rows, N))):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(rows, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[by * block, ko * block], A_shared)
                T.copy(B[ko * block, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])

    return dynamic_matmul_kernel


_MATMULS = (
    grouped_matmul,
    persistent_matmul,
    reversed_loop_matmul,
    one_program_matmul,
    naive_matmul,
    dynamic_matmul,
)
_SCALES = (reversed_grid_scale, looped_rows_scale, redundant_programs)


def _scale_case(kernel):
    return KernelCase(kernel.__name__, kernel, lambda a: 2 * a, MN, tensors(normal("M N")), ("B",), EXACT)


GRID_CASES = (
    *(
        KernelCase(kernel.__name__, kernel, matmul_reference, MNK, tensors(normal("M K"), normal("K N")), ("C",))
        for kernel in _MATMULS
    ),
    *(_scale_case(kernel) for kernel in _SCALES),
    KernelCase(
        "fused_batch_heads",
        fused_batch_heads,
        lambda x, scale: x * scale[:, None, None],
        (
            {"batch": 2, "heads": 4, "seq": 16, "dim": 8},
            {"batch": 3, "heads": 5, "seq": 13, "dim": 7},
            {"batch": 1, "heads": 3, "seq": 2, "dim": 1},
        ),
        tensors(normal("batch heads seq dim"), normal("heads")),
        ("out",),
        EXACT,
    ),
)

# TileLang 0.1.15 binds this kernel's block indices before the loop whose variable they use: its IR is not well-formed
# until TileLang's own passes have inlined them.
PERSISTENT_CASE = _scale_case(tilelang_persistent_scale)
