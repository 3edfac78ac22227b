"""Kernels whose results tell which calls of which ranks they are made of. What a device computes is torch's; all else
is what every kernel on ranks runs."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache

import tilelang.language as T
import torch

from mesh_tensor import Mesh
from mesh_tensor.api.compile import MeshKernel
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import AllocStep, KernelStep
from mesh_tensor.targets.kernels import Target
from tests.runtime.programs import collective, kernel_of, program, value

PART = 4  # elements of A on every rank
NAMES = ("total", "largest", "gathered", "alone")
_parsing = threading.Lock()  # Python 3.11 counts the depth of syntax trees for all threads at once


class OnPurpose(Exception):
    """What a kernel raises."""


class Faults(threading.local):
    """What the next kernel of this thread does instead of computing."""

    now = None


faults = Faults()


def compiler(func, poison):
    """Its result is its argument and one."""

    def run(source, target):
        fault, faults.now = faults.now, None
        if fault is not None:
            fault()
        target.copy_(source + 1)

    return run


def wide_kernel(name: str, size: int, made: int):
    """A kernel's parameters, for the global view; its body is no one's business."""
    with _parsing:

        @T.prim_func
        def kernel(A: T.Tensor((size,), "float32"), C: T.Tensor((made,), "float32")):
            with T.Kernel(1, threads=128):
                for i in T.serial(size):
                    if i < made:
                        C[i] = A[i] + 1.0

    return kernel.with_attr("global_symbol", name)


def program_of(name: str, count: int) -> Program:
    """`total`, `largest`: the sum, or the maximum, of all ranks' parts; `gathered`: all parts; `alone`: the own one."""
    mesh, size = Mesh({"x": count}), PART * count
    part = value("A", (size,), mesh, {"x": 0})
    if name == "alone":
        steps = [AllocStep("C"), KernelStep("kernel_0", wide_kernel(name, PART, PART), ("A", "C"), (), ("C",), 0)]
        return program(mesh, [part, value("C", (size,), mesh, {"x": 0})], steps, ["A", ">C"])
    if name == "gathered":
        whole, result = value("G", (size,), mesh, {}), value("C", (size,), mesh, {})
        kernel = KernelStep("kernel_0", wide_kernel(name, size, size), ("G", "C"), (), ("C",), 0)
        steps = [AllocStep("G"), collective("all_gather", "A", "G", "x", src_dim=0), AllocStep("C"), kernel]
        return program(mesh, [part, whole, result], steps, ["A", ">C"])
    op = {"total": "sum", "largest": "max"}[name]
    sums = [value("C_part", (PART,), mesh, {}, {"x": op}, "C"), value("C", (PART,), mesh, {})]
    kernel = KernelStep("kernel_0", wide_kernel(name, PART, PART), ("A", "C_part"), (), ("C_part",), 0)
    steps = [AllocStep("C"), kernel, collective("all_reduce", "C_part", "C", "x", op)]
    return program(mesh, [part, *sums], steps, ["A", ">C"])


@cache
def kernel(name: str, count: int, owner: object) -> MeshKernel:
    """A kernel of a rank's own."""
    made = program_of(name, count)
    shape = {"gathered": PART * count, "alone": PART * count}.get(name, PART)
    kern = kernel_of(wide_kernel(name, PART * count, shape), made)
    kern._compiled = replace(kern._compiled, target=Target("interpret", "cpu", False, compiler))
    return kern


def part(step: int, rank: int, lane: int = 0) -> torch.Tensor:
    """What a rank passes at a step."""
    return torch.arange(PART, dtype=torch.float32) + 10 * rank + 100 * step + 10000 * lane


def expected(name: str, step: int, rank: int, count: int, lane: int = 0) -> torch.Tensor:
    """What it gets."""
    parts = [part(step, other, lane) + 1 for other in range(count)]
    return {
        "total": lambda: torch.stack(parts).sum(0),
        "largest": lambda: torch.stack(parts).amax(0),
        "gathered": lambda: torch.cat(parts),
        "alone": lambda: parts[rank],
    }[name]()
