"""Cases of kernels that walk their blocks in orders and numbers of their own, or take lengths and scalars."""

from __future__ import annotations

from functools import partial

import torch

from kernels import schedules
from kernels.matmul import matmul_reference

from .case import EXACT, FLOAT32, KernelCase, KernelFactory, Maker, integers, normal, tensors, uniform
from .sizes import MN, MNK

_BLOCKS = {"block_M": 8, "block_N": 8, "block_K": 8}
_PARTS_OF_K = ({"M": 24, "N": 16, "K": 32}, {"M": 13, "N": 30, "K": 64}, {"M": 3, "N": 5, "K": 32})
_LENGTHS = ({"batch": 4, "rows": 24, "N": 12}, {"batch": 3, "rows": 13, "N": 7}, {"batch": 1, "rows": 5, "N": 3})
_CHUNKS = (
    {"batch": 4, "chunks": 6, "heads": 8, "width": 6},
    {"batch": 3, "chunks": 5, "heads": 4, "width": 7},
    {"batch": 1, "chunks": 2, "heads": 2, "width": 3},
)
_ROWS = ({"rows": 48, "dim": 8}, {"rows": 30, "dim": 13}, {"rows": 7, "dim": 3})


def _product(kernel: KernelFactory, *more: Maker, **options: object) -> KernelCase:
    name = "_".join([kernel.__name__, *(str(key) for key in options)])
    inputs = tensors(normal("M K"), normal("K N"), *more)
    return KernelCase(name, partial(kernel, **_BLOCKS, **options), matmul_reference, MNK, inputs, ("C",))


def _scaled_mean(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(a.double() @ b.double() / d.double() + bias.double()).float()


def _causal(name: str, start: str) -> KernelCase:
    def reference(s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = s.double().triu() if start in ("row", "on") else s.double().tril()
        return (seen @ v.double()).float()

    build = partial(schedules.causal_product, block=8, start=start)
    return KernelCase(name, build, reference, _ROWS, tensors(normal("rows rows"), normal("rows dim")), ("C",))


def _ragged(a: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(a.shape[1])[None, :, None] < lengths[:, None, None]
    return (a.double() * seen).sum(1).float()


SCHEDULE_CASES: tuple[KernelCase, ...] = (
    _product(schedules.hinted_matmul),
    _product(schedules.waves_matmul, programs=5, group=2),
    KernelCase(
        "waves_split_k",
        partial(schedules.waves_split_k, **_BLOCKS, programs=5),
        schedules.waves_split_k_reference,
        _PARTS_OF_K,
        tensors(normal("M K"), normal("K N")),
        ("partial", "C"),
    ),
    _causal("upper_product", "row"),
    _causal("lower_product", "zero"),
    _causal("backward_product", "back"),
    KernelCase(
        "backwards_rows",
        partial(schedules.backwards_rows, block=8),
        lambda a: 2 * a,
        MN,
        tensors(normal("M N")),
        ("B",),
        EXACT,
    ),
    KernelCase(
        "running_sums",
        partial(schedules.running_sums, block_M=8),
        lambda a: a.double().cumsum(1).float(),
        MN,
        tensors(normal("M N")),
        ("B",),
        FLOAT32,
    ),
    KernelCase(
        "ragged_sums",
        partial(schedules.ragged_sums, block_M=8),
        _ragged,
        _LENGTHS,
        tensors(normal("batch rows N"), integers("batch", 0, "rows")),
        ("C",),
    ),
    KernelCase(
        "chunk_sums",
        schedules.chunk_sums,
        schedules.chunk_sums_reference,
        _CHUNKS,
        lambda g, s: [
            torch.randn(s["batch"], s["chunks"] * 8, s["heads"], s["width"], generator=g),
            torch.randn(s["batch"], -(-s["heads"] // 2), generator=g),
        ],
        ("B",),
    ),
    KernelCase(
        "scaled_mean_matmul",
        partial(schedules.scaled_mean_matmul, **_BLOCKS),
        _scaled_mean,
        MNK,
        tensors(normal("M K"), normal("K N"), uniform("1", 4.0, 8.0), normal("N")),
        ("C",),
        reads_padding=True,
    ),
    KernelCase(
        "matmul_with_workspace",
        partial(schedules.matmul_with_workspace, **_BLOCKS),
        lambda a, b, workspace: matmul_reference(a, b),
        MNK,
        tensors(normal("M K"), normal("K N"), normal("M N")),
        ("C",),
    ),
)
