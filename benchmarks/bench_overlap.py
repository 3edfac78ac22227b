"""Collectives beside kernels, on two gloo ranks: in bulk, as the cost model decides, and in two and four slabs. All of
them take turns.

python -m benchmarks.bench_overlap
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from tilelang import tvm

import mesh_tensor as mt

from ._ranks import on_ranks
from ._timing import Row, header, interleaved, row, verdicts
from .workloads import matmul_gathered, matmul_k_split

OFF, AUTO, DEVICES = "overlap off", "overlap auto", 2
_CLOSE = {"rtol": 1e-4, "atol": 1e-3}
_KINDS = {"K-split": (matmul_k_split, 1, 0, None), "gathered": (matmul_gathered, 1, 1, 1)}


def rows(rounds: int = 21) -> list[Row]:
    """All comparisons, measured. Only what the cost model decides has to be as fast as bulk."""
    found = []
    for kind, m, k in (
        ("K-split", 2048, 2048),
        ("K-split", 512, 512),
        ("K-split", 2048, 256),
        ("gathered", 2048, 2048),
    ):
        decided, slabs = on_ranks(time_matmul, kind, m, k, rounds)
        what = f"{kind} matmul {m} x {m} x {k}, float32"
        found.append(row(what, decided, AUTO, OFF, must=1.03))
        found += [row(what, slabs, who, OFF) for who in slabs if who != OFF]
    return found


def time_matmul(kind: str, size: int, depth: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """On each of two ranks: a (size, depth) @ (depth, size) product, whose result is reduced or whose input is
    gathered. What the cost model decides beside bulk, and slabs beside bulk.

    Where the decision is bulk, both are the same program, and the limit is near what single runs differ by: these two
    take turns by themselves, each as often after itself as after the other, in three times as many rounds."""
    make, *dims = _KINDS[kind]
    func: tvm.tirx.PrimFunc = make(size, DEVICES, depth)
    a, b = torch.randn(size, depth), torch.randn(depth, size)
    a_part, b_part, c_part = (_part(t, dim) for t, dim in zip((a, b, a @ b), dims, strict=True))
    runs = {}
    for who, overlap in ((OFF, "off"), (AUTO, "auto"), ("2 slabs", 2), ("4 slabs", 4)):
        kernel = mt.compile(func, target="c", overlap=overlap)
        torch.testing.assert_close(kernel.local(a_part, b_part), c_part, **_CLOSE)
        runs[who] = lambda kernel=kernel: kernel.local(a_part, b_part)
    auto, calls = runs.pop(AUTO), 1 if size > 512 else 10
    return interleaved({OFF: runs[OFF], AUTO: auto}, 3 * rounds, calls), interleaved(runs, rounds, calls)


def _part(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """This rank's part."""
    return tensor if dim is None else tensor.chunk(DEVICES, dim)[dist.get_rank()].contiguous()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    print(header("Collectives beside kernels"))
    print(verdicts(rows(options.rounds)))
