"""Kernels whose local kernels are compiled for NVIDIA GPUs: what each device of a sharded kernel runs.

`python -m tests.targets.cuda.kernels` (`make cuda`) compiles all of them for all architectures with nvcc."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

from tilelang import tvm

import mesh_tensor as mt
from kernels.flash_attention import flash_attention
from kernels.matmul import matmul
from kernels.matmul_bias_gelu import matmul_bias_gelu
from kernels.mlp import mlp_down, mlp_up
from kernels.rms_norm import rms_norm
from kernels.softmax import softmax
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.steps import KernelStep
from mesh_tensor.targets.cuda.kernel import cuda_binary

# Each with the instructions that its tile products become.
ARCHITECTURES = {
    "sm_80": ("mma_sync", "ldmatrix"),
    "sm_90a": ("wgmma", "tma_load"),
    "sm_100a": ("mma_sync", "tma_load"),
}
_COLUMNS_TIMES_ROWS = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}
_HALF = {"dtype": "float16"}
_WIDE = {"block_M": 128, "block_N": 128, **_HALF}


@dataclass(frozen=True)
class Case:
    """A sharded kernel. `products`: how many of its local kernels multiply tiles; `coordinates`: how many of them
    take the device's coordinate."""

    kernel: tvm.tirx.PrimFunc
    shardings: dict[str, dict[str, int]]
    kernels: int
    products: int = 0
    coordinates: int = 0

    @cached_property
    def local_kernels(self) -> tuple[KernelStep, ...]:
        """What a device of a mesh of two runs, in order."""
        program = lower_to_program(mt.annotate(self.kernel, {"x": 2}, self.shardings), True)
        return tuple(step for step in program.steps if isinstance(step, KernelStep))


CASES = {
    "matmul, K split": Case(matmul(256, 256, 512, **_WIDE), _COLUMNS_TIMES_ROWS, kernels=2, products=1),
    "matmul, ragged M split": Case(matmul(250, 256, 512, **_WIDE), {"A": {"x": 0}, "C": {"x": 0}}, 1, products=1),
    "matmul+bias+gelu, K split": Case(matmul_bias_gelu(256, 256, 512, **_HALF), _COLUMNS_TIMES_ROWS, 2, 1, 1),
    "softmax, columns split": Case(softmax(128, 256), {"X": {"x": 1}, "Y": {"x": 1}}, kernels=3),
    "RMSNorm, columns split": Case(rms_norm(128, 256), {"X": {"x": 1}, "weight": {"x": 0}, "Y": {"x": 1}}, kernels=2),
    "MLP, up": Case(mlp_up(256, 512, 256, **_HALF), {"x": {}, "w1": {"x": 1}, "h": {"x": 1}}, 1, products=1),
    "MLP, down": Case(mlp_down(256, 512, 256, **_HALF), _COLUMNS_TIMES_ROWS, kernels=2, products=1),
    "causal attention, queries split": Case(
        flash_attention(1, 4, 128, 128, 64, causal=True), {"Q": {"x": 2}, "Out": {"x": 2}}, 1, products=1, coordinates=1
    ),
}


def main() -> None:
    """Compile everything, and say how long it took and how large it is."""
    for name, case in CASES.items():
        for step in case.local_kernels:
            for arch in ARCHITECTURES:
                start = time.perf_counter()
                size = len(cuda_binary(step.func, arch))
                print(f"{name}: {step.name} for {arch}: {size} bytes, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
