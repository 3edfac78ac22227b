"""Kernels that use positions for more than indices into tiles, each in three styles (see `styles`), with its reference.

On a mesh `{"x": .., "y": ..}` every one has rows split over `x`, or over both where the layouts say so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tilelang.language as T
import torch

from tests.styles import Build, Style

BLOCK = 4


@dataclass(frozen=True)
class Case:
    """`make(M, N)` gives the kernel's source, `inputs(M, N)` its tensors, `reference` the result. `misused` is a part
    of the message where its author forgot the offset. `columns`: the result has A's columns only, else A's shape."""

    make: Callable[[int, int], Build]
    inputs: Callable[[int, int], tuple[torch.Tensor, ...]]
    reference: Callable[..., torch.Tensor]
    misused: str
    columns: bool = False

    def layouts(self, layout: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """How its tensors lie where A lies so; tables are on every device."""
        columns = {axis: 0 for axis, dim in layout.items() if dim == 1}
        return {"A": dict(layout), "B": columns if self.columns else dict(layout)}


def one(M: int, N: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(M, N),)


def with_table(M: int, N: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(M, N), torch.randn(M)


def causal(M: int, N: int) -> Build:
    """B[m, n] = A[m, n] for n <= m."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, B)
            rows, columns = style.shape(A)
            row, column = style.offset(A)
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                for i, j in T.Parallel(BLOCK, columns):
                    B[by * BLOCK + i, j] = T.if_then_else(column + j <= row + by * BLOCK + i, A[by * BLOCK + i, j], 0.0)

        return kernel

    return build


def iota(M: int, N: int) -> Build:
    """B[m, n] = A[m, n] + 100 m + n."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, B)
            rows, columns = style.shape(A)
            row, column = style.offset(A)
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                tile = T.alloc_fragment((BLOCK, columns), "float32")
                T.copy(A[by * BLOCK, 0], tile)
                for i, j in T.Parallel(BLOCK, columns):
                    tile[i, j] = tile[i, j] + T.Cast("float32", (row + by * BLOCK + i) * 100 + (column + j))
                T.copy(tile, B[by * BLOCK, 0])

        return kernel

    return build


def add_table(M: int, N: int) -> Build:
    """B[m, n] = A[m, n] + P[m], P on every device."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), P: T.Tensor((M,), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, P, B)
            rows, columns = style.shape(A)
            row = style.offset(A)[0]
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                for i, j in T.Parallel(BLOCK, columns):
                    B[by * BLOCK + i, j] = A[by * BLOCK + i, j] + P[row + by * BLOCK + i]

        return kernel

    return build


