"""Kernels of every kind on one core, beside torch: CPU time of one thread, which other processes change little.

python -m benchmarks.bench_cpu_kernels [name ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tilelang import tvm

from kernels.convolution import convolution_2d
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embedding
from kernels.flash_attention import flash_attention
from kernels.gemv import gemv
from kernels.layer_norm import group_norm, layer_norm
from kernels.matmul_bias_gelu import matmul_bias_gelu
from kernels.rope import rope
from kernels.transpose import transpose
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

from ._timing import Row, Run, header, interleaved, row, verdicts

_MUST = 1.1
_ROUNDS = 9


@dataclass(frozen=True)
class Case:
    """A kernel whose last parameter is its result, its inputs, and the same by torch."""

    what: str
    kernel: Callable[[], tvm.tirx.PrimFunc]
    inputs: Callable[[], Sequence[torch.Tensor]]
    torch: Callable[..., torch.Tensor]
    rtol: float = 1e-4


def _heads(causal: bool) -> Case:
    name = "flash attention (1, 8, 1024, 64)" + (", causal" if causal else "")
    return Case(
        name,
        lambda: flash_attention(1, 8, 1024, 1024, 64, causal, skip_masked_blocks=causal, dtype="float32"),
        lambda: [torch.randn(1, 8, 1024, 64) for _ in range(3)],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


CASES = (
    _heads(causal=False),
    _heads(causal=True),
    Case(
        "layer norm 4096 x 1024",
        lambda: layer_norm(4096, 1024),
        lambda: [torch.randn(4096, 1024), torch.randn(1024), torch.randn(1024)],
        lambda x, weight, bias: F.layer_norm(x, (1024,), weight, bias),
    ),
    Case(
        "group norm (2, 320, 64 x 64), 32 groups",
        lambda: group_norm(2, 320, 4096, 32),
        lambda: [torch.randn(2, 320, 4096), torch.randn(320), torch.randn(320)],
        lambda x, weight, bias: F.group_norm(x, 32, weight, bias),
    ),
    Case(
        "matmul + bias + gelu 512 x 2048 x 1024",
        lambda: matmul_bias_gelu(512, 2048, 1024, block_M=128, block_N=128, block_K=128, out_dtype="float32"),
        lambda: [torch.randn(512, 1024), torch.randn(1024, 2048), torch.randn(2048)],
        lambda a, b, bias: F.gelu(torch.addmm(bias, a, b), approximate="tanh"),
        rtol=1e-2,
    ),
    Case(
        "gemv 4096 x 4096",
        lambda: gemv(4096, 4096),
        lambda: [torch.randn(4096, 4096), torch.randn(4096)],
        torch.mv,
        rtol=1e-2,
    ),
    Case(
        "transpose 4096 x 4096",
        lambda: transpose(4096, 4096),
        lambda: [torch.randn(4096, 4096)],
        lambda a: a.t().contiguous(),
    ),
    Case(
        "convolution 3 x 3, (4, 56, 56, 64) -> 64",
        lambda: convolution_2d(4, 64, 56, 56, 64, block_K=64),
        lambda: [torch.randn(4, 56, 56, 64), torch.randn(3, 3, 64, 64)],
        lambda x, k: F.conv2d(x.permute(0, 3, 1, 2), k.permute(3, 2, 0, 1), padding=1).permute(0, 2, 3, 1),
        rtol=1e-2,
    ),
    Case(
        "embedding of 4096 tokens, 1024 features",
        lambda: embedding(4096, 65536, 1024, block_N=1024),
        lambda: [torch.randint(0, 65536, (4096,)).int(), torch.randn(65536, 1024)],
        lambda ids, table: F.embedding(ids, table),
    ),
    Case(
        "rope 2048 x 16 x 64",
        lambda: rope(2048, 16, 64),
        lambda: [torch.randn(2048, 16, 64), torch.randn(2048, 32), torch.randn(2048, 32)],
        _rope,
    ),
    Case(
        "cross-entropy 2048 x 8192",
        lambda: cross_entropy(2048, 8192, block_M=1),
        lambda: [torch.randn(2048, 8192), torch.randint(0, 8192, (2048,)).int()],
        lambda logits, labels: F.cross_entropy(logits, labels.long(), reduction="none"),
    ),
)


def thread_time(run: Run, calls: int) -> float:
    """The CPU time of one call of `run` in this thread."""
    start = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - start) / calls


def compared(case: Case) -> Row:
    """The case beside torch; its result is right, or this raises."""
    inputs = list(case.inputs())
    expected = case.torch(*inputs)
    result = torch.empty_like(expected, memory_format=torch.contiguous_format)
    kernel = compile_for_cpu(case.kernel())
    kernel(*inputs, result)
    torch.testing.assert_close(result, expected, rtol=case.rtol, atol=case.rtol)
    runs: dict[str, Run] = {"C": lambda: kernel(*inputs, result), "torch": lambda: case.torch(*inputs)}
    return row(case.what, interleaved(runs, _ROUNDS, clock=thread_time), "C", "torch", must=_MUST)


def rows(names: Sequence[str] = ()) -> list[Row]:
    """Everything, or what has one of the names, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [compared(case) for case in CASES if not names or any(name in case.what for name in names)]
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    print(header("Kernels on one core, CPU time"))
    print(verdicts(rows(sys.argv[1:])))
