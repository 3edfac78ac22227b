"""Cases of the kernels that multiply matrices: matmul, matmul+bias+gelu, MLP, matrix-vector, attention,
convolution."""

from __future__ import annotations

from functools import partial

import torch

from kernels.convolution import convolution_2d, convolution_2d_reference
from kernels.flash_attention import flash_attention, flash_attention_reference
from kernels.gemv import gemv, gemv_reference, gevm
from kernels.low_rank import low_rank, low_rank_reference
from kernels.matmul import batched_matmul, matmul, matmul_reference, split_k_matmul, split_k_matmul_reference
from kernels.matmul_bias_gelu import matmul_bias_gelu, matmul_bias_gelu_reference
from kernels.mlp import mlp_down, mlp_gelu, mlp_gelu_reference, mlp_up, mlp_up_reference

from .case import BFLOAT16, EXACT, FLOAT16, FLOAT16_WITHIN, FLOAT32, KernelCase, Tolerance, integers, normal, tensors
from .sizes import BATCH_MNK, KN, MK, MNK, NHWCF

_BLOCKS = {"block_M": 8, "block_N": 16, "block_K": 8}


def _matmul(
    suffix: str,
    trans_A: bool = False,
    trans_B: bool = False,
    dtype: torch.dtype = torch.float32,
    out: torch.dtype = torch.float32,
    tolerance: Tolerance = FLOAT32,
) -> KernelCase:
    is_int = dtype == torch.int8
    build = partial(
        matmul,
        **_BLOCKS,
        trans_A=trans_A,
        trans_B=trans_B,
        dtype=_text(dtype),
        accum_dtype="int32" if is_int else "float32",
        out_dtype=_text(out),
    )
    reference = partial(matmul_reference, trans_A=trans_A, trans_B=trans_B, out_dtype=out)
    make = partial(integers, low=-128, high=128, dtype=dtype) if is_int else partial(normal, dtype=dtype)
    inputs = tensors(make("K M" if trans_A else "M K"), make("N K" if trans_B else "K N"))
    return KernelCase(f"matmul{suffix}", build, reference, MNK, inputs, ("C",), tolerance)


def _bias_gelu(suffix: str, dtype: torch.dtype, out: torch.dtype, tolerance: Tolerance) -> KernelCase:
    build = partial(matmul_bias_gelu, **_BLOCKS, dtype=_text(dtype), out_dtype=_text(out))
    reference = partial(matmul_bias_gelu_reference, out_dtype=out)
    inputs = tensors(normal("M K", dtype), normal("K N", dtype), normal("N"))
    return KernelCase(f"matmul_bias_gelu{suffix}", build, reference, MNK, inputs, ("C",), tolerance)


def _attention(
    suffix: str,
    past: int = 0,
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    tolerance: Tolerance = FLOAT32,
    **options: bool,
) -> KernelCase:
    build = partial(flash_attention, **options, groups=groups, block_M=8, block_N=8, dtype=_text(dtype))
    reference = partial(flash_attention_reference, causal=options.get("causal", False))
    shapes = ((2, 4, 16, 8), (1, 6, 13, 8), (3, 2, 7, 5))
    sizes = tuple(
        {"batch": batch, "heads": heads, "seq_q": seq, "seq_kv": seq + past, "dim": dim}
        for batch, heads, seq, dim in shapes
    )
    kv = normal(f"batch heads/{groups} seq_kv dim", dtype)
    inputs = tensors(normal("batch heads seq_q dim", dtype), kv, kv)
    return KernelCase(f"flash_attention{suffix}", build, reference, sizes, inputs, ("Out",), tolerance)


def _convolution(
    suffix: str, stride: int = 1, dtype: torch.dtype = torch.float32, tolerance: Tolerance = FLOAT32
) -> KernelCase:
    build = partial(convolution_2d, stride=stride, block_M=8, block_N=8, block_K=16, dtype=_text(dtype))
    reference = partial(convolution_2d_reference, stride=stride)
    inputs = tensors(normal("N H W C", dtype), normal("3 3 C F", dtype))
    return KernelCase(f"convolution_2d{suffix}", build, reference, NHWCF, inputs, ("out",), tolerance)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


