"""Transfer: how a tensor goes from a layout on one mesh to a layout on another.

Where a device of the one mesh and a device of the other meet in a box of the tensor, that box is sent. Every element
crosses once, from one of those that have it; what several devices of the receiving mesh need is spread there then,
where that takes no more bytes than sending it to each of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import check_countable
from mesh_tensor.base.sharding import Replicate, Shard, Sharding

from .plan import RedistributionPlan

#: Bytes up to which a tensor is sent to every device that needs it: spreading it later would cost more than it saves.
SMALL = 4096

Box = tuple[tuple[int, int], ...]  # per dim where it starts and stops


@dataclass(frozen=True)
class Send:
    """Device `source` of the one mesh sends a box to device `target` of the other; both regions are in their tiles."""

    source: int
    target: int
    source_region: tuple[slice, ...]
    target_region: tuple[slice, ...]
    elements: int


@dataclass(frozen=True)
class TransferPlan:
    """How a tensor of `shape` goes from `src` to `dst`, layouts on two meshes: `before` on the one, `sends`, `after` on
    the other. `str()` shows it.

    >>> from mesh_tensor.base.mesh import Mesh
    >>> src, dst = Sharding.make(Mesh({"x": 2}), 2, {"x": 0}), Sharding.make(Mesh({"y": 3}), 2, {"y": 1})
    >>> print(TransferPlan.make((4, 6), "float32", 4, src, dst))
    (4, 6) float32, 'S[0]' on Mesh({"x": 2}) -> 'S[1]' on Mesh({"y": 3}): 96 bytes in 6 messages
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    before: RedistributionPlan
    sends: tuple[Send, ...]
    after: RedistributionPlan

    @staticmethod
    def make(
        shape: Sequence[int], dtype: str, itemsize: int, src: Sharding, dst: Sharding, small: int = SMALL
    ) -> TransferPlan:
        """The plan for a tensor of elements of `itemsize` bytes; up to `small` bytes it is sent to all who need it."""
        if src.ndim != dst.ndim:
            refuse(
                f"no transfer leads from {src!r} to {dst!r}",
                why="they are layouts of tensors of different rank",
                fix="pass layouts of one number of dims",
            )
        for sharding in (src, dst):
            check_countable(sharding.mesh)
        return _planned(tuple(shape), dtype, itemsize, src, dst, small)

    @property
    def src(self) -> Sharding:
        """The layout that it starts from."""
        return self.before.src

    @property
    def dst(self) -> Sharding:
        """The layout that it ends in."""
        return self.after.dst

    @property
    def bytes(self) -> int:
        """What crosses from mesh to mesh."""
        return self.itemsize * sum(send.elements for send in self.sends)

    def busiest(self) -> tuple[int, int]:
        """The bytes that cross of the device that sends most, and of the one that receives most."""
        sent, received = Counter[int](), Counter[int]()
        for send in self.sends:
            sent[send.source] += send.elements * self.itemsize
            received[send.target] += send.elements * self.itemsize
        return max(sent.values(), default=0), max(received.values(), default=0)

    def __str__(self) -> str:
        head = f"{self.shape} {self.dtype}, '{self.src}' on {self.src.mesh} -> '{self.dst}' on {self.dst.mesh}"
        lines = [f"{head}: {self.bytes:,} bytes in {len(self.sends)} messages"]
        for when, plan in (("before", self.before), ("after", self.after)):
            if plan.moves:
                lines.append(f"  {when}: {str(plan).replace(chr(10), chr(10) + '  ')}")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def _planned(
    shape: tuple[int, ...], dtype: str, itemsize: int, src: Sharding, dst: Sharding, small: int
) -> TransferPlan:
    def redistribution(start: Sharding, end: Sharding) -> RedistributionPlan:
        return RedistributionPlan.make(shape, dtype, itemsize, start, end)

    is_small = itemsize * math.prod(shape) <= small
    whole = _without_partial(dst)
    source = _reduced(src, shape, is_small)
    before = redistribution(src, source)

    def landing_in(landing: Sharding) -> TransferPlan:
        sends = min((_sends(shape, source, landing, dim) for dim in range(max(src.ndim, 1))), key=_cost)
        return TransferPlan(shape, dtype, itemsize, before, sends, redistribution(landing, dst))

    # Tiles that are spread are padded where they are uneven, which may take more bytes than it saves.
    ways = [whole] if is_small else dict.fromkeys((_spread_out(whole, shape), whole))
    return min(map(landing_in, ways), key=_received)


