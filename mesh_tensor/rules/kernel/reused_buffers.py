"""Buffers on chip that hold all of a dim in one place, and something else in another: constants, a block of another
tensor. A buffer shrinks with what it holds, so each kind of use gets a buffer of its own; that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx

from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import buffer_like, exchange_buffers
from mesh_tensor.tir.views import left_views

from .coordinates import Coordinates
from .factors import Factor
from .live_ranges import LiveRange
from .statements import Kernel

#: Per dim of a buffer, the factor of which it holds all; None where it is anything else.
_Held = tuple[Factor | None, ...]

_LEAVES = ["tirx.BufferStore", "tirx.Evaluate"]  # what is told which buffer to use
_ACCESSES = tirx.BufferLoad, tirx.BufferStore


def mixed_dims(coordinates: Coordinates, factor: Factor) -> Iterator[tuple[tirx.Buffer, int]]:
    """The dims of buffers on chip that hold all of a factor in one place, and something else in another."""
    whole: dict[tuple[tirx.Buffer, int], set[bool]] = {}
    for live_range in _on_chip(coordinates):
        for dim, held in enumerate(_held(live_range, coordinates)):
            whole.setdefault((live_range.buffer, dim), set()).add(held is factor)
    yield from (place for place, kinds in whole.items() if len(kinds) > 1)


def with_own_buffers(kernel: Kernel, coordinates: Coordinates) -> tirx.PrimFunc | None:
    """The kernel with a buffer for each kind of use; None if there are no such buffers, or only such that are used
    elsewhere than in stores and tile operations, too, or of which the kernel says how they lie in memory."""
    mixed = dict.fromkeys(buffer for factor in coordinates.factors for buffer, _ in mixed_dims(coordinates, factor))
    notes = [note for note in kernel.root.annotations.values() if hasattr(note, "items")]
    plain = [buffer for buffer in mixed if not any(buffer.data in note for note in notes)]
    found = {buffer: own for buffer in plain if (own := _own_buffers(kernel, coordinates, buffer))}
    if not found or left_views(kernel.func):
        return None

    def exchange(stmt: tirx.Stmt) -> tirx.Stmt | None:
        into = {buffer: own[stmt] for buffer, own in found.items() if stmt in own}
        return exchange_buffers(stmt, into) if into else None

    body = tirx.stmt_functor.ir_transform(kernel.root.body, exchange, None, _LEAVES)
    buffers = dict.fromkeys([*kernel.root.alloc_buffers, *(into for own in found.values() for into in own.values())])
    return kernel.with_body(body, list(buffers))


def _own_buffers(kernel: Kernel, coordinates: Coordinates, buffer: tirx.Buffer) -> dict[tirx.Stmt, tirx.Buffer]:
    """Statements that use a buffer, each with the one for its kind of use; none where not all uses are in these."""
    kinds: dict[_Held, tirx.Buffer] = {}
    own: dict[tirx.Stmt, tirx.Buffer] = {}
    for statement in kernel.statements:
        for access in (access for access in statement.accesses if access.buffer.same_as(buffer)):
            held = _held(coordinates.ranges.of(access), coordinates)
            if held not in kinds:
                kinds[held] = buffer_like(buffer, str(len(kinds))) if kinds else buffer
            if statement.unknown or not own.setdefault(statement.node, kinds[held]).same_as(kinds[held]):
                return {}
    rest = tirx.stmt_functor.ir_transform(
        kernel.root.body, lambda stmt: tirx.Evaluate(0) if stmt in own else None, None, _LEAVES
    )
    elsewhere = any(access.buffer.data.same_as(buffer.data) for access in nodes(rest, *_ACCESSES))
    pointed_at = any(buffer.data.same_as(var) for var in nodes(kernel.root.body, tirx.Var))
    return {} if elsewhere or pointed_at or buffer not in kernel.root.alloc_buffers else own


def _on_chip(coordinates: Coordinates) -> Iterator[LiveRange]:
    for live_range in coordinates.ranges.all:
        if not live_range.is_param and (live_range.reads or live_range.writes):
            yield live_range


def _held(live_range: LiveRange, coordinates: Coordinates) -> _Held:
    entries = (coordinates.of_node((live_range, dim)) for dim in range(len(live_range.buffer.shape)))
    return tuple(None if entry is None or entry[1].terms else entry[0] for entry in entries)
