"""Cases of products of which only parts count: blocks of a sparse matrix, rows of groups, mixtures of experts."""

from __future__ import annotations

from functools import partial

import torch

from kernels import sparse
from kernels.grouped_gradient import grouped_weight_gradient, grouped_weight_gradient_reference

from .case import KernelCase, Sizes, integers, normal, tensors, uniform
from .sizes import MNK

_BLOCKS = {"block_M": 8, "block_N": 8, "block_K": 8}
_EXPERTS = (
    {"groups": 4, "rows": 48, "N": 16, "K": 24},
    {"groups": 3, "rows": 24, "N": 13, "K": 10},
    {"groups": 2, "rows": 8, "N": 7, "K": 3},
)
_MIXTURES = (
    {"experts": 4, "tokens": 12, "hidden": 16, "model": 24},
    {"experts": 3, "tokens": 13, "hidden": 10, "model": 7},
)


def _offsets(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    """Where groups of rows start and end; some have none."""
    inner = torch.randint(0, sizes["rows"] + 1, (sizes["groups"] - 1,), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([sizes["rows"]])]).int()


def _counts(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    """How many rows groups have; some have none."""
    return _offsets(generator, sizes).diff()


def _mask(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
    """Which blocks of 8 count."""
    return torch.rand([-(-sizes[name] // 8) for name in "MNK"], generator=generator) < 0.6


SPARSE_CASES: tuple[KernelCase, ...] = (
    KernelCase(
        "expert_mlp",
        partial(sparse.expert_mlp, **_BLOCKS),
        sparse.expert_mlp_reference,
        _MIXTURES,
        tensors(normal("experts tokens model"), normal("experts model hidden"), normal("experts hidden model")),
        ("up", "Y"),
    ),
    KernelCase(
        "block_sparse_matmul",
        partial(sparse.block_sparse_matmul, **_BLOCKS, swizzle=True),
        partial(sparse.block_sparse_matmul_reference, block=8),
        MNK,
        tensors(normal("M K"), normal("K N"), _mask),
        ("C",),
    ),
    KernelCase(
        "grouped_matmul_rows",
        partial(sparse.grouped_matmul_rows, **_BLOCKS),
        sparse.grouped_matmul_rows_reference,
        _EXPERTS,
        tensors(normal("rows K"), normal("groups K N"), _offsets),
        ("C",),
    ),
    KernelCase(
        "grouped_weight_gradient",
        partial(grouped_weight_gradient, block_N=8, block_K=8, block_rows=8),
        grouped_weight_gradient_reference,
        _EXPERTS,
        tensors(normal("rows K"), normal("rows N"), _offsets),
        ("dB",),
    ),
    KernelCase(
        "padded_grouped_matmul",
        partial(sparse.padded_grouped_matmul, **_BLOCKS),
        partial(sparse.padded_grouped_matmul_reference, block=8),
        _EXPERTS,
        tensors(normal("rows K"), normal("groups K N"), integers("rows/8", 0, "groups")),
        ("C",),
    ),
    KernelCase(
        "scaled_grouped_matmul",
        partial(sparse.scaled_grouped_matmul, **_BLOCKS),
        partial(sparse.scaled_grouped_matmul_reference, block=8),
        _EXPERTS,
        tensors(normal("rows K"), normal("groups K N"), integers("rows/8", 0, "groups"), uniform("groups", 0.5, 2.0)),
        ("C",),
    ),
    KernelCase(
        "searched_grouped_matmul",
        partial(sparse.searched_grouped_matmul, **_BLOCKS),
        sparse.searched_grouped_matmul_reference,
        _EXPERTS,
        tensors(normal("rows K"), normal("groups K N"), _counts),
        ("C",),
    ),
)
