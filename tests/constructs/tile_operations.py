"""Operations on blocks: copies, fills, products, reductions, scans, atomics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tilelang.language as T
import torch

from kernels.convolution import convolution_2d, convolution_2d_reference

from .row import Example, Row, matrix

X = matrix()
INTS = np.random.default_rng(4).integers(0, 99, (12, 4)).astype(np.int32)
BY_ROW = {"X": {"x": 0}, "Y": {"x": 0}}
REDUCED = {"X": {"x": 1}, "Y": {}}


def _copied(operation: Callable) -> Callable[[], Any]:
    def kernel() -> Any:
        @T.prim_func
        def copied(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
            with T.Kernel(3, threads=32) as bx:
                x, y = T.alloc_shared((4, 4), "float32"), T.alloc_fragment((4, 4), "float32")
                operation(X[bx * 4 : bx * 4 + 4, 0:4], x)
                T.copy(x, y)
                T.copy(y, Y[bx * 4, 0])

        return copied

    return kernel


def _padded() -> Any:
    @T.prim_func
    def padded(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 8), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x = T.alloc_shared((4, 8), "float32")
            T.annotate_safe_value({X: 5.0})
            T.copy(X[bx * 4 : bx * 4 + 4, 0:8], x)
            T.copy(x, Y[bx * 4 : bx * 4 + 4, 0:8])

    return padded


def _padded_element() -> Any:
    @T.prim_func
    def element(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            T.annotate_safe_value({X: 5.0})
            for j in T.Parallel(4):
                Y[bx, j] = X[bx + 1, j]

    return element


def _filled() -> Any:
    @T.prim_func
    def filled(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x, y = T.alloc_fragment((4, 4), "float32"), T.alloc_fragment((4, 4), "float32")
            T.fill(x, 3)
            T.clear(y)
            for i, j in T.Parallel(4, 4):
                Y[bx * 4 + i, j] = X[bx * 4 + i, j] + x[i, j] + y[i, j]

    return filled


def _transposed() -> Any:
    @T.prim_func
    def transposed(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((4, 12), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x, y = T.alloc_shared((4, 4), "float32"), T.alloc_shared((4, 4), "float32")
            T.copy(X[bx * 4, 0], x)
            T.transpose(x, y)
            T.copy(y, Y[0, bx * 4])

    return transposed


def _product() -> Any:
    @T.prim_func
    def product(X: T.Tensor((12, 4), "float32"), W: T.Tensor((4, 8), "float32"), Y: T.Tensor((12, 8), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x, w = T.alloc_shared((4, 4), "float32"), T.alloc_shared((4, 8), "float32")
            y = T.alloc_fragment((4, 8), "float32")
            T.copy(X[bx * 4, 0], x)
            T.copy(W, w)
            T.gemm(x, w, y, clear_accum=True)
            T.copy(y, Y[bx * 4, 0])

    return product


def _pinned_product(hopper: bool) -> Callable[[], Any]:
    """A product by an instruction that the author names; Blackwell's adds up in memory of its own."""

    def kernel() -> Any:
        @T.prim_func
        def product(X: T.Tensor((12, 4), "float32"), W: T.Tensor((4, 8), "float32"), Y: T.Tensor((12, 8), "float32")):
            with T.Kernel(3, threads=32) as bx:
                x, w = T.alloc_shared((4, 2), "float32"), T.alloc_shared((2, 8), "float32")
                y, summed = T.alloc_fragment((4, 8), "float32"), T.alloc_tmem((4, 8), "float32")
                for k in T.serial(2):
                    T.copy(X[bx * 4, k * 2], x)
                    T.copy(W[k * 2, 0], w)
                    if hopper:
                        T.wgmma_gemm(x, w, y, clear_accum=k == 0)
                        T.wait_wgmma(0)
                    else:
                        T.tcgen05_gemm(x, w, summed, mbar=None, clear_accum=k == 0)
                if not hopper:
                    T.copy(summed, y)
                T.copy(y, Y[bx * 4, 0])

        return product

    return kernel