MATMUL_CASES = (
    _matmul(""),
    _matmul("_trans_A", trans_A=True),
    _matmul("_trans_B", trans_B=True),
    _matmul("_trans_A_trans_B", trans_A=True, trans_B=True),
    _matmul("_float16", dtype=torch.float16, out=torch.float16, tolerance=FLOAT16),
    _matmul("_bfloat16", dtype=torch.bfloat16, out=torch.bfloat16, tolerance=BFLOAT16),
    _matmul("_int8", dtype=torch.int8, out=torch.int32, tolerance=EXACT),
    KernelCase(
        "batched_matmul",
        partial(batched_matmul, **_BLOCKS),
        matmul_reference,
        BATCH_MNK,
        tensors(normal("batch M K"), normal("batch K N")),
        ("C",),
    ),
    KernelCase(
        "split_k_matmul",
        partial(split_k_matmul, **_BLOCKS, split=2),
        split_k_matmul_reference,
        MNK,
        tensors(normal("M K"), normal("K N"), normal("M N")),
        ("C",),
        inouts=("C",),
    ),
)

MLP_CASES = (
    _bias_gelu("", torch.float32, torch.float32, FLOAT32),
    _bias_gelu("_float16_out", torch.float32, torch.float16, FLOAT16),
    _bias_gelu("_float16", torch.float16, torch.float16, FLOAT16),
    KernelCase(
        "mlp_up",
        partial(mlp_up, **_BLOCKS),
        mlp_up_reference,
        ({"tokens": 16, "hidden": 48, "model": 24}, {"tokens": 13, "hidden": 30, "model": 7}),
        tensors(normal("tokens model"), normal("model hidden")),
        ("h",),
    ),
    KernelCase(
        "mlp_gelu",
        partial(mlp_gelu, block_M=8, block_N=16),
        mlp_gelu_reference,
        ({"tokens": 24, "hidden": 48}, {"tokens": 13, "hidden": 30}),
        tensors(normal("tokens hidden")),
        ("h",),
    ),
    KernelCase(
        "mlp_down",
        partial(mlp_down, **_BLOCKS),
        matmul_reference,
        ({"tokens": 16, "hidden": 48, "model": 24}, {"tokens": 13, "hidden": 30, "model": 7}),
        tensors(normal("tokens hidden"), normal("hidden model")),
        ("C",),
    ),
)

GEMV_CASES = (
    KernelCase(
        "gemv",
        partial(gemv, block_M=8, block_K=16),
        gemv_reference,
        MK,
        tensors(normal("M K"), normal("K")),
        ("y",),
    ),
    KernelCase(
        "gevm",
        partial(gevm, block_K=8, block_N=8),
        gemv_reference,
        KN,
        tensors(normal("K"), normal("K N")),
        ("y",),
    ),
)

ATTENTION_CASES = (
    _attention(""),
    _attention("_causal", causal=True),
    _attention("_causal_skip", causal=True, skip_masked_blocks=True),
    _attention("_causal_past", past=8, causal=True, skip_masked_blocks=True),
    _attention("_cross", past=12),
    _attention("_grouped", groups=2, causal=True),
    _attention("_float16", dtype=torch.float16, tolerance=FLOAT16_WITHIN),
)

CONVOLUTION_CASES = (
    _convolution(""),
    _convolution("_strided", stride=2),
    _convolution("_float16", dtype=torch.float16, tolerance=FLOAT16),
)

LOW_RANK_CASES = (
    KernelCase(
        "low_rank",
        partial(low_rank, rank=8, block_M=8, block_N=8),
        low_rank_reference,
        MNK,
        tensors(normal("M K"), normal("K 8"), normal("8 N")),
        ("Y",),
        Tolerance(1e-4, 1e-4),
    ),
)

PRODUCT_CASES = (*LOW_RANK_CASES, *MATMUL_CASES, *MLP_CASES, *GEMV_CASES, *ATTENTION_CASES, *CONVOLUTION_CASES)
