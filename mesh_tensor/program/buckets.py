"""Buckets: collectives of many small tensors become few of large ones.

Tensors that go the same way (the same collective over the same axes, in the same dtype) and whose results nothing needs
yet are put one after the other into a flat bucket: copied into it, sent as one, and seen as tensors again. It goes when
it is full, or when something needs a part of it, so that gradients are on their way while the backward pass goes on.

    all_reduce d_w2             concat d_w2, d_b2, d_w1 -> bucket
    all_reduce d_b2             all_reduce bucket
    all_reduce d_w1             split bucket -> d_w2, d_b2, d_w1, before one of them is used

A tensor joins where copying it takes less than to start a collective of its own. What few numbers are made of one that
waits, and nothing else of these (a loss, of a sum and a count), waits with it.

Weights that are gathered before they are used, as under ZeRO-3, go in buckets, too: those of as many products as a
layer has, while the layer before is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tvm import relax

from mesh_tensor.base.collectives import BETWEEN, reach
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.placement import Partial, Placement, Replicate, Shard
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import Move
from mesh_tensor.rules.operator.call import OpCall, op_call
from mesh_tensor.rules.operator.call_text import info_of

from .builder import collective_step
from .program import ProgramValue
from .steps import CollectiveStep, OpStep, Step

_FEW = 256  # bytes of tiles whose memory does not count
_STARTS = 30  # as long as so many of its starts take, a bucket is on its way
_LAYER = 8  # products whose weights come together: as many as a layer of a transformer has
_WHERE = "a bucket"
_ALL_REDUCE, _REDUCE_SCATTER = BETWEEN[Partial, Replicate].name, BETWEEN[Partial, Shard].name
_ALL_GATHER = BETWEEN[Shard, Replicate].name


@dataclass(frozen=True)
class _Way:
    """What goes together."""

    kind: str
    axes: tuple[str, ...]
    op: str | None
    dtype: str


@dataclass
class _Bucket:
    way: _Way
    members: list[CollectiveStep] = field(default_factory=list)
    bytes: int = 0


def bucketed(
    steps: Sequence[Step], values: Mapping[str, ProgramValue], mesh: Mesh, machine: Machine
) -> tuple[Sequence[Step], dict[str, ProgramValue]]:
    """The steps, without those about memory, with buckets for a machine; and the values that these add."""
    return _Buckets(steps, values, mesh, machine).made()


class _Buckets:
    def __init__(self, steps: Sequence[Step], values: Mapping[str, ProgramValue], mesh: Mesh, machine: Machine) -> None:
        self._steps, self._values, self._mesh, self._machine = steps, values, mesh, machine
        self._open: dict[_Way, _Bucket] = {}
        self._waiting: dict[str, _Way] = {}  # by what a bucket that is open will make
        self._sent: dict[str, OpStep] = {}  # by bucket what takes it apart, of those that came
        self._parts: dict[str, str] = {}  # by what that makes, the bucket
        self._last: list[Step] = []
        self._result: list[Step] = []
        self._added: dict[str, ProgramValue] = {}
        writes: dict[str, int] = {}
        for step in steps:
            for name in step.writes:
                writes[values[name].storage] = writes.get(values[name].storage, 0) + 1
        self._written_once = {storage for storage, count in writes.items() if count == 1}
        self._given = {value.storage for value in values.values()} - writes.keys()
        self._weights, self._may_wait = self._layers(), self._may_come_last()

    def made(self) -> tuple[Sequence[Step], dict[str, ProgramValue]]:
        """All of the steps."""
        early = {id(member) for buckets in self._weights.values() for bucket in buckets for member in bucket.members}
        for index, step in enumerate(self._steps):
            for bucket in self._weights.get(index, ()):
                self._send(bucket)
            if self._comes_last(step):
                self._last.append(step)
                continue
            self._send_what_is_needed(step)
            member, way = step.starts, self._way(step.starts)
            if id(member) in early:
                continue
            if member is None or way is None or self._is_given(member):
                self._result.append(step)
                continue
            bucket = self._open.setdefault(way, _Bucket(way))
            bucket.members.append(member)
            self._waiting[self._values[member.dst].storage] = way
            bucket.bytes += self._values[member.src].tile_bytes
            if bucket.bytes >= self._most(way):
                self._send(bucket)
        for bucket in list(self._open.values()):
            self._send(bucket)
        self._result += [*self._sent.values(), *self._last]
        return self._result, self._added

    def _layers(self) -> dict[int, list[_Bucket]]:
        """Buckets of weights, by the steps that they go before: those from which on the bucket before is used."""
        buckets: dict[_Way, list[tuple[int, int, _Bucket]]] = {}  # after so many products, at which step
        products = 0
        for index, step in enumerate(self._steps):
            products += step.is_long
            member, way = step.starts, self._way(step.starts)
            if member is None or way is None or way.kind != _ALL_GATHER or not self._is_given(member):
                continue
            size, mine = self._values[member.dst].tile_bytes, buckets.setdefault(way, [])
            if not mine or products >= mine[-1][0] + _LAYER or mine[-1][2].bytes + size > self._most(way):
                mine.append((products, index, _Bucket(way)))
            mine[-1][2].members.append(member)
            mine[-1][2].bytes += size
        made: dict[int, list[_Bucket]] = {}
        for mine in buckets.values():
            for (_, index, _), (_, _, bucket) in zip((mine[0], *mine), mine, strict=False):
                if len(bucket.members) > 1:
                    made.setdefault(index, []).append(bucket)
        return made

    def _is_given(self, member: CollectiveStep) -> bool:
        return self._values[member.src].storage in self._given

    def _way(self, step: CollectiveStep | None) -> _Way | None:
        """How a collective's tensor goes, if it may go with others."""
        if step is None or step.kind not in _KINDS or not step.bytes:
            return None
        src, dst = self._values[step.src], self._values[step.dst]
        if (
            max(src.tile_bytes, dst.tile_bytes) > self._least(step)
            or src.storage == dst.storage
            or src.slab
            or dst.slab
        ):
            return None
        if not (src.sharding.is_in_mesh_order and dst.sharding.is_in_mesh_order):
            return None  # a bucket's parts are in the mesh's order
        if dst.storage not in self._written_once:
            return None
        if src.storage not in self._written_once and src.storage not in self._given:
            return None
        if not _lies_in_parts(step, src, dst):
            return None
        return _Way(step.kind, step.axes, step.op, src.dtype)

    def _least(self, step: CollectiveStep) -> int:
        """Bytes of a tile: copying more of them (reading and writing) takes longer than to start a collective."""
        link = reach(self._machine, self._mesh, step.axes).link
        return round(link.start * self._machine.main_memory.rate / 2)

    def _most(self, way: _Way) -> int:
        """Bytes of a bucket."""
        link = reach(self._machine, self._mesh, way.axes).link
        return round(_STARTS * link.start * link.rate)

    def _may_come_last(self) -> set[int]:
        """Steps that make a few numbers of which nothing else is made, of what is written once."""
        found, needed = set[int](), set[str]()
        for step in reversed(self._steps):
            few = isinstance(step, OpStep) and not step.is_long and self._bytes(step) <= _FEW
            used, made = self._storages(step.uses), self._storages(step.writes)
            if few and used <= self._written_once | self._given and needed.isdisjoint(made):
                found.add(id(step))
            else:
                needed |= used
        return found

    def _comes_last(self, step: Step) -> bool:
        """Whether a step may come last, and takes what waits until then."""
        if id(step) not in self._may_wait:
            return False
        waiting = self._waiting.keys() | self._storages(name for earlier in self._last for name in earlier.writes)
        return not waiting.isdisjoint(self._storages(step.reads))

    def _bytes(self, step: Step) -> int:
        return sum(self._values[name].tile_bytes for name in step.uses)

    def _storages(self, names: Iterable[str]) -> set[str]:
        return {self._values[name].storage for name in names}

    def _send_what_is_needed(self, step: Step) -> None:
        """Buckets whose results the step uses go before it. What goes into them is written once, before they do."""
        used = self._storages(step.uses)
        ways = {self._waiting[storage] for storage in used if storage in self._waiting}
        for bucket in [bucket for way, bucket in self._open.items() if way in ways] if ways else ():
            self._send(bucket)
        needed = {self._parts[storage] for storage in used if storage in self._parts}
        for name in [name for name in self._sent if name in needed] if needed else ():
            self._result.append(self._sent.pop(name))

    def _send(self, bucket: _Bucket) -> None:
        if self._open.get(bucket.way) is bucket:
            del self._open[bucket.way]
            for member in bucket.members:
                del self._waiting[self._values[member.dst].storage]
        if len(bucket.members) == 1:
            self._result += bucket.members
            return
        values, kind = self._values, _KINDS[bucket.way.kind]
        group = math.prod(self._mesh.size(axis) for axis in bucket.way.axes)
        before = [values[member.src] for member in bucket.members]
        after = [values[member.dst] for member in bucket.members]
        rows, first = kind.before(group), bucket.members[0]
        sizes = [math.prod(value.tile_shape) // rows for value in before]
        elements = sum(sizes) * max(rows, kind.after(group))
        src = self._flat(bucket.way, kind.src(bucket.way.op), group, elements)
        dst = self._flat(bucket.way, kind.dst, group, elements)
        if bucket.way.kind == _ALL_REDUCE:  # nobody else has a bucket
            dst = self._added[dst.name] = replace(dst, storage=src.storage)
        self._result.append(_step(_joined(rows, sizes, src.dtype), [v.name for v in before], [src.name]))
        names = ", ".join(member.src for member in bucket.members[:3]) + (", ..." if len(before) > 3 else "")
        reason = f"{len(before)} together ({names}): {first.reason}"
        dims = [p.dim if isinstance(p, Shard) else None for p in (kind.src(bucket.way.op), kind.dst)]
        way = bucket.way
        move = Move(way.kind, way.axes, dst.sharding, way.op, *dims)
        self._result.append(collective_step(move, src, dst, reason))
        rows = kind.after(group)
        sizes = [math.prod(value.tile_shape) // rows for value in after]
        self._sent[dst.name] = _step(_parted(rows, sizes, dst.dtype), [dst.name], [v.name for v in after])
        self._parts |= {value.storage: dst.name for value in after}

    def _flat(self, way: _Way, placement: Placement, group: int, elements: int) -> ProgramValue:
        """A bucket's tiles, of `elements` where each device has all: other axes split its first dim, as what devices
        have of it differs along them."""
        others = [axis for axis in self._mesh if axis not in way.axes]
        shape = (math.prod(self._mesh.size(axis) for axis in others), group, elements // group)
        placements: dict[str, Placement] = dict.fromkeys(others, Shard(0))
        if way.kind == _ALL_REDUCE:
            shape = (shape[0], 1, elements)
        sharding = Sharding.of(self._mesh, 3, placements | dict.fromkeys(way.axes, placement))
        name = f"bucket.{len(self._added)}"
        self._added[name] = ProgramValue(name, shape, way.dtype, sharding, name)
        return self._added[name]


def _lies_in_parts(step: CollectiveStep, src: ProgramValue, dst: ProgramValue) -> bool:
    """Whether what goes to each device, or comes from it, is a contiguous part of the tile."""
    if step.kind == _ALL_REDUCE:
        return True
    dim = step.dst_dim if step.kind == _REDUCE_SCATTER else step.src_dim
    whole, part = (src, dst) if step.kind == _REDUCE_SCATTER else (dst, src)
    assert dim is not None
    shards = part.sharding.num_shards(dim)
    alone = whole.sharding.num_shards(dim) == 1 and src.shape[dim] % shards == 0
    return alone and math.prod(whole.tile_shape[:dim]) == 1


@dataclass(frozen=True)
class _Kind:
    """How a collective's bucket lies: how many parts tiles are made of, before and after; and what its axes do."""

    before: Callable[[int], int]
    after: Callable[[int], int]
    src: Callable[[str | None], Placement]
    dst: Placement


_KINDS = {
    _ALL_REDUCE: _Kind(lambda group: 1, lambda group: 1, lambda op: Partial(str(op)), Replicate()),
    _REDUCE_SCATTER: _Kind(lambda group: group, lambda group: 1, lambda op: Partial(str(op)), Shard(1)),
    _ALL_GATHER: _Kind(lambda group: 1, lambda group: group, lambda op: Shard(1), Replicate()),
}


def _joined(rows: int, sizes: Sequence[int], dtype: str) -> OpCall:
    """Tiles of `rows` parts next to each other, part by part."""
    parts = [relax.Var(f"x{n}", info_of(TensorType((rows, size), dtype))) for n, size in enumerate(sizes)]
    return _call(relax.op.concat(relax.Tuple(parts), 1))


def _parted(rows: int, sizes: Sequence[int], dtype: str) -> OpCall:
    """What `_joined` put together."""
    bucket = relax.Var("x", info_of(TensorType((rows, sum(sizes)), dtype)))
    return _call(relax.op.split(bucket, list(accumulate(sizes))[:-1], 1))


def _call(expr: relax.Expr) -> OpCall:
    return op_call(relax.BlockBuilder().normalize(expr))


def _step(call: OpCall, args: Sequence[str], results: Sequence[str]) -> OpStep:
    return OpStep(call, tuple(args), tuple(results), frozenset(results), 0, _WHERE)
