"""Layout changes as steps of single collectives.

Every step changes one tensor over some axes and stays inside the groups of those axes. An axis can leave a dim only if
no other axis splits that dim further, and can join it only after those that come before it in mesh order: tiles are
nested.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..sharding import Sharding


@dataclass(frozen=True)
class Move:
    """One collective: `kind` as in program.CollectiveStep, and the layout after it."""

    kind: str
    axes: tuple[str, ...]
    after: Sharding
    op: str | None = None
    src_dim: int | None = None
    dst_dim: int | None = None


def plan_moves(src: Sharding, dst: Sharding) -> list[Move]:
    """The steps that turn layout `src` into `dst`: what sends nothing or little comes first, gathers last."""
    moves: list[Move] = []
    current = src
    while current != dst:
        move = _next_move(current, dst)
        moves.append(move)
        current = move.after
    return moves


def _next_move(current: Sharding, dst: Sharding) -> Move:
    axes = current.mesh.axis_names
    for rule in (_slice, _scatter, _exchange, _reduce, _gather, _make_partial):
        for axis in axes:
            move = rule(axis, current, dst)
            if move is not None:
                return move
    raise AssertionError(f"no step from {current} to {dst}")


def _wanted_next(axis: str, current: Sharding, dst: Sharding) -> int | None:
    """The dim that `axis` has to split in `dst`, if everything that comes before it there is in place and nothing else
    is."""
    dim = dst.dim_of(axis)
    if dim is None:
        return None
    before = dst.dims[dim][: dst.dims[dim].index(axis)]
    return dim if current.dims[dim] == before else None


def _is_in_place(axis: str, current: Sharding, dst: Sharding) -> bool:
    """Whether the axis splits the dim that it should, after the same axes as it should."""
    dim = dst.dim_of(axis)
    if dim is None or current.dim_of(axis) != dim:
        return False
    position = current.dims[dim].index(axis) + 1
    return current.dims[dim][:position] == dst.dims[dim][:position]


def _is_minor(axis: str, current: Sharding) -> bool:
    dim = current.dim_of(axis)
    return dim is not None and current.dims[dim][-1] == axis


def _slice(axis: str, current: Sharding, dst: Sharding) -> Move | None:
    dim = _wanted_next(axis, current, dst)
    if dim is None or current.dim_of(axis) is not None or current.partial_op(axis) is not None:
        return None
    return Move("slice", (axis,), current.with_shard(axis, dim), dst_dim=dim)


def _scatter(axis: str, current: Sharding, dst: Sharding) -> Move | None:
    op, dim = current.partial_op(axis), _wanted_next(axis, current, dst)
    if op is None or dim is None:
        return None
    return Move("reduce_scatter", (axis,), current.with_shard(axis, dim), op=op, dst_dim=dim)


def _exchange(axis: str, current: Sharding, dst: Sharding) -> Move | None:
    dim, src_dim = _wanted_next(axis, current, dst), current.dim_of(axis)
    if dim is None or src_dim is None or src_dim == dim or not _is_minor(axis, current):
        return None
    return Move("all_to_all", (axis,), current.with_shard(axis, dim), src_dim=src_dim, dst_dim=dim)


def _reduce(axis: str, current: Sharding, dst: Sharding) -> Move | None:
    """All axes that are partial with the same operation and end up complete are reduced in one step."""
    op = current.partial_op(axis)
    if op is None or dst.partial_op(axis) == op:
        return None
    axes = tuple(
        a
        for a in current.mesh.axis_names
        if current.partial_op(a) == op and dst.partial_op(a) != op and (a == axis or dst.dim_of(a) is None)
    )
    after = current
    for a in axes:
        after = after.with_replicate(a)
    return Move("all_reduce", axes, after, op=op)


def _gather(axis: str, current: Sharding, dst: Sharding) -> Move | None:
    """The minor axes of a dim that have to leave it are gathered in one step."""
    dim = current.dim_of(axis)
    if dim is None or _is_in_place(axis, current, dst):
        return None
    leaving = [a for a in current.dims[dim] if not _is_in_place(a, current, dst)]
    after = current
    for a in leaving:
        after = after.with_replicate(a)
    return Move("all_gather", tuple(leaving), after, src_dim=dim)


def _make_partial(axis: str, current: Sharding, dst: Sharding) -> Move | None:
    op = dst.partial_op(axis)
    if op is None or current.partial_op(axis) == op:
        return None
    return Move("to_partial", (axis,), current.with_partial(axis, op), op=op)
