"""What lowering costs: against `tilelang.compile` of the same kernel, over kernel size, and over mesh size.

python -m benchmarks.bench_lower
"""

from __future__ import annotations

import tracemalloc

import tilelang

import mesh_tensor as mt

from ._timing import header, interleaved, median_ms, ratio, table
from .workloads import chain, matmul_for_c, matmul_on_grid

LENGTHS = (1, 4, 16, 64, 256, 1024)
SIDES = (2, 4, 8, 16, 32, 64)


def against_compile() -> str:
    """`lower` of the 2 x 2 matmul next to `tilelang.compile` of the matmul on its own, nothing cached."""
    tilelang.disable_cache()
    tilelang.set_log_level("WARNING")
    annotated, plain = matmul_on_grid(2), matmul_for_c()
    times = interleaved(
        {
            "lower": lambda: mt.lower(annotated),
            "tilelang.compile": lambda: tilelang.compile(plain, target="c", execution_backend="cython"),
        },
        rounds=7,
    )
    rows = [(name, f"{median_ms(values):.1f}") for name, values in times.items()]
    rows.append(("lower / tilelang.compile", f"{ratio(times, 'lower', 'tilelang.compile'):.1%}"))
    return "## Against tilelang.compile\n\n" + table(["matmul, 8192 x 8192 x 8192", "ms"], rows)


def over_kernel_size() -> str:
    """`lower` of kernels of more and more statements."""
    funcs = {length: chain(length) for length in LENGTHS}
    times = interleaved({str(n): lambda f=func: mt.lower(f) for n, func in funcs.items()}, rounds=7)
    rows = [(n, f"{median_ms(times[str(n)]):.1f}", f"{median_ms(times[str(n)]) / n:.2f}") for n in LENGTHS]
    return "## Over kernel size\n\n" + table(["statements", "ms", "ms per statement"], rows)


def over_mesh_size() -> str:
    """`lower` of one kernel on larger and larger meshes; memory is the peak that Python allocated meanwhile."""
    funcs = {side: matmul_on_grid(side) for side in SIDES}
    times = interleaved({str(side): lambda f=func: mt.lower(f) for side, func in funcs.items()}, rounds=7)
    rows = [
        (side * side, f"{median_ms(times[str(side)]):.1f}", f"{_peak_kib(func):.0f}") for side, func in funcs.items()
    ]
    return "## Over mesh size\n\n" + table(["devices", "ms", "peak KiB"], rows)


def _peak_kib(func: tilelang.tvm.tirx.PrimFunc) -> float:
    tracemalloc.start()
    mt.lower(func)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1024


if __name__ == "__main__":
    print(header("Cost of lowering"))
    for part in (against_compile, over_kernel_size, over_mesh_size):
        print(part())