def _received(plan: TransferPlan) -> int:
    """The bytes that all devices of the receiving mesh get, from the other mesh and from each other."""
    return plan.bytes + plan.after.bytes * plan.dst.mesh.num_devices


def _without_partial(sharding: Sharding) -> Sharding:
    placements = {axis: p for axis, p in sharding.placements().items() if isinstance(p, Shard)}
    return Sharding.of(sharding.mesh, sharding.ndim, placements)


def _reduced(src: Sharding, shape: tuple[int, ...], is_small: bool) -> Sharding:
    """A layout of the sending mesh without partial axes: each splits a dim after it is reduced, where one can."""
    whole = _without_partial(src)
    return whole if not src.partial or is_small else _spread_out(whole, shape, only=[axis for axis, _ in src.partial])


def _spread_out(sharding: Sharding, shape: tuple[int, ...], only: Sequence[str] | None = None) -> Sharding:
    """The layout with its replicated axes splitting dims: tiles stay parts of what they were, with least padding."""
    for axis in sharding.mesh if only is None else only:
        size = sharding.mesh.size(axis)
        if size == 1 or not isinstance(sharding.placement(axis), Replicate):
            continue
        tile = sharding.tile_shape(shape)
        order = sharding.mesh.axis_names
        nested = [
            dim
            for dim, axes in enumerate(sharding.dims)
            if tile[dim] >= size and all(order.index(other) < order.index(axis) for other in axes)
        ]
        if nested:
            sharding = sharding.with_shard(axis, min(nested, key=lambda dim: (-(-tile[dim] // size) / tile[dim], dim)))
    return sharding


def _sends(shape: tuple[int, ...], src: Sharding, dst: Sharding, dim: int) -> tuple[Send, ...]:
    """Where boxes meet. What several devices of the sending mesh have alike is split among them along `dim`."""
    holders: dict[Box, list[int]] = {}
    for rank in range(src.mesh.num_devices):
        holders.setdefault(_box(src, shape, rank), []).append(rank)
    parts = [
        (rank, tile, part)
        for tile, ranks in holders.items()
        for rank, part in zip(ranks, _split(tile, dim, len(ranks)), strict=False)
    ]
    sends = []
    for target in range(dst.mesh.num_devices):
        wanted = _box(dst, shape, target)
        for rank, tile, part in parts:
            met = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, wanted, strict=True))
            if all(start < stop for start, stop in met):
                elements = math.prod(stop - start for start, stop in met)
                sends.append(Send(rank, target, _region(met, tile), _region(met, wanted), elements))
    return tuple(sends)


def _cost(sends: tuple[Send, ...]) -> tuple[int, int]:
    sent = Counter[int]()
    for send in sends:
        sent[send.source] += send.elements
    return max(sent.values(), default=0), len(sends)


def _box(sharding: Sharding, shape: tuple[int, ...], rank: int) -> Box:
    offset, extent = sharding.tile_offset(shape, rank), sharding.valid_extent(shape, rank)
    return tuple((start, start + size) for start, size in zip(offset, extent, strict=True))


def _split(box: Box, dim: int, parts: int) -> list[Box]:
    """The box in `parts` along `dim`, as even as can be; one that has no dims stays one."""
    if parts == 1 or not box:
        return [box]
    start, stop = box[dim]
    ends = [start + (stop - start) * i // parts for i in range(parts + 1)]
    return [(*box[:dim], (ends[i], ends[i + 1]), *box[dim + 1 :]) for i in range(parts)]


def _region(box: Box, tile: Box) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(box, tile, strict=True))
