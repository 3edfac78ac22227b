"""Kernels of the sweep with some of their sizes symbolic: compiled once, called with all of the sizes to try."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import tilelang.language as T
from tvm import tirx

import mesh_tensor as mt

from .sweep_points import AXES, KERNELS, RIGHT, Outcome, check, count_shardings, problem_of, reason_of, sharding_at


@dataclass(frozen=True)
class SymbolicPoint:
    """A kernel with the sizes `symbols` symbolic, on one mesh, with the sharding that has the number `index`."""

    kernel: str
    symbols: tuple[str, ...]
    mesh: tuple[int, ...]
    index: int


def symbols_of(kernel: str, first: int = 0) -> Iterator[tuple[str, ...]]:
    """The sizes of a kernel that may be symbolic: each alone, and all together; beginning with the `first` of these
    that may be, or the next one."""
    names = tuple(KERNELS[kernel].sizes[0])
    choices = list(dict.fromkeys([*((name,) for name in names), names]))
    start = first % len(choices)
    for symbols in (*choices[start:], *choices[:start]):
        if built(kernel, symbols, 0) is not None:
            yield symbols


@lru_cache(maxsize=16)
def built(kernel: str, symbols: tuple[str, ...], size: int) -> tirx.PrimFunc | None:
    """The kernel with these sizes symbolic and the others those of a size; None if it can't be written so."""
    case = KERNELS[kernel]
    try:
        return case.build(**case.sizes[size] | {name: T.dynamic(name) for name in symbols})
    except Exception:  # it needs a number there, and says so in its own way
        return None


def sample(
    kernel: str, symbols: tuple[str, ...], mesh: tuple[int, ...], limit: int, seed: str = ""
) -> list[SymbolicPoint]:
    """`limit` points, the same ones every time."""
    count = count_shardings(kernel, mesh)
    indices = random.Random(f"{kernel} {symbols} {mesh} {seed}").sample(range(count), min(limit, count))
    return [SymbolicPoint(kernel, symbols, mesh, index) for index in sorted(indices)]


def run(point: SymbolicPoint, target: str = "interpret") -> Outcome:
    """Compile the kernel once for all sizes that differ in symbols only, call it with them; compare with the unsharded
    kernel and with torch."""
    case, axes = KERNELS[point.kernel], AXES[: len(point.mesh)]
    shardings = sharding_at(problem_of(point.kernel, 0).ndims, axes, point.index)
    mesh = mt.Mesh(dict(zip(axes, point.mesh, strict=True)))
    kernels: dict[tuple[int, ...], mt.MeshKernel] = {}
    try:
        for size in (*range(len(case.sizes)), 0):
            rest = tuple(value for name, value in case.sizes[size].items() if name not in point.symbols)
            if rest not in kernels:
                func = built(point.kernel, point.symbols, size)
                annotated = mt.annotate(func, mesh, shardings)
                kernels[rest] = mt.compile(annotated, target=target, poison=target == "interpret")
            check(case, problem_of(point.kernel, size), kernels[rest])
    except mt.MeshTensorError as error:
        return Outcome("refused", reason_of(error))
    except Exception as error:
        return Outcome("wrong", f"size {size}: {type(error).__name__}: {error}")
    return RIGHT
