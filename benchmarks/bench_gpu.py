"""One GPU: the matmul that each device runs, next to torch's (cuBLAS).

python -m benchmarks.bench_gpu
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import mesh_tensor as mt

from ._timing import Row, header, interleaved, median_ms, row, table, verdicts
from .workloads import matmul_on_gpu

WHAT = "local matmul 8192 x 8192 x 8192, bfloat16"
TORCH = "torch"
CALLS = 10  # per measurement: the GPU works on them one after the other, and is waited for once
# block_M, block_N, block_K, stages, threads
BLOCKS = ((128, 128, 64, 3, 128), (128, 256, 64, 3, 256), (256, 128, 64, 3, 256), (128, 256, 64, 4, 256))


def rows(rounds: int = 21) -> list[Row]:
    """The fastest choice of blocks next to torch, of whose speed it must have 0.9."""
    if not torch.cuda.is_available():
        return [Row(WHAT, "mesh_tensor", TORCH, note="no GPU")]
    times = measure(8192, rounds)
    best = min((who for who in times if who != TORCH), key=lambda who: median_ms(times[who]))
    return [row(WHAT, times, best, TORCH, must=1 / 0.9)]


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per call of torch's matmul and of each choice of blocks."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    expected = a @ b
    runs = {TORCH: _several(lambda: torch.mm(a, b, out=c))}
    for blocks in BLOCKS:
        kernel = mt.compile(matmul_on_gpu(size, *blocks), target="cuda")
        torch.testing.assert_close(kernel(a, b), expected, rtol=2e-2, atol=1.0)  # sums have a deviation of 90
        runs[" x ".join(map(str, blocks[:3])) + f", {blocks[3]} stages"] = _several(
            lambda kernel=kernel: kernel(a, b, c)
        )
    return {who: [s / CALLS for s in times] for who, times in interleaved(runs, rounds).items()}


def _several(run: Callable[[], object]) -> Callable[[], None]:
    def several() -> None:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()

    return several


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    print(header("One GPU"))
    print(verdicts(rows(options.rounds)))
    if torch.cuda.is_available():
        times = measure(8192, options.rounds)
        lines = [(who, f"{median_ms(t):.3f}", f"{2e-9 * 8192**3 / median_ms(t):.0f}") for who, t in times.items()]
        print(table(["", "ms", "TFLOP/s"], lines))
