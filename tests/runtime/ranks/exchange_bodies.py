"""Exchanges on real ranks: each of them leaves on every rank the very bits that it leaves on the virtual mesh."""

from __future__ import annotations

import itertools

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor

from mesh_tensor import Mesh, Partial, Replicate, Shard, Sharding, annotate
from mesh_tensor import compile as compile_kernel
from mesh_tensor.runtime.placement import layout_of
from mesh_tensor.runtime.ranks import exchange, plan, ranks_of
from mesh_tensor.runtime.ranks.plan import plan_exchange
from mesh_tensor.runtime.ranks.ranks import Ranks
from mesh_tensor.runtime.reshard import reshard_of
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, of_tiles
from tests.lowering.halo_kernels import indexed, stencil, stencil_reference
from tests.runtime.reference import garbage, scatter, shardings, windowed

from .support import in_a_call

DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.uint8,
    torch.uint16,
    torch.uint32,
]
DTYPES += [torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
OPS = ("sum", "prod", "max", "min", "bitand", "bitor", "bitxor")


def all_pairs(rank: int, sizes: dict[str, int]) -> None:
    """From every layout to every layout, even and uneven, the second axis being a tensor's twice as well."""
    ranks = in_a_call(ranks_of(Mesh(sizes), None, "cpu"))
    for shape in ((8, 4), (5, 3), (1, 2)):
        tensor = torch.randn(shape)
        for src in shardings(ranks.mesh, 2):
            source, _ = scatter(tensor, src)
            for dst in shardings(ranks.mesh, 2):
                same_as_virtual(ranks, source, dst)


def to_windows(rank: int, sizes: dict[str, int]) -> None:
    """From every layout to windows of every kind; and kernels that read such."""
    ranks = in_a_call(ranks_of(Mesh(sizes), None, "cpu"))
    tensor = torch.randn(7, 5)
    for src in shardings(ranks.mesh, 2):
        source, _ = scatter(tensor, src)
        for dst in windowed(ranks.mesh, (7, 5)) if not src.partial else ():
            same_as_virtual(ranks, source, dst)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    a = torch.randn(37)
    for func, expected in ((stencil(37), stencil_reference(a)), (indexed(lambda x: (x + 36) % 37, 37, 37), a.roll(1))):
        kern = compile_kernel(annotate(func, sizes, {"A": {"x": 0}, "B": {"x": 0}}), target="interpret", poison=True)
        given = distribute_tensor(a, mesh, [TorchShard(0), *[TorchReplicate()] * (len(sizes) - 1)])
        torch.testing.assert_close(kern(given).full_tensor(), expected)


def some_triples(rank: int, sizes: dict[str, int]) -> None:
    """A tensor of three dims, and tensors of none and without elements."""
    ranks = in_a_call(ranks_of(Mesh(sizes), None, "cpu"))
    for shape, step in (((4, 3, 5), 7), ((), 1), ((0,), 1), ((5, 0), 1)):
        layouts = list(shardings(ranks.mesh, len(shape)))
        for src, dst in itertools.product(layouts[::step], layouts):
            same_as_virtual(ranks, scatter(torch.randn(shape), src)[0], dst)


def all_dtypes_and_ops(rank: int, sizes: dict[str, int]) -> None:
    """What gloo can't move or reduce, too."""
    ranks = in_a_call(ranks_of(Mesh(sizes), None, "cpu"))
    for dtype, op in itertools.product(DTYPES, OPS):
        if op.startswith("bit") and dtype.is_floating_point:
            continue
        if dtype == torch.bool and op in ("sum", "prod"):
            continue
        src = Sharding.of(ranks.mesh, 2, dict.fromkeys(ranks.mesh, Partial(op)))
        source = random_tiles((5, 3), dtype, src)
        for after in (Replicate(), Shard(0), Shard(1)):
            same_as_virtual(ranks, source, Sharding.of(ranks.mesh, 2, dict.fromkeys(ranks.mesh, after)))
        same_as_virtual(
            ranks, random_tiles((5, 3), dtype, as_first(ranks.mesh, Shard(0))), as_first(ranks.mesh, Shard(1))
        )


def large_ones(rank: int, sizes: dict[str, int]) -> None:
    """All-reduces by chunks, gathers without packing: chosen for large tensors, forced here on small ones."""
    plan._IN_CHUNKS_FROM = exchange._ROTATE_FROM = 0
    plan.SEGMENT = 24  # bytes: several segments, the last one shorter
    all_pairs(rank, sizes)
    ranks = in_a_call(ranks_of(Mesh(sizes), None, "cpu"))
    for dtype in (torch.float16, torch.int16, torch.uint32):
        src = Sharding.of(ranks.mesh, 2, dict.fromkeys(ranks.mesh, Partial("max")))
        same_as_virtual(ranks, random_tiles((7, 3), dtype, src), Sharding.of(ranks.mesh, 2, {}), in_place=True)


def in_place(rank: int, sizes: dict[str, int]) -> None:
    """An all-reduce within one memory, in which later ranks' own tiles must not be overwritten too early."""
    ranks = in_a_call(ranks_of(Mesh(sizes), None, "cpu"))
    for op in ("sum", "max"):
        for axes in itertools.chain([(axis,) for axis in ranks.mesh], [ranks.mesh.axis_names]):
            src = Sharding.of(ranks.mesh, 2, dict.fromkeys(axes, Partial(op)))
            source = random_tiles((5, 3), torch.float32, src)
            same_as_virtual(ranks, source, Sharding.of(ranks.mesh, 2, {}), in_place=True)


def ranks_in_another_order(rank: int) -> None:
    """A DeviceMesh may number its devices as it likes."""
    device_mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("x", "y"))
    ranks = in_a_call(ranks_of(Mesh({"x": 2, "y": 2}), device_mesh, "cpu"))
    assert ranks.place(ranks.rank) == rank
    tensor = torch.randn(5, 3)
    for src, dst in itertools.product(shardings(ranks.mesh, 2), repeat=2):
        same_as_virtual(ranks, scatter(tensor, src)[0], dst)


