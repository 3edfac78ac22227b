"""Exchange: one rank's part in bringing tiles from one layout to another, as all-to-alls in a group.

What goes from whom to whom is `reshard`'s plan, the same that the virtual mesh follows; what is received is combined
here, in the plan's order, so that both give the same bits. Nothing is copied that already lies as it has to be sent or
received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.runtime.elementwise import Combine, clone, fill
from mesh_tensor.runtime.reshard import Delivery, Piece, Region, part

from .carriers import Receipt, Sections, Span, Wait, carrier, region_shape, region_size, section, sections
from .ranks import Group

# Bytes: what goes to everybody is sent from where it lies, one all-to-all per peer.
_ROTATE_FROM = CPU.tuning.rotate_from


@dataclass(frozen=True)
class TileTypes:
    """What the tiles are: their shapes before and after, and their dtype."""

    src_shape: tuple[int, ...]
    dst_shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Operand:
    """What goes into a piece: a region of the own tile, or a span of what a round received."""

    region: Region
    round: int = -1
    span: Span = (0, 0)
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Local:
    """A piece of the new tile that is put together here. `stays`: it is where it has to be if the memory is the
    same. `late`: something of the own tile is its third operand, or a later one."""

    region: Region
    operands: tuple[_Operand, ...]
    stays: bool
    late: bool


# A part of the new tile, its operands, and which of them are the own tile's and have to be copied first.
_Ready = tuple[torch.Tensor, list[torch.Tensor], Sequence[bool]]


class Exchange:
    """The sends, receives and combinations of one rank. `group` is None where nobody sends anything.

    All members of the group have to start it, in the same order as their other exchanges in a call."""

    def __init__(
        self,
        deliveries: Sequence[Delivery],
        rank: int,
        group: Group | None,
        types: TileTypes,
        combine: Combine,
        blank: Any,
    ) -> None:
        self._types, self._combine, self._blank = types, combine, blank
        self._rank, self._group = rank, group
        mine = next((delivery for delivery in deliveries if rank in delivery.ranks), None)
        pieces = mine.pieces if mine else ()
        self._is_blank = mine is not None and mine.blank and not pieces
        self._has_blanks = mine is not None and mine.blank and bool(pieces)
        self._rounds = self._plan_rounds(deliveries, pieces) if group else []
        self._locals = [local for index, piece in enumerate(pieces) if (local := self._local(index, piece))]
        self._carry = carrier(group, rank, self._rounds, types.dtype) if group and self._rounds else None

    def __call__(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Fill the tile `dst` from the group's tiles `src`; both contiguous. They may be one memory where every piece
        is a whole tile, or lies in the new tile where it lay in the old."""
        self.start(src, dst).wait()

    def start(self, src: torch.Tensor, dst: torch.Tensor) -> Pending:
        """Begin to send and receive: `src` may not be written, nor `dst` used, before the wait."""
        received, sends = [], []
        if self._has_blanks:  # before what is received where it belongs
            fill(dst, self._blank)
        for plan in self._rounds:
            if plan.send_span is not None:
                sent = section(src, plan.send_span)
            else:
                sent = torch.cat([part(src, region).reshape(-1) for region in plan.regions])
            received.append(self._received(plan, dst))
            sends.append(sent)
        wait = self._carry(received, sends) if self._carry else None
        return Pending(self, dst, self._ready(src, dst, received), wait)

    def _ready(self, src: torch.Tensor, dst: torch.Tensor, received: list[torch.Tensor]) -> list[_Ready]:
        """What is put together of what, found while it is still under way."""
        same = src.data_ptr() == dst.data_ptr()
        return [
            (
                part(dst, local.region),
                [
                    part(src, o.region) if o.round < 0 else section(received[o.round], o.span).view(o.shape)
                    for o in local.operands
                ],
                # It would be overwritten before its turn.
                [o.round < 0 for o in local.operands] if same and local.late else (),
            )
            for local in self._locals
            if not (same and local.stays)
        ]

    def finish(self, dst: torch.Tensor, ready: list[_Ready]) -> None:
        """Put the new tile together from the old one and what was received."""
        if self._is_blank:
            fill(dst, self._blank)
        for target, operands, own in ready:
            if own:
                operands = [clone(t) if mine else t for t, mine in zip(operands, own, strict=True)]
            self._combine(target, operands)

    def _received(self, plan: Sections, dst: torch.Tensor) -> torch.Tensor:
        if plan.receive_span is None:
            return dst.new_empty(sum(plan.receive_counts))
        return section(dst, plan.receive_span)

    def _plan_rounds(self, deliveries: Sequence[Delivery], pieces: Sequence[Piece]) -> list[Sections]:
        assert self._group is not None
        members, me = self._group.members, self._rank
        sends: dict[int, list[Region]] = {member: [] for member in members}
        for delivery in deliveries:
            for target in delivery.ranks:
                if target in sends:
                    sends[target] += [r for piece in delivery.pieces for source, r in piece.sources if source == me]
        receipts: dict[int, list[Receipt]] = {member: [] for member in members}
        for index, piece in enumerate(pieces):
            for position, (source, region) in enumerate(piece.sources):
                alone = piece.region if len(piece.sources) == 1 else None
                receipts[source].append(Receipt(index, position, region, alone))
        shapes = self._types.src_shape, self._types.dst_shape
        if not self._rotates(deliveries):
            return [sections(members, me, sends, receipts, *shapes)]
        here, count = members.index(me), len(members)
        rounds = []
        for step in range(1, count):
            to, source = members[(here + step) % count], members[(here - step) % count]
            rounds.append(sections(members, me, {to: sends[to]}, {source: receipts[source]}, *shapes))
        return rounds

    def _rotates(self, deliveries: Sequence[Delivery]) -> bool:
        """Everybody gets the same, and it is large. All ranks answer alike."""
        assert self._group is not None
        count = len(self._group.members)
        if count <= 2 or any(len(delivery.ranks) < count for delivery in deliveries):
            return False
        regions = [region for d in deliveries for piece in d.pieces for _, region in piece.sources]
        largest = max((region_size(region, self._types.src_shape) for region in regions), default=0)
        return largest * self._types.dtype.itemsize >= _ROTATE_FROM

    def _local(self, index: int, piece: Piece) -> _Local | None:
        """How the piece is put together; None if it is received where it belongs."""
        operands = []
        for position, (source, region) in enumerate(piece.sources):
            operand = _Operand(region)
            for number, plan in enumerate(self._rounds):
                offset = plan.offsets.get((index, position))
                if offset is not None:
                    shape = region_shape(region, self._types.src_shape)
                    operand = _Operand(region, number, (offset, math.prod(shape)), shape)
                    if plan.receive_span is not None:
                        return None
            assert operand.round >= 0 or source == self._rank
            operands.append(operand)
        stays = len(operands) == 1 and operands[0].round < 0 and operands[0].region == piece.region
        late = any(operand.round < 0 for operand in operands[2:])
        return _Local(piece.region, tuple(operands), stays, late)


class Pending:
    """An exchange under way."""

    __slots__ = ("_dst", "_exchange", "_ready", "_wait")

    def __init__(self, exchange: Exchange, dst: torch.Tensor, ready: list[_Ready], wait: Wait | None) -> None:
        self._exchange, self._dst, self._ready, self._wait = exchange, dst, ready, wait

    def advance(self) -> None:
        """Begin what has to follow what was begun: nothing."""

    def wait(self) -> None:
        """Wait until everything is there; then the new tile is whole."""
        if self._wait is not None:
            self._wait()
        self._exchange.finish(self._dst, self._ready)
