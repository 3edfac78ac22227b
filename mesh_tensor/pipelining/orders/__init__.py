"""The orders that have names: a table of functions, and what each asks of meshes, microbatches and chunks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown

from ..schedule import Schedule
from . import one_way, v_shaped
from .one_way import Rows


@dataclass(frozen=True)
class Order:
    """An order: its function of (meshes, microbatches, chunks), and the chunks (stages per mesh) that it can have.
    `in_rounds`: it is best with a multiple of as many microbatches as meshes."""

    rows: Callable[[int, int, int], Rows]
    chunks: int = 1
    any_chunks: bool = False
    also: tuple[str, ...] = ()
    in_rounds: bool = False
    fills_twice: bool = False

    def takes(self, chunks: int) -> bool:
        """Whether a mesh may have so many stages."""
        return self.any_chunks or chunks == self.chunks


# name: the order; `also` are the names that torch.distributed.pipelining and Shardy's MPMD give it.
SCHEDULES: dict[str, Order] = {
    "gpipe": Order(one_way.gpipe, any_chunks=True),
    "1f1b": Order(one_way.one_f_one_b),
    "interleaved": Order(one_way.interleaved, 2, any_chunks=True, also=("Interleaved1F1B",), in_rounds=True),
    "looped-bfs": Order(one_way.looped_bfs, 2, any_chunks=True, also=("bfs",)),
    "zb-h1": Order(
        one_way.zb_h1, any_chunks=True, also=("ZeroBubbleH1", "InterleavedZeroBubble", "zb1p"), in_rounds=True
    ),
    "zb-h2": Order(one_way.zb_h2, also=("ZeroBubbleH2", "ZeroBubbleH2ZeroTxLatency")),
    "zbv": Order(v_shaped.zbv, 2, also=("ZBVZeroBubble", "zb-v")),
    "dualpipev": Order(v_shaped.dualpipev, 2, fills_twice=True),
    "circular": Order(one_way.circular, any_chunks=True),
    "circular-reversed": Order(one_way.circular_reversed, any_chunks=True, also=("CircularWithReversedBackward",)),
    "gpipe-last-1f1b": Order(one_way.gpipe_last_1f1b, also=("GPipeBut1F1BForLastMesh",)),
    "forward": Order(one_way.forward, any_chunks=True, also=("forward-only", "inference")),
}


def make(name: str, meshes: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name; refused where the order has no such sizes."""
    known = {_plain(alias): key for key, order in SCHEDULES.items() for alias in (key, *order.also)}
    plain = _plain(name) if isinstance(name, str) else ""
    key = known.get(plain, known.get(plain.removeprefix("schedule")))  # as torch calls its classes
    if key is None:
        refuse(
            f"unknown schedule {shown(name)}{did_you_mean(name, known)}",
            fix=f"use one of {listing(list(SCHEDULES))}, or lists of your own with Schedule.of",
        )
    order = SCHEDULES[key]
    chunks = order.chunks if chunks is None else chunks
    problems = _problems(order, meshes, microbatches, chunks)
    if problems:
        refuse(problems, where=f"schedule {key!r}", fix=_fix(order, meshes, chunks))
    return Schedule(key, tuple(tuple(row) for row in order.rows(meshes, microbatches, chunks)))


def _problems(order: Order, meshes: int, microbatches: int, chunks: int) -> list[str]:
    sizes = {"meshes": meshes, "microbatches": microbatches, "chunks": chunks}
    bad = [
        f"{what} is {shown(size)}, but it is an int of at least 1" for what, size in sizes.items() if not _is_size(size)
    ]
    if bad:
        return bad
    if not order.takes(chunks):
        bad.append(f"{chunks} stages per mesh, but the order is made for {order.chunks}")
    if order.fills_twice and microbatches < 2 * meshes:
        bad.append(
            f"{microbatches} microbatches, but {meshes} meshes need at least {2 * meshes} to fill both directions"
        )
    return bad


def _fix(order: Order, meshes: int, chunks: int) -> str:
    if not (_is_size(meshes) and _is_size(chunks)) or order.takes(chunks):
        return "change the sizes, or take another schedule"
    fitting = [name for name, other in SCHEDULES.items() if other.takes(chunks) and name != "forward"]
    nearest = sorted(fitting, key=lambda name: SCHEDULES[name].chunks != chunks)
    way_out = f"take a schedule of {chunks} stages per mesh, as {listing(nearest)}"
    return f"{way_out}; or cut into {meshes * order.chunks} stages"


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _plain(name: object) -> str:
    return re.sub(r"[^0-9a-z]", "", str(name).lower())
