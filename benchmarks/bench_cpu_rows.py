"""Kernels over rows on one core, beside torch: softmax and RMSNorm of 4096 x 4096 float32, and matmul by dtype.

python -m benchmarks.bench_cpu_rows
"""

from __future__ import annotations

import torch

from kernels.matmul import matmul
from kernels.rms_norm import rms_norm
from kernels.softmax import softmax
from mesh_tensor.runtime.cpu import compile_for_cpu

from ._timing import Row, header, interleaved, row, verdicts

SIZE, PRODUCT = 4096, 1024
BLOCKS = (512, 256, 256)


def of_softmax() -> Row:
    """Both write into memory that is there."""
    x, y = torch.randn(SIZE, SIZE), torch.empty(SIZE, SIZE)
    kernel = compile_for_cpu(softmax(SIZE, SIZE, block_M=1))
    runs = {"C": lambda: kernel(x, y), "torch": lambda: torch.softmax(x, -1, out=y)}
    return row(f"softmax {SIZE} x {SIZE}", interleaved(runs), "C", "torch", must=1.2)


def of_rms_norm() -> Row:
    """torch has no `out=` for it: its result is new memory every time."""
    x, weight, y = torch.randn(SIZE, SIZE), torch.randn(SIZE), torch.empty(SIZE, SIZE)
    kernel = compile_for_cpu(rms_norm(SIZE, SIZE))
    runs = {
        "C": lambda: kernel(x, weight, y),
        "torch": lambda: torch.nn.functional.rms_norm(x, (SIZE,), weight, 1e-6),
    }
    return row(f"RMSNorm {SIZE} x {SIZE}", interleaved(runs), "C", "torch", must=1.2)


def of_product(size: int) -> Row:
    """float32, by the own micro-kernel."""
    a, b, c = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    kernel = compile_for_cpu(matmul(size, size, size, *BLOCKS))
    runs = {"C": lambda: kernel(a, b, c), "torch": lambda: torch.mm(a, b, out=c)}
    return row(f"matmul {size}³ float32", interleaved(runs, rounds=9), "C", "torch", must=1 / 0.7)


def of_narrow_product(dtype: str) -> Row:
    """16-bit inputs and result, summed in float32, beside the same in float32."""
    runs = {}
    for name in (dtype, "float32"):
        a, b = (torch.randn(PRODUCT, PRODUCT).to(getattr(torch, name)) for _ in range(2))
        c = torch.empty_like(a)
        kernel = compile_for_cpu(matmul(PRODUCT, PRODUCT, PRODUCT, *BLOCKS, dtype=name, accum_dtype="float32"))
        runs[name] = lambda kernel=kernel, tensors=(a, b, c): kernel(*tensors)
    return row(f"matmul {PRODUCT}³", interleaved(runs), dtype, "float32", must=2.0)


def rows() -> list[Row]:
    """Everything, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        narrow = [of_narrow_product(dtype) for dtype in ("float16", "bfloat16")]
        return [of_product(1024), of_product(2048), *narrow, of_softmax(), of_rms_norm()]
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    print(header("Kernels on one core"))
    print(verdicts(rows()))
