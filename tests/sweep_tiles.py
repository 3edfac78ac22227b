"""Runs every kernel of tests/lowering/tile_kernels.py in both styles x every way that the axes of a mesh may split its
dims x mesh x size on the interpreter, poisoned; and in the style of an author who forgot the offsets.

`make sweep` runs it after `tests.sweep`. It fails on one wrong result, and on one refusal of a kernel with its offsets,
but where tiles have a single column."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch

import mesh_tensor as mt
from tests.lowering.tile_kernels import CASES

from .styles import results
from .sweep_points import MESHES

SIZES = ((32, 12), (43, 13), (9, 5), (3, 2))


@dataclass(frozen=True)
class TilePoint:
    """One run: `dims` has what every axis of the mesh splits, None for nothing."""

    kernel: str
    mesh: tuple[int, ...]
    dims: tuple[int | None, ...]
    size: tuple[int, int]
    kind: str


def points() -> list[TilePoint]:
    """All of them."""
    return [
        TilePoint(kernel, mesh, dims, size, kind)
        for kernel in CASES
        for mesh in MESHES
        for dims in itertools.product((None, 0, 1), repeat=len(mesh))
        for size in SIZES
        for kind in ("global", "tiles", "forgotten")
    ]


def run(point: TilePoint) -> str:
    """`right`, `refused` or `wrong`."""
    case, mesh = CASES[point.kernel], dict(zip("xyz", point.mesh, strict=False))
    layout = {axis: dim for axis, dim in zip(mesh, point.dims, strict=True) if dim is not None}
    torch.manual_seed(0)
    inputs = case.inputs(*point.size)
    try:
        result = results(case.make(*point.size), point.kind, mesh, case.layouts(layout), *inputs)
    except mt.MeshTensorError as error:
        return f"refused: {error}"
    close = torch.allclose(result, case.reference(*inputs), rtol=1e-5, atol=1e-3)
    return "right" if close else "wrong"


def may_be_refused(point: TilePoint) -> bool:
    """An author forgot, or a tile has one column, whose index tile operations leave out."""
    parts = 1
    for size, dim in zip(point.mesh, point.dims, strict=True):
        parts *= size if dim == 1 else 1
    return point.kind == "forgotten" or (parts > 1 and -(-point.size[1] // parts) == 1)


def main() -> int:
    """Run them all; the exit status."""
    os.environ["MESH_TENSOR_VERIFY"] = "1"
    start, counts, failures = time.monotonic(), Counter[tuple[str, str]](), []
    with multiprocessing.get_context("spawn").Pool() as pool:
        for point, outcome in zip(everything := points(), pool.imap(run, everything, 50), strict=True):
            verdict = outcome.split(":")[0]
            counts[point.kind, verdict] += 1
            if verdict == "wrong" or (verdict == "refused" and not may_be_refused(point)):
                failures.append(f"{point}\n  {outcome}")
    for kind in ("global", "tiles", "forgotten"):
        told = ", ".join(f"{counts[kind, verdict]} {verdict}" for verdict in ("right", "refused", "wrong"))
        print(f"over tiles, {kind}: {told}")
    print("\n".join(failures[:20]) + f"\n{len(failures)} failures, {time.monotonic() - start:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
