"""Redistributions on real ranks: the bits of the virtual mesh for every pair of layouts, as tiles and as DTensors; and
what DTensor's own redistributions would move."""

from __future__ import annotations

import itertools
import logging
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

import mesh_tensor as mt
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.runtime.ranks import lies_like_torch, ranks_of
from mesh_tensor.runtime.ranks.plan import RankRedistribution
from tests.refusals import refusal
from tests.runtime.reference import layouts, scatter, shardings

from .support import in_a_call, pure

Pair = tuple[int, mt.MeshTensor, mt.MeshTensor]


def pairs(sizes: dict[str, int], shapes: list[tuple[int, ...]], step: int = 1) -> list[Pair]:
    """Numbered, tensors in every layout, and in every other one."""
    mesh, made = Mesh(sizes), list[Pair]()
    for shape in shapes:
        every = layouts(mesh, len(shape))
        tensor = torch.randn(shape)
        sources = {src: scatter(tensor, src)[0] for src in every}
        for number, (src, dst) in enumerate(list(itertools.product(every, every))[::step]):
            made.append((number, sources[src], sources[src].redistribute(dst)))
    return made


def every_pair(rank: int, made: list[Pair], sizes: dict[str, int]) -> None:
    """The tiles of a redistribution's plan; every 11th pair by way of DTensors, too."""
    ranks = in_a_call(ranks_of(Mesh(sizes), None, "cpu"))
    for number, source, redistributed in made:
        shape, src, dst = source.shape, source.sharding, redistributed.sharding
        expected = redistributed.tile(rank)
        tile = source.padded_tile(rank).clone()
        new = RankRedistribution(shape, source.dtype, src, dst, ranks)(tile)
        mine = new[tuple(slice(0, size) for size in expected.shape)]
        assert torch.equal(pure(mine), pure(expected)), f"{shape}, {src} -> {dst}: {mine} is not {expected}"
        assert torch.equal(pure(tile), pure(source.padded_tile(rank))), f"{src} -> {dst}: the source was written"
        if number % 11 == 0 and lies_like_torch(src, shape):
            result = mt.redistribute(mt.to_dtensor(source, ranks.device_mesh), dst)
            assert (result.shape, result.placements) == (shape, mt.to_placements(dst))
            if lies_like_torch(dst, shape):
                assert torch.equal(pure(result.to_local()), pure(expected)), f"{shape}, {src} -> {dst}"


def layouts_that_torch_splits_otherwise(rank: int) -> None:
    """Two axes on one dim that they don't divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    tensor = torch.randn(5, 3)
    mt_mesh = Mesh({"x": 2, "y": 2})
    for src, dst in itertools.product(shardings(mt_mesh, 2, None), repeat=2):
        if lies_like_torch(src, (5, 3)) and lies_like_torch(dst, (5, 3)):
            continue
        given = torch.distributed.tensor.distribute_tensor(tensor, mesh, mt.to_placements(src))
        result = mt.redistribute(given, dst)
        assert result.placements == mt.to_placements(dst)
        assert torch.equal(result.full_tensor(), tensor), f"{src} -> {dst}"
        wanted = given.redistribute(placements=mt.to_placements(dst)).to_local()
        assert torch.equal(result.to_local(), wanted), f"{src} -> {dst}"


def ways_to_call(rank: int) -> None:
    """Shardings in all their forms, axes with and without names, gradients, and what is in place already."""
    named, nameless = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), init_device_mesh("cpu", (2,))
    tensor = torch.arange(35.0).reshape(5, 7)
    for mesh, axis in ((named, "x"), (nameless, "axis0")):
        given = torch.distributed.tensor.distribute_tensor(tensor, mesh, [placement_types.Shard(0)])
        forms = [{axis: 1}, "S[1]", Sharding.make({axis: 2}, 2, {axis: 1}), [mt.Shard(1)], (placement_types.Shard(-1),)]
        for sharding in forms:
            result = mt.redistribute(given, sharding)
            assert result.placements == (placement_types.Shard(1),)
            assert torch.equal(result.to_local(), tensor[:, :4] if rank == 0 else tensor[:, 4:])
            assert result.stride() == (7, 1)
        assert mt.redistribute(given, {axis: 0}) is given
    wanted = given.detach().requires_grad_()
    with torch.no_grad():
        assert not mt.redistribute(wanted, "R").requires_grad
    strided = DTensor.from_local(torch.randn(4, 6).t(), named, [placement_types.Shard(0)])
    assert torch.equal(mt.redistribute(strided, {"x": 1}).full_tensor(), strided.full_tensor())


def refusals(rank: int) -> None:
    """Every rank raises."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    given = torch.distributed.tensor.distribute_tensor(torch.zeros(4, 4), mesh, [placement_types.Shard(0)])
    text = refusal(lambda: mt.redistribute(given, {"y": 1} if rank else {"x": 1}))
    assert "unknown mesh axis 'y'" in text
    text = refusal(lambda: mt.redistribute(given, [1, 1] if rank else [1]))
    assert "the sharding [1, 1] has 2 placements, but the mesh has 1 axes ('x')" in text
    text = refusal(lambda: mt.redistribute(given, {"x": 1} if rank else {}))
    assert "redistributions differ between ranks" in text
    assert "rank 0: (4, 4) torch.float32, 'S[0]' -> 'R'" in text
    assert "rank 1: (4, 4) torch.float32, 'S[0]' -> 'S[1]'" in text
    assert torch.equal(mt.redistribute(given, {}).to_local(), torch.zeros(4, 4))
    mt.redistribute(given, {"x": 1})
    mt.redistribute(given, "P[sum]")  # then all ranks have made the two that differ now
    assert "redistributions differ between ranks" in refusal(lambda: mt.redistribute(given, {"x": 1} if rank else {}))
    assert torch.equal(mt.redistribute(given, {"x": 1}).to_local(), torch.zeros(4, 2))


