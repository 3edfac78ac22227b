"""Memory: parameters, buffers on chip, scopes, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import tilelang.language as T

from .row import Example, Row, matrix

X = matrix()


def _through(allocate: Callable) -> Callable[[], Any]:
    def kernel() -> Any:
        @T.prim_func
        def through(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
            with T.Kernel(12, threads=32) as bx:
                x = allocate((4,), "float32")
                for j in T.serial(4):
                    x[j] = X[bx, j] + 1.0
                for j in T.serial(4):
                    Y[bx, j] = x[j]

        return through

    return kernel


def _variable() -> Any:
    @T.prim_func
    def variable(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            total = T.alloc_var("float32", init=3.0)
            for j in T.serial(4):
                total += X[bx, j]
            for j in T.Parallel(4):
                Y[bx, j] = total

    return variable


def _named_places() -> Any:
    @T.prim_func
    def named(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            for j in T.serial(5):
                with T.sblock("element"):
                    T.where(j < 4)
                    at = T.axis.spatial(4, j)
                    Y[bx, at] = X[bx, at] + 1.0

    return named


def _starting_block() -> Any:
    @T.prim_func
    def starting(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx, T.sblock("sum"):
            with T.init():
                Y[bx, 0] = 0.0
            Y[bx, 0] = Y[bx, 0] + X[bx, 0]

    return starting


def _store_where() -> Any:
    @T.prim_func
    def where(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            for j in T.serial(4):
                T.buffer_store(Y, X[bx, j], [bx, j], predicate=j < 2)

    return where


def _symbolic() -> Any:
    m = T.dynamic("m")

    @T.prim_func
    def symbolic(X: T.Tensor((m, 4), "float32"), Y: T.Tensor((m, 4), "float32")):
        with T.Kernel(m, threads=32) as bx:
            for j in T.Parallel(4):
                Y[bx, j] = X[bx, j] + 1.0

    return symbolic


def _doubled(dtype: str) -> Callable[[], Any]:
    def kernel() -> Any:
        @T.prim_func
        def doubled(X: T.Tensor((12, 4), dtype), Y: T.Tensor((12, 4), dtype)):
            with T.Kernel(12, threads=32) as bx:
                x = T.alloc_shared((1, 4), dtype)
                T.copy(X[bx, 0], x)
                for i, j in T.Parallel(1, 4):
                    Y[bx + i, j] = x[i, j] + x[i, j]

        return doubled

    return kernel


def _of(dtype: str) -> Example:
    numpy_dtype = np.dtype(dtype)
    signed = numpy_dtype.kind != "u"
    values = (X * 10 if signed else abs(X) * 10).astype(numpy_dtype)
    return Example(dtype, _doubled(dtype), (values,), lambda x: x + x)


def _unknown_dtype() -> Any:
    @T.prim_func
    def four_bits(X: T.Tensor((12, 4), "float4_e2m1fn"), Y: T.Tensor((12, 4), "float4_e2m1fn")):
        with T.Kernel(12, threads=32) as bx:
            for j in T.Parallel(4):
                Y[bx, j] = X[bx, j]

    return four_bits


def _global_memory() -> Any:
    @T.prim_func
    def workspace(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            w = T.alloc_global((4,), "float32")
            for j in T.serial(4):
                w[j] = X[bx, j]
            for j in T.serial(4):
                Y[bx, j] = w[j]

    return workspace


_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")

ROWS_OF_BUFFERS = (
    Row(
        "parameters",
        "understood",
        "tensors, in calls with contiguous rows, whatever their declared strides; scalars, symbolic sizes",
        names="Tensor StridedTensor Buffer buffer_decl buffer match_buffer arg dynamic symbolic Var SizeVar var void"
        " handle func_attr func_name func_ret ptr Ptr",
        examples=(Example("symbolic sizes", _symbolic, (X,), lambda x: x + 1),),
    ),
    Row(
        "buffers on chip",
        "understood",
        "every scope is memory of one program",
        names="alloc_shared alloc_fragment alloc_local alloc_var alloc_buffer allocate sblock_alloc_buffer sblock"
        " decl_buffer FragmentBuffer SharedBuffer LocalBuffer reads writes where block_name_suffix_context",
        nodes="AllocBuffer DeclBuffer",
        examples=(
            Example("alloc_shared", _through(T.alloc_shared), (X,), lambda x: x + 1),
            Example("alloc_fragment", _through(T.alloc_fragment), (X,), lambda x: x + 1),
            Example("alloc_local", _through(T.alloc_local), (X,), lambda x: x + 1),
            Example("alloc_var", _variable, (X,), lambda x: np.repeat(x.sum(1, keepdims=True) + 3, 4, 1)),
            Example("sblock", _named_places, (X,), lambda x: x + 1),
        ),
    ),
    Row(
        "blocks with an init",
        "refused",
        "has an init",
        names="init",
        examples=(Example("init", _starting_block, (X,)),),
    ),
    Row(
        "stores and loads with a predicate",
        "refused",
        "an access to 'Y' has a predicate",
        examples=(Example("a store", _store_where, (X,)),),
    ),
    Row(
        "dtypes",
        "understood",
        "16-bit and 8-bit floats are computed in float32 and rounded after every operation; casts are torch's",
        names=" ".join((*_DTYPES, *_FLOAT8, *_UNSIGNED)) + " float8_e4m3 bool half float double short int long uint",
        examples=tuple(map(_of, (*_DTYPES, *_FLOAT8, *_UNSIGNED))),
    ),
    Row(
        "other dtypes",
        "refused",
        "float4_e2m1fn",
        names="*[0-9nuz]x2 *[0-9nuz]x4 *[0-9nuz]x8 *[0-9nuz]x16 *[0-9nuz]x32 *[0-9nuz]x64 float4_* float6_*"
        " float8_e3m4 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu int4",
        examples=(Example("4 bits", _unknown_dtype, (X.astype(ml_dtypes.float4_e2m1fn),)),),
    ),
    Row(
        "floats of 19 bits in 32, which hardware rounds in its own ways",
        "refused",
        "custom[tfloat32]",
        names="tfloat32",
        examples=(
            Example("a parameter", _doubled(T.tfloat32), (X,)),
            Example("on chip", _through(lambda shape, _: T.alloc_shared(shape, T.tfloat32)), (X,)),
        ),
    ),
    Row(
        "views",
        "understood",
        "of the memory that they alias: see the page on the contract, clause 12",
        names="reshape view make_tensor make_tensor_from_addr",
    ),
    Row(
        "global memory of a kernel's own",
        "refused",
        "no global memory for 'w'",
        names="alloc_global empty",
        examples=(Example("alloc_global", _global_memory, (X,), targets=("interpret",)),),
    ),
)
