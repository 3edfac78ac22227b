"""The points of the sweep (kernel x sharding of its buffers x mesh x size), and what comes of each of them.

A sharding gives every buffer, per mesh axis, one of its dims or None; axes may share a dim. The shardings of a kernel
on a mesh are numbered, so that any of the (up to 10^11) can be named, drawn and run again.
"""

from __future__ import annotations

import math
import random
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np
import torch

import mesh_tensor as mt
from kernels.catalogue import CASES, KernelCase
from kernels.catalogue.elementwise import ARITHMETIC_CASES
from kernels.catalogue.products import MATMUL_CASES, MLP_CASES
from kernels.catalogue.rows import NORM_CASES, REDUCE_CASES, SOFTMAX_CASES
from mesh_tensor.targets.interpreter import interpret
from tests import parsed_once
from tests.kernels.adversarial import ADVERSARIAL_CASES
from tests.other_machines import machine

parsed_once.install()

KERNELS = {case.name: case for case in (*CASES, *ADVERSARIAL_CASES)}
MESHES = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2))
AXES = "xyz"

# Nothing about these may be refused, on any mesh and at any size.
NEVER_REFUSED = frozenset(
    case.name
    for cases in (MATMUL_CASES, MLP_CASES, ARITHMETIC_CASES, REDUCE_CASES, NORM_CASES, SOFTMAX_CASES)
    for case in cases
)

Shardings = dict[str, dict[str, int | None]]


@dataclass(frozen=True)
class Point:
    """One kernel on one mesh at one of its sizes, with the sharding that has the number `index`."""

    kernel: str
    mesh: tuple[int, ...]
    size: int
    index: int

    @property
    def arguments(self) -> str:
        """The sweep's arguments that run this point alone."""
        mesh = "x".join(map(str, self.mesh))
        return f"--kernel {self.kernel} --mesh {mesh} --size {self.size} --index {self.index}"


@dataclass(frozen=True)
class Outcome:
    """`verdict` is "right", "refused" or "wrong"; `reason` says why it is not right."""

    verdict: str
    reason: str = ""


RIGHT = Outcome("right")


def count_shardings(kernel: str, mesh: Sequence[int]) -> int:
    """How many shardings the buffers of a kernel have on a mesh."""
    ndims = problem_of(kernel, 0).ndims.values()
    return math.prod((ndim + 1) ** len(mesh) for ndim in ndims)


def sharding_at(ndims: dict[str, int], axes: str, index: int) -> Shardings:
    """The sharding with the number `index` of buffers with `ndims` dims.

    >>> sharding_at({"A": 2, "B": 1}, "x", 4)
    {'A': {'x': 0}, 'B': {'x': 0}}
    """
    shardings: Shardings = {}
    for name, ndim in ndims.items():
        shardings[name] = {}
        for axis in axes:
            index, choice = divmod(index, ndim + 1)
            shardings[name][axis] = choice - 1 if choice else None
    return shardings


def sample(kernel: str, mesh: tuple[int, ...], size: int, limit: int) -> list[Point]:
    """`limit` points of a kernel on a mesh at a size, the same ones every time; all of them if `limit` is 0."""
    count = count_shardings(kernel, mesh)
    if limit == 0 or limit >= count:
        indices: Sequence[int] = range(count)
    else:
        indices = sorted(random.Random(f"{kernel} {mesh} {size}").sample(range(count), limit))
    return [Point(kernel, mesh, size, index) for index in indices]


def run(point: Point, target: str = "interpret") -> Outcome:
    """Lower the kernel, run it (interpreted: on poisoned tiles), compare with the unsharded kernel and with torch. It
    is planned for one of several machines: on this one, small tensors are rather gathered than reduced in parts."""
    case, problem = KERNELS[point.kernel], problem_of(point.kernel, point.size)
    axes = AXES[: len(point.mesh)]
    shardings = sharding_at(problem.ndims, axes, point.index)
    try:
        func = mt.annotate(problem.func, mt.Mesh(dict(zip(axes, point.mesh, strict=True))), shardings)
        with machine(point.index):
            kernel = mt.compile(func, target=target, poison=target == "interpret")
    except mt.MeshTensorError as error:
        return Outcome("refused", reason_of(error))
    except Exception as error:  # a crash is neither right nor refused, whatever its class
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    try:
        check(case, problem, kernel)
    except Exception as error:  # an AssertionError on the numbers, or whatever stops a kernel that was not refused
        if isinstance(error, mt.MeshTensorError) and _while_lowering(error):
            return Outcome("refused", reason_of(error))
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    return RIGHT


@dataclass(frozen=True)
class Problem:
    """A kernel at a size, with inputs, and the outputs as torch and as the unsharded kernel compute them."""

    func: object
    ndims: dict[str, int]
    inputs: list[torch.Tensor]
    expected: dict[str, torch.Tensor]
    unsharded: dict[str, torch.Tensor]


@lru_cache(maxsize=256)
def problem_of(kernel: str, size: int) -> Problem:
    """A kernel at one of its sizes."""
    case = KERNELS[kernel]
    sizes = case.sizes[size]
    func, inputs = case.build(**sizes), case.make_inputs(sizes)
    arguments = case.arguments(func, inputs)
    interpret(func, [_as_numpy(tensor) for tensor in arguments.values()])
    unsharded = {name: arguments[name] for name in case.outputs}
    ndims = {name: tensor.ndim for name, tensor in arguments.items()}
    return Problem(func, ndims, inputs, case.expected(inputs), unsharded)


def check(case: KernelCase, problem: Problem, kernel: mt.MeshKernel) -> None:
    """Call the kernel with all its parameters, and compare what it leaves in them with what is right."""
    arguments = case.arguments(problem.func, problem.inputs)
    kernel(*arguments.values())
    case.check(arguments, problem.expected)
    case.check(arguments, problem.unsharded)
    for name, before in case.arguments(problem.func, problem.inputs).items():
        if name not in case.outputs:
            torch.testing.assert_close(arguments[name], before, rtol=0, atol=0, msg=f"input {name} was modified")


def _while_lowering(error: mt.MeshTensorError) -> bool:
    """Whether a call raised this before anything ran: a kernel with symbolic dims is lowered when it is called."""
    return any("/mesh_tensor/lowering/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The memory of `tensor` as numpy sees it; numpy knows bfloat16 only through ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def reason_of(error: mt.MeshTensorError) -> str:
    """What refusals of one kind have in common: the first line without its names and numbers, and the `why`."""
    lines = str(error).splitlines()
    kept = [lines[0], *(line.strip() for line in lines[1:] if line.strip().startswith(("- ", "why:")))]
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'_'", "; ".join(kept)))