def dies_meanwhile(rank: int) -> str:
    """Rank 1 ends after the first redistribution."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    given = torch.distributed.tensor.distribute_tensor(torch.zeros(4, 4), mesh, [placement_types.Shard(0)])
    mt.redistribute(given, {"x": 1})
    if rank == 1:
        os._exit(1)
    return refusal(lambda: mt.redistribute(given, {"x": 1}))


def dtensor_never_moves_less(rank: int, sizes: tuple[int, ...], shape: tuple[int, ...], step: int) -> int:
    """Compare with the bytes that this torch's DTensor receives, its shard-to-shard counted as an all-to-all. Returns
    how many pairs differ."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    logging.disable(logging.WARNING)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
    names = ("x", "y", "z")[: len(sizes)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for count in range(2, len(sizes) + 1):
        for axes in itertools.combinations(names, count):
            mesh[axes]._flatten("_".join(axes))  # with these DTensor merges collectives that it else runs in a row
    ours = Mesh(dict(zip(names, sizes, strict=True)))
    better = 0
    for src, dst in list(itertools.product(layouts(ours, len(shape)), repeat=2))[::step]:
        if not set(dst.partial) <= set(src.partial):
            continue  # DTensor has no way there
        plan = mt.plan_redistribution(shape, torch.float32, src, dst)
        theirs = dtensor_bytes(mesh, shape, src, dst)
        assert plan.bytes <= theirs, f"{plan}\nDTensor: {theirs} bytes"
        better += plan.bytes < theirs
    return better


def dtensor_bytes(mesh: DeviceMesh, shape: tuple[int, ...], src: Sharding, dst: Sharding) -> int:
    """What one device receives when DTensor redistributes."""
    local = torch.zeros(src.tile_shape(shape))
    tensor = DTensor.from_local(local, mesh, mt.to_placements(src), run_check=False)
    with Traffic() as traffic:
        tensor.redistribute(placements=mt.to_placements(dst))
    return math.ceil(traffic.received)


class Traffic(TorchDispatchMode):
    """Adds up the bytes that a device receives in the collectives that it sees, with the usual ring algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0.0

    def __enter__(self):
        self._original = placement_types.shard_dim_alltoall
        placement_types.shard_dim_alltoall = self._all_to_all
        return super().__enter__()

    def __exit__(self, *error):
        placement_types.shard_dim_alltoall = self._original
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("_c10d_functional.all_gather"):
            self.received += (args[1] - 1) * args[0].nbytes
        elif name.startswith("_c10d_functional.reduce_scatter"):
            self.received += (args[2] - 1) / args[2] * args[0].nbytes
        elif name.startswith("_c10d_functional.all_reduce"):
            group = dist.distributed_c10d._resolve_process_group(args[2]).size()
            self.received += 2 * (group - 1) / group * args[0].nbytes
        elif name.startswith(("_c10d_functional", "_dtensor")):
            assert "wait_tensor" in name or "_wrap_tensor" in name, f"not counted: {name}"
        return func(*args, **(kwargs or {}))

    def _all_to_all(self, tensor, gather_dim, shard_dim, mesh, mesh_dim):
        """On CPUs DTensor gathers everything; elsewhere it sends what it has to."""
        size = mesh.size(mesh_dim)
        self.received += (size - 1) / size * tensor.nbytes
        before = self.received
        result = self._original(tensor, gather_dim, shard_dim, mesh, mesh_dim)
        self.received = before
        return result