def add_copied_table(M: int, N: int) -> Build:
    """The same, with P copied block by block."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), P: T.Tensor((M,), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, P, B)
            rows, columns = style.shape(A)
            first = style.offset(A)[0]
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                tile = T.alloc_fragment((BLOCK, columns), "float32")
                table = T.alloc_fragment((BLOCK,), "float32")
                T.copy(A[by * BLOCK, 0], tile)
                T.copy(P[first + by * BLOCK], table)
                for i, j in T.Parallel(BLOCK, columns):
                    tile[i, j] += table[i]
                T.copy(tile, B[by * BLOCK, 0])

        return kernel

    return build


def block_scales(M: int, N: int) -> Build:
    """B[m, n] = A[m, n] * S[m // 3]: a row's group picks a scale."""

    def build(style: Style):
        @T.prim_func
        def kernel(
            A: T.Tensor((M, N), "float32"), S: T.Tensor((-(-M // 3),), "float32"), B: T.Tensor((M, N), "float32")
        ):
            style.annotate(A, S, B)
            rows, columns = style.shape(A)
            row = style.offset(A)[0]
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                for i, j in T.Parallel(BLOCK, columns):
                    B[by * BLOCK + i, j] = A[by * BLOCK + i, j] * S[(row + by * BLOCK + i) // 3]

        return kernel

    return build


def through_a_buffer(M: int, N: int) -> Build:
    """B[m, n] = A[m, n] + P[M - 1 - m]: positions go through an on-chip buffer."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), P: T.Tensor((M,), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, P, B)
            rows, columns = style.shape(A)
            row = style.offset(A)[0]
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                at = T.alloc_fragment((BLOCK,), "int32")
                for i in T.Parallel(BLOCK):
                    at[i] = T.max(M - 1 - (row + by * BLOCK + i), 0)
                for i, j in T.Parallel(BLOCK, columns):
                    B[by * BLOCK + i, j] = A[by * BLOCK + i, j] + P[at[i]]

        return kernel

    return build


def through_a_variable(M: int, N: int) -> Build:
    """B[m, n] = A[m, n] + m: the position goes through a T.alloc_var."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, B)
            rows, columns = style.shape(A)
            row = style.offset(A)[0]
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                start = T.alloc_var("int32")
                for i in T.serial(BLOCK):
                    start = row + by * BLOCK + i
                    for j in T.serial(columns):
                        B[by * BLOCK + i, j] = A[by * BLOCK + i, j] + T.Cast("float32", start)

        return kernel

    return build


def prefix(M: int, N: int) -> Build:
    """B[m, n] = A[m, n] + sum(P[: m + 1]): a loop goes as far as the position."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), P: T.Tensor((M,), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, P, B)
            rows, columns = style.shape(A)
            row = style.offset(A)[0]
            with T.Kernel(rows, threads=32) as m:
                total = T.alloc_fragment((1,), "float32")
                T.clear(total)
                for k in T.serial(T.min(row + m + 1, M)):
                    total[0] += P[k]
                for j in T.Parallel(columns):
                    B[m, j] = A[m, j] + total[0]

        return kernel

    return build


def odd_rows(M: int, N: int) -> Build:
    """B[m, n] = A[m, n], and minus that in odd rows: a statement's condition depends on the position."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, B)
            rows, columns = style.shape(A)
            row = style.offset(A)[0]
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                for i, j in T.Parallel(BLOCK, columns):
                    B[by * BLOCK + i, j] = A[by * BLOCK + i, j]
                    if (row + by * BLOCK + i) % 2 == 1:
                        B[by * BLOCK + i, j] = -A[by * BLOCK + i, j]

        return kernel

    return build


def im2col(M: int, N: int) -> Build:
    """B[p, n] = A[p, n] + X[p // 5 + 1, p % 5 + 2]: output pixels are split, the image is not."""

    def build(style: Style):
        @T.prim_func
        def kernel(
            A: T.Tensor((M, N), "float32"),
            X: T.Tensor((M // 5 + 2, 7), "float32"),
            B: T.Tensor((M, N), "float32"),
        ):
            style.annotate(A, X, B)
            rows, columns = style.shape(A)
            pixel = style.offset(A)[0]
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                for i, j in T.Parallel(BLOCK, columns):
                    p = pixel + by * BLOCK + i
                    B[by * BLOCK + i, j] = A[by * BLOCK + i, j] + X[p // 5 + 1, p % 5 + 2]

        return kernel

    return build


def weighted_sum(M: int, N: int) -> Build:
    """B[n] = sum over m of A[m, n] * m, up to row M - 2: the dim that is split is summed."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((N,), "float32")):
            style.annotate(A, B)
            rows, columns = style.shape(A)
            row = style.offset(A)[0]
            with T.Kernel(1, threads=32):
                total = T.alloc_fragment((columns,), "float32")
                T.clear(total)
                for ko in T.serial(T.ceildiv(rows, BLOCK)):
                    for i in T.serial(BLOCK):
                        for j in T.Parallel(columns):
                            if row + ko * BLOCK + i < M - 1:
                                total[j] += A[ko * BLOCK + i, j] * T.Cast("float32", row + ko * BLOCK + i)
                T.copy(total, B[0])

        return kernel

    return build


def _m(a: torch.Tensor) -> torch.Tensor:
    return torch.arange(a.shape[0])


def _image(M: int, N: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(M, N), torch.randn(M // 5 + 2, 7)


_AS_VALUE = "uses the position as a value in"

CASES = {
    "causal": Case(causal, one, lambda a: a.tril(), _AS_VALUE),
    "iota": Case(iota, one, lambda a: a + _m(a)[:, None] * 100 + torch.arange(a.shape[1]), _AS_VALUE),
    "add_table": Case(
        add_table, with_table, lambda a, p: a + p[:, None], "P dim 0 is indexed by bx * 4 + i, and is not split"
    ),
    "add_copied_table": Case(
        add_copied_table, with_table, lambda a, p: a + p[:, None], "P dim 0 is indexed by bx * 4 + t0"
    ),
    "block_scales": Case(
        block_scales,
        lambda M, N: (torch.randn(M, N), torch.randn(-(-M // 3))),
        lambda a, s: a * s[_m(a) // 3, None],
        "S dim 0 is indexed by (bx * 4 + i) // 3",
    ),
    "through_a_buffer": Case(
        through_a_buffer, with_table, lambda a, p: a + p.flip(0)[:, None], f"the store to at {_AS_VALUE}"
    ),
    "through_a_variable": Case(
        through_a_variable, one, lambda a: a + _m(a)[:, None], f"the store to start {_AS_VALUE}"
    ),
    "prefix": Case(prefix, with_table, lambda a, p: a + p.cumsum(0)[:, None], f"the store to total {_AS_VALUE} k < "),
    "odd_rows": Case(odd_rows, one, lambda a: a * (1 - 2 * (_m(a) % 2))[:, None], _AS_VALUE),
    "im2col": Case(im2col, _image, lambda a, x: a + x[_m(a) // 5 + 1, _m(a) % 5 + 2][:, None], "X dim 0 is indexed by"),
    "weighted_sum": Case(weighted_sum, one, lambda a: (a[:-1] * _m(a)[:-1, None]).sum(0), _AS_VALUE, columns=True),
}


# -- kernels for tests of their own ------------------------------------------------------------------------------------


def as_far_as_valid(M: int, N: int) -> Build:
    """B[m, n] = 2 A[m, n]: the grid goes over the blocks that have valid rows, and the last one is tested."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, B)
            columns, valid = style.shape(A)[1], style.extent(A)[0]
            with T.Kernel(T.ceildiv(valid, BLOCK), threads=32) as by:
                for i, j in T.Parallel(BLOCK, columns):
                    if by * BLOCK + i < valid:
                        B[by * BLOCK + i, j] = A[by * BLOCK + i, j] * 2.0

        return kernel

    return build


def sum_of_valid(M: int, N: int) -> Build:
    """B[n] = sum over m of exp(A[m, n]), by loops and masks that go as far as rows are valid."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((N,), "float32")):
            style.annotate(A, B)
            columns, valid = style.shape(A)[1], style.extent(A)[0]
            with T.Kernel(1, threads=32):
                tile = T.alloc_fragment((BLOCK, columns), "float32")
                total = T.alloc_fragment((columns,), "float32")
                T.clear(total)
                for ko in T.serial(T.ceildiv(valid, BLOCK)):
                    T.copy(A[ko * BLOCK, 0], tile)
                    for i, j in T.Parallel(BLOCK, columns):
                        tile[i, j] = T.if_then_else(ko * BLOCK + i < valid, T.exp(tile[i, j]), 0.0)
                    T.reduce_sum(tile, total, dim=0, clear=False)
                T.copy(total, B)

        return kernel

    return build


def by_axis_index(M: int, N: int, axes: dict[str, int]) -> Build:
    """B[m, n] = A[m, n] + m, the offset worked out by hand; tiles are even."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, B)
            rows, columns = style.shape(A)
            device = 0
            for axis, size in axes.items():
                device = device * size + style.fns["mesh_axis_index"](axis)
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                for i, j in T.Parallel(BLOCK, columns):
                    B[by * BLOCK + i, j] = A[by * BLOCK + i, j] + T.Cast("float32", device * rows + by * BLOCK + i)

        return kernel

    return build


def causal_softmax(M: int, N: int) -> Build:
    """B = softmax(A) over columns n <= m. Where columns are split, maxima and sums are completed in the middle."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, B)
            rows, columns = style.shape(A)
            row, column = style.offset(A)
            with T.Kernel(T.ceildiv(rows, BLOCK), threads=32) as by:
                tile = T.alloc_fragment((BLOCK, columns), "float32")
                largest = T.alloc_fragment((BLOCK,), "float32")
                total = T.alloc_fragment((BLOCK,), "float32")
                T.copy(A[by * BLOCK, 0], tile)
                for i, j in T.Parallel(BLOCK, columns):
                    tile[i, j] = T.if_then_else(column + j <= row + by * BLOCK + i, tile[i, j], -1e30)
                T.reduce_max(tile, largest, dim=1)
                for i, j in T.Parallel(BLOCK, columns):
                    tile[i, j] = T.exp(tile[i, j] - largest[i])
                T.reduce_sum(tile, total, dim=1)
                for i, j in T.Parallel(BLOCK, columns):
                    tile[i, j] = tile[i, j] / total[i]
                T.copy(tile, B[by * BLOCK, 0])

        return kernel

    return build


def masked_matmul(M: int, N: int) -> Build:
    """B = tril(A) @ W: the mask compares positions of two dims, one of them reduced; W is (N, N)."""

    def build(style: Style):
        @T.prim_func
        def kernel(A: T.Tensor((M, N), "float32"), W: T.Tensor((N, N), "float32"), B: T.Tensor((M, N), "float32")):
            style.annotate(A, W, B)
            rows, inner = style.shape(A)
            columns, first = style.shape(W)[1], style.offset(A)
            with T.Kernel(T.ceildiv(columns, BLOCK), T.ceildiv(rows, BLOCK), threads=32) as (bx, by):
                a = T.alloc_shared((BLOCK, BLOCK), "float32")
                w = T.alloc_shared((BLOCK, BLOCK), "float32")
                c = T.alloc_fragment((BLOCK, BLOCK), "float32")
                T.clear(c)
                for ko in T.Pipelined(T.ceildiv(inner, BLOCK), num_stages=2):
                    T.copy(A[by * BLOCK, ko * BLOCK], a)
                    T.copy(W[ko * BLOCK, bx * BLOCK], w)
                    for i, k in T.Parallel(BLOCK, BLOCK):
                        a[i, k] = T.if_then_else(first[1] + ko * BLOCK + k <= first[0] + by * BLOCK + i, a[i, k], 0.0)
                    T.gemm(a, w, c)
                T.copy(c, B[by * BLOCK, bx * BLOCK])

        return kernel

    return build
