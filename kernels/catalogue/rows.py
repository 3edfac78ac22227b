"""Cases of the kernels that reduce along a dim: softmax, norms, reductions."""

from __future__ import annotations

from functools import partial

import torch

from kernels import reduce, rounds, statistics
from kernels.combined import (
    largest_of_rows,
    largest_of_rows_reference,
    one_pass_variance,
    one_pass_variance_reference,
)
from kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_gradient,
    layer_norm_gradient_reference,
    layer_norm_reference,
    two_pass_layer_norm,
)
from kernels.padded import (
    block_logsumexp,
    block_variance,
    block_variance_reference,
    fragment_layer_norm,
    logsumexp_reference,
)
from kernels.rms_norm import padded_rms_norm, rms_norm, rms_norm_reference, two_pass_rms_norm
from kernels.softmax import online_softmax, softmax, softmax_reference, three_pass_softmax

from .case import (
    EXACT,
    FLOAT16,
    FLOAT32,
    KernelCase,
    KernelFactory,
    Maker,
    Tolerance,
    integers,
    normal,
    tensors,
    uniform,
)
from .sizes import LMN, MN


def _softmax(
    name: str,
    kernel: KernelFactory,
    dtype: torch.dtype = torch.float32,
    tolerance: Tolerance = FLOAT32,
    **blocks: int,
) -> KernelCase:
    build = partial(kernel, block_M=8, dtype=str(dtype).removeprefix("torch."), **blocks)
    return KernelCase(name, build, softmax_reference, MN, tensors(normal("M N", dtype)), ("Y",), tolerance)


def _reduce(
    name: str,
    kernel: KernelFactory,
    dim: int,
    op: str,
    is_int: bool = False,
    **blocks: int,
) -> KernelCase:
    is_3d = kernel is reduce.reduce_3d
    names = {"dtype": "int32" if is_int else "float32"}
    if kernel is not reduce.product_rows:
        names["op"] = op
    build = partial(partial(kernel, dim=dim) if is_3d else kernel, **names, **blocks)
    reference = partial(reduce.reduce_reference, dim=dim, op=op)
    tolerance = EXACT if is_int or op in ("max", "min", "absmax") else FLOAT32
    maker = _values("L M N" if is_3d else "M N", op, is_int)
    return KernelCase(name, build, reference, LMN if is_3d else MN, tensors(maker), ("B",), tolerance)


def _values(dims: str, op: str, is_int: bool) -> Maker:
    if is_int:
        return integers(dims, -1000, 1000)
    return uniform(dims, 0.5, 1.5) if op == "prod" else normal(dims)


SOFTMAX_CASES = (
    _softmax("softmax", softmax),
    _softmax("softmax_float16", softmax, torch.float16, FLOAT16),
    _softmax("three_pass_softmax", three_pass_softmax, block_N=8),
    _softmax("online_softmax", online_softmax, block_N=8),
)

NORM_CASES = (
    *(
        KernelCase(
            kernel.__name__,
            partial(kernel, block_M=8, **blocks),
            rms_norm_reference,
            MN,
            tensors(normal("M N"), normal("N")),
            ("Y",),
        )
        for kernel, blocks in ((rms_norm, {}), (two_pass_rms_norm, {"block_N": 8}), (padded_rms_norm, {}))
    ),
    *(
        KernelCase(
            kernel.__name__,
            partial(kernel, block_M=8, **blocks),
            layer_norm_reference,
            MN,
            tensors(normal("M N"), normal("N"), normal("N")),
            ("Y",),
        )
        for kernel, blocks in ((layer_norm, {}), (two_pass_layer_norm, {"block_N": 8}))
    ),
    KernelCase(
        "add_layer_norm",
        partial(add_layer_norm, block_M=8),
        add_layer_norm_reference,
        MN,
        tensors(normal("M N"), normal("M N"), normal("N"), normal("N")),
        ("Y", "S"),
    ),
    KernelCase(
        "layer_norm_gradient",
        layer_norm_gradient,
        layer_norm_gradient_reference,
        MN,
        tensors(normal("M N"), normal("M N"), normal("N"), normal("M"), normal("M"), normal("N"), normal("N")),
        ("dX", "dweight", "dbias"),
        inouts=("dweight", "dbias"),
        reads_padding=True,
    ),
)