def part_of_a_device_mesh(rank: int) -> None:
    """A kernel's mesh may be some axes of a larger DeviceMesh."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("d", "x"))
    ranks = in_a_call(ranks_of(Mesh({"x": 2}), whole["x"], "cpu"))
    assert ranks.rank == rank % 2
    assert ranks.group(["x"]).process_group is whole.get_group("x")
    assert ranks.group(["x"]) is ranks.group(["x"])
    source = scatter(torch.randn(5, 3), Sharding.make(ranks.mesh, 2, {}, partial={"x": "sum"}))[0]
    same_as_virtual(ranks, source, Sharding.make(ranks.mesh, 2, {"x": 0}))


def same_as_virtual(ranks: Ranks, source: MeshTensor, dst: Sharding, in_place: bool = False) -> None:
    """Bring `source` to `dst` on these ranks and on the virtual mesh."""
    layout = layout_of(source.shape, source.dtype, dst)
    expected = of_tiles(layout.allocate(source.device), layout)
    reshard_of(source.shape, source.dtype, source.sharding, dst)(list(source.tiles()), list(expected.tiles()))
    src = source.padded_tile(ranks.rank).clone()
    change = plan_exchange(source.shape, source.dtype, source.sharding, dst, ranks)
    out = src if in_place else garbage(dst.tile_shape(source.shape), source.dtype)
    before = src.clone()
    change(src, out)
    mine = out[tuple(slice(0, size) for size in dst.valid_extent(source.shape, ranks.rank))]
    wanted = expected.tile(ranks.rank)
    assert torch.equal(bits(mine), bits(wanted)), (
        f"{source.sharding} -> {dst}, {source.shape} {source.dtype}: {mine} is not {wanted}"
    )
    assert in_place or torch.equal(bits(src), bits(before)), f"{source.sharding} -> {dst}: the source was written"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is equal to another's only if their bits are."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_tiles(shape: tuple[int, ...], dtype: torch.dtype, sharding: Sharding) -> MeshTensor:
    """Every device has numbers of its own, padding included."""
    count, size = sharding.mesh.num_devices, sharding.tile_shape(shape)
    tiles = [(torch.randn(size) * 3).to(dtype) for _ in range(count)]
    if not dtype.is_floating_point:
        tiles = [torch.randint(0, 2 if dtype == torch.bool else 100, size).to(dtype) for _ in range(count)]
    return of_tiles(tiles, layout_of(shape, dtype, sharding))


def as_first(mesh: Mesh, placement: Shard) -> Sharding:
    """The first axis does this; the others replicate."""
    return Sharding.of(mesh, 2, {mesh.axis_names[0]: placement})
