"""`python -m tests.targets.cpu.cache_process 2.0 3.0` compiles kernels, and prints the sums of what they compute."""

import os
import sys
import warnings
from collections.abc import Sequence

import torch

import mesh_tensor  # noqa: F401  (brings TileLang's TVM)
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

from .kernels import dynamic_scale


def total(factor: float) -> float:
    """Of ones, scaled."""
    x, y = torch.ones(5, 7), torch.empty(5, 7)
    compile_for_cpu(dynamic_scale(factor))(x, y)
    return y.sum().item()


def totals_in(environment: dict[str, str], factors: Sequence[float], _: int) -> list[float]:
    """The same in a process of its own, with this environment."""
    os.environ.update(environment)
    warnings.simplefilter("error", UserWarning)
    return [total(factor) for factor in factors]


if __name__ == "__main__":
    print(*[total(float(factor)) for factor in sys.argv[1:]])