REDUCE_CASES = (
    *(
        _reduce(f"reduce_rows_{op}", reduce.reduce_rows, 1, op, block_M=8)
        for op in ("sum", "max", "min", "abssum", "absmax")
    ),
    *(
        _reduce(f"reduce_rows_{op}_int32", reduce.reduce_rows, 1, op, is_int=True, block_M=8)
        for op in ("sum", "max", "bitand", "bitor", "bitxor")
    ),
    *(_reduce(f"reduce_columns_{op}", reduce.reduce_columns, 0, op, block_N=8) for op in ("sum", "min", "absmax")),
    _reduce("reduce_columns_bitxor_int32", reduce.reduce_columns, 0, "bitxor", is_int=True, block_N=8),
    *(
        _reduce(f"reduce_row_blocks_{op}", reduce.reduce_row_blocks, 1, op, block_M=8, block_N=8)
        for op in ("sum", "max", "min", "absmax")
    ),
    *(
        _reduce(f"reduce_row_blocks_{op}_int32", reduce.reduce_row_blocks, 1, op, is_int=True, block_M=8, block_N=8)
        for op in ("min", "bitand", "bitor", "bitxor")
    ),
    _reduce("product_rows", reduce.product_rows, 1, "prod", block_M=8),
    *(_reduce(f"reduce_3d_dim{dim}", reduce.reduce_3d, dim, "sum", block=8) for dim in range(3)),
    _reduce("reduce_3d_dim1_max", reduce.reduce_3d, 1, "max", block=8),
)

COMBINED_CASES = (
    KernelCase("one_pass_variance", one_pass_variance, one_pass_variance_reference, MN, tensors(normal("M N")), ("V",)),
    KernelCase(
        "largest_of_rows", largest_of_rows, largest_of_rows_reference, MN, tensors(normal("M N")), ("V", "W"), EXACT
    ),
)

STATISTICS_CASES = (
    KernelCase(
        "row_statistics",
        statistics.row_statistics,
        statistics.row_statistics_reference,
        MN,
        tensors(normal("M N")),
        ("Sum", "Low", "High", "At", "Above"),
    ),
    KernelCase(
        "nearest_points",
        statistics.nearest_points,
        statistics.nearest_points_reference,
        MN,
        tensors(normal("M 3"), normal("N 3")),
        ("D", "At"),
    ),
    KernelCase(
        "top_k",
        partial(rounds.top_k, k=2, block_M=4),
        partial(rounds.top_k_reference, k=2),
        MN,
        tensors(normal("M N")),
        ("High", "At"),
        EXACT,
    ),
    KernelCase("row_norms", statistics.row_norms, statistics.row_norms_reference, MN, tensors(normal("M N")), ("B",)),
)

PADDED_CASES = (
    KernelCase(
        "fragment_layer_norm",
        partial(fragment_layer_norm, length=16),
        layer_norm_reference,
        MN,
        tensors(normal("M N"), normal("N"), normal("N")),
        ("Y",),
    ),
    KernelCase(
        "block_logsumexp", partial(block_logsumexp, block_N=8), logsumexp_reference, MN, tensors(normal("M N")), ("Y",)
    ),
    KernelCase(
        "block_variance",
        partial(block_variance, block_N=8),
        block_variance_reference,
        MN,
        tensors(normal("M N")),
        ("Var", "Mean"),
    ),
)
ROW_CASES = (*PADDED_CASES, *SOFTMAX_CASES, *NORM_CASES, *REDUCE_CASES, *COMBINED_CASES, *STATISTICS_CASES)
