"""`python -m tests.targets.cpu.cache_process 2.0 3.0` compiles kernels, and prints the sums of what they compute."""

import sys

import torch

import mesh_tensor  # noqa: F401  (brings TileLang's TVM)
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

from .kernels import dynamic_scale


def main() -> None:
    """Of ones."""
    x, y = torch.ones(5, 7), torch.empty(5, 7)
    for factor in sys.argv[1:]:
        compile_for_cpu(dynamic_scale(float(factor)))(x, y)
        print(y.sum().item())


if __name__ == "__main__":
    main()
