"""How fast a virtual mesh runs a kernel: on two devices and on one, against calling the unsharded kernel directly.

python -m benchmarks.bench_run
"""

from __future__ import annotations

import argparse

import torch

import mesh_tensor as mt
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

from ._timing import header, interleaved, median_ms, ratio, table
from .workloads import M_SPLIT, matmul_rows


def runs(size: int, devices: int) -> dict:
    """The unsharded kernel, and the mesh fed with global tensors and with tensors that already lie on it."""
    kernel, annotated = matmul_rows(size, devices)
    a, b, c = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    direct, mesh_kernel = compile_for_cpu(kernel), mt.compile(annotated, target="c")
    mesh = mt.Mesh({"x": devices})
    a_tiles, b_tiles = mt.distribute(a, mesh, M_SPLIT["A"]), mt.distribute(b, mesh, {})
    direct(a, b, c)
    torch.testing.assert_close(mesh_kernel(a, b), c)
    return {
        "the TileLang kernel": lambda: direct(a, b, c),
        "mesh, global tensors": lambda: mesh_kernel(a, b, c),
        "mesh, output made anew": lambda: mesh_kernel(a, b),
        "mesh, MeshTensors": lambda: mesh_kernel(a_tiles, b_tiles),
    }


def compare(size: int, devices: int, rounds: int) -> str:
    """A table of the ways to run the matmul, each with its speed relative to the plain kernel."""
    times = interleaved(runs(size, devices), rounds=rounds)
    flops = 2 * size**3
    rows = [
        (
            name,
            f"{median_ms(values):.2f}",
            f"{flops / median_ms(values) / 1e6:.0f}",
            f"{ratio(times, 'the TileLang kernel', name):.2f}",
        )
        for name, values in times.items()
    ]
    title = f"## matmul {size} x {size} x {size}, float32, M split over {devices} device{'s' * (devices > 1)}\n\n"
    return title + table(["", "ms", "GFLOP/s", "speed, relative"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(header("Speed of a virtual mesh"))
    for devices in (2, 1):
        print(compare(options.size, devices, options.rounds))