def _reduced(operation: Callable, dtype: str = "float32") -> Callable[[], Any]:
    def kernel() -> Any:
        @T.prim_func
        def reduced(X: T.Tensor((12, 4), dtype), Y: T.Tensor((12,), dtype)):
            with T.Kernel(3, threads=32) as bx:
                x, y = T.alloc_fragment((4, 4), dtype), T.alloc_fragment((4,), dtype)
                T.copy(X[bx * 4, 0], x)
                operation(x, y, dim=1)
                T.copy(y, Y[bx * 4])

        return reduced

    return kernel


def _reductions() -> tuple[Example, ...]:
    floats = {
        T.reduce_sum: lambda x: x.sum(1),
        T.reduce_max: lambda x: x.max(1),
        T.reduce_min: lambda x: x.min(1),
        T.reduce_abssum: lambda x: abs(x).sum(1),
        T.reduce_absmax: lambda x: abs(x).max(1),
    }
    bits = {
        T.reduce_bitand: np.bitwise_and.reduce,
        T.reduce_bitor: np.bitwise_or.reduce,
        T.reduce_bitxor: np.bitwise_xor.reduce,
    }
    return tuple(
        Example(f"{operation.__name__} over {'rows' if split is BY_ROW else 'a split dim'}", kernel, (data,), f, split)
        for split in (BY_ROW, REDUCED)
        for operation, kernel, data, f in [
            *((op, _reduced(op), X, f) for op, f in floats.items()),
            *((op, _reduced(op, "int32"), INTS, lambda x, f=f: f(x, axis=1)) for op, f in bits.items()),
        ]
    )


