"""Redistribution of a 64 MB tensor, one kind of move after the other, on gloo ranks: next to the bare collective of
torch.distributed on the same memory, and next to DTensor.redistribute. All of them take turns.

python -m benchmarks.bench_redistribute
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import mesh_tensor as mt
from mesh_tensor.runtime.ranks import ranks_of
from mesh_tensor.runtime.ranks.plan import plan_exchange

from ._ranks import on_ranks
from ._timing import Row, header, interleaved, row, verdicts

SHAPE = (4096, 4096)  # float32: 64 MB
OURS, BARE, REDISTRIBUTE, DTENSOR = "mesh_tensor", "bare collective", "mt.redistribute", "DTensor.redistribute"
Run = Callable[[], object]
Bare = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Kind:
    """A move from layout `src` to `dst` on a mesh, and the same by hand: from one tile's memory to another's."""

    mesh: dict[str, int]
    src: str
    dst: str
    bare: Bare
    in_place: bool = False


def _all_to_all(out: torch.Tensor, tile: torch.Tensor) -> None:
    """Columns go to their owners: they are packed first."""
    packed = torch.cat([part.reshape(-1) for part in tile.chunk(2, dim=1)])
    dist.all_to_all_single(out.view(-1), packed)


def _slice(out: torch.Tensor, tile: torch.Tensor) -> None:
    out.copy_(tile.chunk(2)[dist.get_rank()])


def _permute(out: torch.Tensor, tile: torch.Tensor) -> None:
    """Ranks 1 and 2 of a 2 x 2 mesh swap their tiles."""
    if dist.get_rank() in (0, 3):
        out.copy_(tile)
        return
    peer = 3 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tile, peer), dist.P2POp(dist.irecv, out, peer)]):
        work.wait()


# torch 2.13 gave these two other names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TWO, FOUR = {"x": 2}, {"x": 2, "y": 2}
KINDS = {
    "all_gather": Kind(TWO, "S[0]", "R", lambda out, tile: _all_gather(out, tile)),
    "all_reduce": Kind(TWO, "P[sum]", "R", lambda out, tile: dist.all_reduce(out), in_place=True),
    "reduce_scatter": Kind(TWO, "P[sum]", "S[0]", lambda out, tile: _reduce_scatter(out, tile)),
    "all_to_all": Kind(TWO, "S[0]", "S[1]", _all_to_all),
    "slice": Kind(TWO, "R", "S[0]", _slice),
    "permute": Kind(FOUR, "S[0], R", "R, S[0]", _permute),
}


def rows(rounds: int = 15) -> list[Row]:
    """All comparisons, measured."""
    found = []
    for name, kind in KINDS.items():
        times = on_ranks(time_kind, name, rounds, count=math.prod(kind.mesh.values()))
        what = f"{name}, '{kind.src}' -> '{kind.dst}', 64 MB"
        found.append(row(what, times, OURS, BARE, must=1.1))
        found.append(row(what, times, REDISTRIBUTE, DTENSOR, must=1.0 if name == "all_to_all" else None))
    return found


def time_kind(name: str, rounds: int) -> dict[str, list[float]]:
    """On every rank: the move between tiles that exist, and of DTensors, whose new tiles are made in every call."""
    kind = KINDS[name]
    mesh = mt.Mesh(kind.mesh)
    ranks = ranks_of(mesh, None, "cpu")
    src, dst = mt.Sharding.parse(mesh, 2, kind.src), mt.Sharding.parse(mesh, 2, kind.dst)
    (move,) = mt.plan_redistribution(SHAPE, torch.float32, src, dst).moves
    assert move.kind == name, f"{move.kind} is not {name}"
    exchange = plan_exchange(SHAPE, torch.float32, src, dst, ranks)
    tensor = mt.to_dtensor(mt.distribute(torch.randint(-9, 9, SHAPE).float(), mesh, src), ranks.device_mesh)
    tile, placements = tensor.to_local(), mt.to_placements(dst)
    ours, theirs = (torch.zeros(dst.tile_shape(SHAPE)) for _ in range(2))
    if kind.in_place:
        ours.copy_(tile)
        theirs.copy_(tile)
    runs: dict[str, Run] = {
        OURS: lambda: exchange(ours if kind.in_place else tile, ours),
        BARE: lambda: kind.bare(theirs, tile),
        REDISTRIBUTE: lambda: mt.redistribute(tensor, dst),
        DTENSOR: lambda: _arrived(tensor.redistribute(placements=placements)),
    }
    runs[OURS]()
    runs[BARE]()
    assert torch.equal(ours, theirs)
    assert torch.equal(_arrived(mt.redistribute(tensor, dst)), _arrived(tensor.redistribute(placements=placements)))
    ours.zero_()
    theirs.zero_()  # what is reduced in place again and again would not stay finite
    return interleaved({who: _by_all(run) for who, run in runs.items()}, rounds)


def _by_all(run: Run) -> Run:
    """Until all ranks are done: of a permute, not all take part."""

    def run_and_wait() -> None:
        run()
        dist.barrier()

    return run_and_wait


def _arrived(tensor: torch.distributed.tensor.DTensor) -> torch.Tensor:
    """A DTensor's local part, when its collective is over."""
    local = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(header("Redistribution"))
    print(verdicts(rows(options.rounds)))
