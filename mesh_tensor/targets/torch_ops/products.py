"""Who multiplies float32 matrices on a CPU: MKL, which is torch's choice, or oneDNN, which torch brings as well.

The rule: oneDNN for large ones on a processor with AVX-512 that isn't Intel's, since MKL uses half of its width there.
Nothing is measured for it, so that all processes on a machine decide alike. Where they differ in the last bits, it is
by the shapes alone: oneDNN's sums were the same for transposed and strided matrices, and for any number of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Linear = Callable[..., Tensor]  # of (..., summed), (columns, summed) and, if there is one, a bias of (columns,)

_LEAST = 1 << 21  # multiplications: below that, what it takes to start weighs more
_LEAST_ROWS, _LEAST_SUMMED = 8, 64  # for fewer, oneDNN would copy more than it computes


def linear(rows: int, summed: int, columns: int, dtype: torch.dtype) -> Linear:
    """The product of `rows` rows with a transposed matrix, and a bias; of at least that many where rows are open."""
    large = rows >= _LEAST_ROWS and summed >= _LEAST_SUMMED and rows * summed * columns >= _LEAST
    return _by_onednn if dtype is torch.float32 and large and prefers_onednn() else F.linear


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies large float32 matrices faster than MKL on this processor, and torch has both."""
    there = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return there and wide and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _vendor() != "GenuineIntel"


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "GenuineIntel"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "GenuineIntel")


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The operator has no gradients of its own, takes memory of CPUs, and reads biases as if they were contiguous."""
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if recorded or not x.is_cpu:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(
        x, weight, None if bias is None else bias.contiguous(), "none", [], ""
    )