def _scanned(operation: Callable) -> Callable[[], Any]:
    def kernel() -> Any:
        @T.prim_func
        def scanned(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
            with T.Kernel(3, threads=32) as bx:
                x = T.alloc_shared((4, 4), "float32")
                T.copy(X[bx * 4, 0], x)
                operation(x, dim=1)
                T.copy(x, Y[bx * 4, 0])

        return scanned

    return kernel


def _atomic(operation: Callable, dtype: str = "float32") -> Callable[[], Any]:
    def kernel() -> Any:
        @T.prim_func
        def atomic(X: T.Tensor((12, 4), dtype), Y: T.Tensor((4,), dtype)):
            with T.Kernel(12, threads=32) as bx:
                for j in T.Parallel(4):
                    operation(Y[j], T.cast(X[bx, j], dtype))

        return atomic

    return kernel


def _atomic_block() -> Any:
    @T.prim_func
    def block(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(12, threads=32) as bx:
            x = T.alloc_shared((4,), "float32")
            T.copy(X[bx, 0], x)
            T.atomic_add(Y, x)

    return block


def _old_value() -> Any:
    @T.prim_func
    def counter(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            for j in T.Parallel(4):
                Y[bx, j] = T.atomic_add(X[0, j], 1, return_prev=True)

    return counter


def _one_of_two(operation: Callable) -> Callable[[], Any]:
    def kernel() -> Any:
        @T.prim_func
        def loaded(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
            with T.Kernel(12, threads=32) as bx:
                for j in T.Parallel(4):
                    operation(X, Y, bx, j)

        return loaded

    return kernel


def _load(X: Any, Y: Any, i: Any, j: Any) -> None:
    T.buffer_store(Y, T.atomic_load(X[i, j]), [i, j])


def _to_a_cluster() -> Any:
    @T.prim_func
    def clusters(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x, y = T.alloc_shared((4, 4), "float32"), T.alloc_shared((4, 4), "float32")
            T.copy(X[bx * 4, 0], x)
            T.copy_cluster(x, y, dst_block=0)
            T.copy(y, Y[bx * 4, 0])

    return clusters


def _to_rows() -> Any:
    @T.prim_func
    def rows(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x = T.alloc_shared((4, 4), "float32")
            T.copy(X[bx * 4, 0], x)
            T.tma_scatter4(x, Y, 0, [11 - bx, 8 - bx, 5 - bx, 2 - bx])

    return rows


def _computed_annotation() -> Any:
    @T.prim_func
    def annotated(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x = T.alloc_shared((4, 4), "float32")
            T.copy(X[bx * 4, 0], x, annotations={"rows": bx * 4})
            T.copy(x, Y[bx * 4, 0])

    return annotated


def reducer(op: str = "sum", init: float | None = None, dtype: str = "float32") -> Callable[[], Any]:
    """Squares of what columns are reduced to."""

    @T.prim_func
    def reducer_kernel(X: T.Tensor((12, 4), dtype), Y: T.Tensor((4,), dtype)):
        with T.Kernel(1, threads=32):
            total = T.alloc_reducer((4,), dtype, op=op)
            result = T.alloc_fragment((4,), dtype)
            T.reducer_init(total, init)
            for k in T.serial(3):
                for i, j in T.Parallel(4, 4):
                    T.reducer_update(total[j], X[k * 4 + i, j])
            T.finalize_reducer(total, result)
            for j in T.Parallel(4):
                Y[j] = result[j] * result[j]

    return lambda: reducer_kernel


def _all_bits_squared(x: np.ndarray) -> np.ndarray:
    return np.bitwise_or.reduce(x) ** 2


def _older_reducer() -> Any:
    @T.prim_func
    def older_reducer(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12,), "float32")):
        with T.Kernel(3, threads=32) as bx:
            total = _older((4,))
            T.clear(total)
            for i, j in T.Parallel(4, 4):
                total[i] += X[bx * 4 + i, j]
            T.finalize_reducer(total)
            T.copy(total, Y[bx * 4])

    return older_reducer


def _older(shape: tuple[int, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return T.alloc_reducer(shape, "float32", op="sum", replication="all")


def _read_reducer() -> Any:
    @T.prim_func
    def read_reducer(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12,), "float32")):
        with T.Kernel(3, threads=32) as bx:
            total = T.alloc_reducer((4,), "float32", op="sum")
            T.reducer_init(total)
            for i, j in T.Parallel(4, 4):
                T.reducer_update(total[i], X[bx * 4 + i, j])
            for i in T.Parallel(4):
                Y[bx * 4 + i] = total[i]

    return read_reducer


def _vectors(add: Callable[..., Any], width: int) -> Callable[[], Any]:
    @T.prim_func
    def vectors(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x = T.alloc_shared((4, 4), "float32")
            T.copy(X[bx * 4, 0], x)
            for i, j in T.Parallel(4, 4 // width):
                add(Y[j * width], x[i, j * width])

    return lambda: vectors


def _any() -> Any:
    @T.prim_func
    def some(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            found = T.alloc_shared((4,), "bool")
            for j in T.Parallel(4):
                found[j] = X[bx, j] > 0.0
            if T.any_of(found):
                for j in T.Parallel(4):
                    Y[bx, j] = X[bx, j]

    return some


ZEROS = np.zeros_like(X)


IMAGES = np.random.default_rng(5).standard_normal((2, 5, 5, 4)).astype(np.float32)
WEIGHTS = np.random.default_rng(6).standard_normal((3, 3, 4, 8)).astype(np.float32)


def _convolution() -> Any:
    return convolution_2d(2, 4, 5, 5, 8, block_M=8, block_N=8, block_K=4)


def _convolved(data: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    return convolution_2d_reference(torch.from_numpy(data), torch.from_numpy(kernel)).numpy()


def _counts(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(12, dtype=np.float32)[:, None], 4, 1)


ROWS_OF_TILE_OPERATIONS = (
    Row(
        "copies",
        "understood",
        "outside the source they read 0 (or `annotate_safe_value`), outside the destination nothing is written",
        names="copy async_copy tma_copy annotate_safe_value",
        ops="tl.tileop.copy tl.tileop.async_copy tl.tileop.tma_copy tl.region",
        examples=(
            Example("copy", _copied(T.copy), (X,), lambda x: x),
            Example("async_copy", _copied(T.async_copy), (X,), lambda x: x),
            Example("annotate_safe_value", _padded, (X,), lambda x: np.pad(x, ((0, 0), (0, 4)), constant_values=5)),
        ),
    ),
    Row(
        "`annotate_safe_value` where single elements are read",
        "refused",
        "T.annotate_safe_value of 'X', which is read element by element",
        examples=(Example("a single load", _padded_element, (X, ZEROS)),),
    ),
    Row(
        "fills and transposes",
        "understood",
        "also of parts of buffers",
        names="fill clear transpose",
        ops="tl.tileop.fill tl.tileop.transpose",
        examples=(
            Example("fill, clear", _filled, (X,), lambda x: x + 3),
            Example("transpose", _transposed, (X,), lambda x: x.T, {"X": {"x": 0}, "Y": {"x": 1}}),
        ),
    ),
    Row(
        "image to columns",
        "understood",
        "as the loops that it is; an axis may split images and channels of the result",
        names="im2col c2d_im2col",
        ops="tl.tileop.im2col tl.tileop.c2d_im2col",
        examples=tuple(
            Example(f"convolution over {what}", _convolution, (IMAGES, WEIGHTS), _convolved, sharding)
            for what, sharding in [
                ("split images", {"data": {"x": 0}, "out": {"x": 0}}),
                ("split features", {"kernel": {"x": 3}, "out": {"x": 3}}),
            ]
        ),
    ),
    Row(
        "products",
        "understood",
        "a `clear_accum` that is an expression becomes a conditional fill; `wgmma_gemm` and `tcgen05_gemm` say what"
        " `gemm` says, and are complete where they stand where nobody waits",
        names="gemm GemmWarpPolicy wgmma_gemm wgmma_mma tcgen05_gemm tcgen05_mma alloc_tmem",
        ops="tl.tileop.gemm tl.GemmWarpPolicy tl.tileop.wgmma_gemm tl.tileop.tcgen05_gemm",
        examples=(
            Example("by wgmma", _pinned_product(True), (X, matrix(4, 8, 1)), np.matmul),
            Example("by tcgen05", _pinned_product(False), (X, matrix(4, 8, 1)), np.matmul),
            Example("by rows", _product, (X, matrix(4, 8, 1)), np.matmul),
            Example(
                "over a split dim", _product, (X, matrix(4, 8, 1)), np.matmul, {"X": {"x": 1}, "W": {"x": 0}, "Y": {}}
            ),
        ),
    ),
    Row(
        "reductions",
        "understood",
        "over a dim that is split, the parts are combined by a collective; NaN is kept by max and min",
        names="reduce reduce_*",
        ops="tl.tileop.reduce",
        examples=_reductions(),
    ),
    Row(
        "scans",
        "understood",
        "no axis splits the dim that they run along; other dims are split",
        names="cumsum cummax",
        ops="tl.tileop.cumsum tl.tileop.cummax",
        examples=(
            Example("cumsum", _scanned(T.cumsum), (X,), lambda x: x.cumsum(1, dtype=np.float32)),
            Example("cummax", _scanned(T.cummax), (X,), lambda x: np.maximum.accumulate(x, 1)),
        ),
    ),
    Row(
        "atomic updates",
        "understood",
        "of elements and of blocks; parts of several devices are combined by a collective",
        names="atomic_add atomic_max atomic_min atomic_or",
        ops="tl.tileop.atomic* tl.atomic_add_elem_op tl.atomic_max_elem_op tl.atomic_min_elem_op tl.atomic_or_elem_op"
        " tl.access_ptr",
        examples=(
            Example("add", _atomic(T.atomic_add), (X, ZEROS[0]), lambda x, y: y + x.sum(0), {"X": {"x": 0}}),
            Example("max", _atomic(T.atomic_max), (X, ZEROS[0]), lambda x, y: x.max(0).clip(0), {"X": {"x": 0}}),
            Example("min", _atomic(T.atomic_min), (X, ZEROS[0]), lambda x, y: x.min(0).clip(max=0), {"X": {"x": 0}}),
            Example(
                "or",
                _atomic(T.atomic_or, "int32"),
                (INTS, np.zeros(4, np.int32)),
                lambda x, y: np.bitwise_or.reduce(x),
                {"X": {"x": 0}},
            ),
            Example("of a block", _atomic_block, (X, ZEROS[0]), lambda x, y: y + x.sum(0), {"X": {"x": 0}}),
        ),
    ),
    Row(
        "atomic updates that give the old value",
        "understood",
        "the counter is needed whole: every device does all updates, in order",
        ops="tl.atomic_add_ret_elem_op tl.atomic_max_ret_elem_op tl.atomic_min_ret_elem_op",
        examples=(Example("return_prev", _old_value, (np.zeros_like(X), ZEROS), _counts, {}),),
    ),
    Row(
        "atomic additions of vectors",
        "understood",
        "as many additions of elements; in rows that are a multiple of the vector",
        names="atomic_addx2 atomic_addx4",
        ops="tl.atomic_addx2_elem_op tl.atomic_addx4_elem_op",
        examples=(
            Example("x2", _vectors(T.atomic_addx2, 2), (X, ZEROS[0]), lambda x, y: y + x.sum(0), {"X": {"x": 0}}),
            Example("x4", _vectors(T.atomic_addx4, 4), (X, ZEROS[0]), lambda x, y: y + x.sum(0), {"X": {"x": 0}}),
        ),
    ),
    Row(
        "atomic loads, stores and vectors",
        "refused",
        "atomic_load_elem_op",
        names="atomic_load atomic_store",
        ops="tl.atomic_load_elem_op tl.atomic_store_elem_op tl.atomic_addx2_ret* tl.atomic_addx4_ret* tirx.atomic_add",
        examples=(Example("atomic_load", _one_of_two(_load), (X, ZEROS)),),
    ),
    Row(
        "copies to other blocks of a cluster",
        "refused",
        "a copy to other blocks of a cluster (dst_block) is not supported",
        names="copy_cluster",
        examples=(Example("copy_cluster", _to_a_cluster, (X,)),),
    ),
    Row(
        "copies of rows that are named one by one",
        "refused",
        "a copy of rows that are named one by one (is_scatter4) is not supported",
        names="tma_gather4 tma_gather4_bytes tma_scatter4",
        examples=(Example("tma_scatter4", _to_rows, (X,)),),
    ),
    Row(
        "annotations of tile operations that say more than their regions",
        "refused",
        "tl.tileop.copy has annotations that are computed (rows)",
        examples=(Example("a computed annotation", _computed_annotation, (X,)),),
    ),
    Row(
        "reducers",
        "understood",
        "a split dim's parts are combined by a collective; the start counts once",
        names="alloc_reducer reducer_init reducer_update finalize_reducer",
        ops="tl.tileop.reducer_init tl.reducer_update tl.tileop.finalize_reducer*",
        examples=(
            Example("sum", reducer(), (X,), lambda x: x.sum(0) ** 2, {"X": {"x": 0}}),
            Example("start", reducer("sum", 2.5), (X,), lambda x: (x.sum(0) + 2.5) ** 2, {"X": {"x": 0}}),
            Example("max", reducer("max"), (X,), lambda x: x.max(0) ** 2, {"X": {"x": 0}}),
            Example("or", reducer("bitor", None, "int32"), (INTS,), _all_bits_squared, {"X": {"x": 0}}),
            Example("older", _older_reducer, (X,), lambda x: x.sum(1)),
        ),
    ),
    Row(
        "reducers that are read before they are finalized",
        "refused",
        "reducer 'total' is used by more than reducer_init, reducer_update and finalize_reducer",
        examples=(Example("read", _read_reducer, (X,)),),
    ),
    Row(
        "tests of whole buffers",
        "refused",
        "any_of",
        names="any_of all_of",
        ops="tl.any_of tl.all_of",
        examples=(Example("any_of", _any, (X, ZEROS)),),
    ),
)
