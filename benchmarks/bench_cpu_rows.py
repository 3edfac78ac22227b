"""Kernels over rows on one core, beside torch: softmax and RMSNorm of 4096 x 4096 float32.

python -m benchmarks.bench_cpu_rows
"""

from __future__ import annotations

import torch

from kernels.rms_norm import rms_norm
from kernels.softmax import softmax
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

from ._timing import Row, header, interleaved, row, verdicts

SIZE = 4096


def of_softmax(block_M: int) -> Row:
    """A program handles `block_M` rows. Both write into memory that is there."""
    x, y = torch.randn(SIZE, SIZE), torch.empty(SIZE, SIZE)
    kernel = compile_for_cpu(softmax(SIZE, SIZE, block_M=block_M))
    runs = {"C": lambda: kernel(x, y), "torch": lambda: torch.softmax(x, -1, out=y)}
    return row(f"softmax {SIZE} x {SIZE}, blocks of {block_M}", interleaved(runs), "C", "torch", must=1.2)


def of_rms_norm() -> Row:
    """torch has no `out=` for it: its result is new memory every time."""
    x, weight, y = torch.randn(SIZE, SIZE), torch.randn(SIZE), torch.empty(SIZE, SIZE)
    kernel = compile_for_cpu(rms_norm(SIZE, SIZE))
    runs = {
        "C": lambda: kernel(x, weight, y),
        "torch": lambda: torch.nn.functional.rms_norm(x, (SIZE,), weight, 1e-6),
    }
    return row(f"RMSNorm {SIZE} x {SIZE}", interleaved(runs), "C", "torch", must=1.2)


def rows() -> list[Row]:
    """Everything, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [of_softmax(1), of_softmax(32), of_rms_norm()]
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    print(header("Kernels on one core"))
    print(verdicts(rows()))
