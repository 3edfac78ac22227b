"""In the body of a kernel, which TileLang traces: our own errors come alone, and say at which line; and which part
of a buffer a copy of blocks is about."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tilelang.language.eager.builder import Builder
from tvm import arith, ir, tirx

from mesh_tensor.base.errors import MeshTensorError, refuse, shown
from mesh_tensor.base.sharding import ceildiv

from .annotation import BufferAnnotation, is_int


class _OursAlone(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """TileLang logs the source of a function that raises, on the way out: not where the error says all itself."""
        return not isinstance(sys.exc_info()[1], MeshTensorError)


def keep_quiet() -> None:
    """From now on, TileLang's tracer logs nothing about a MeshTensorError. What others raise it logs as before."""
    logger = logging.getLogger(Builder.__module__)
    if not any(isinstance(found, _OursAlone) for found in logger.filters):
        logger.addFilter(_OursAlone())


def at_line(helper: Callable[..., Any]) -> Callable[..., Any]:
    """The helper; what it raises while a kernel is traced names the kernel's file and line."""

    @functools.wraps(helper)
    def located(*args: Any, **kwargs: Any) -> Any:
        try:
            return helper(*args, **kwargs)
        except MeshTensorError as error:
            builder = Builder.current()
            file, line = getattr(builder, "current_file", ""), getattr(builder, "current_line", 0)
            if not file or not line:
                raise
            raise MeshTensorError(f"{error}\n  line: {file}:{line}") from None

    return located


def block_at(buffer: tirx.Buffer, annotation: BufferAnnotation, coordinate: Any, what: str) -> tirx.BufferRegion:
    """The block of `buffer` at a coordinate, which `what` names."""
    block_shape = annotation.block_shape
    place = [constant(at) for at in (coordinate if _is_sequence(coordinate) else (coordinate,))]
    where = f"mesh_tensor_copy, buffer {buffer.name!r}"
    if block_shape is None:
        refuse(f"`{what}` is given, but the `block_shape` is None", where=where, fix="annotate a `block_shape`")
    if len(place) != len(block_shape):
        refuse(
            f"`{what}` {shown(tuple(place))} has {len(place)} coordinates, but the buffer has {len(block_shape)} dims",
            where=where,
            fix=f"give one block coordinate per dim (block_shape is {block_shape})",
        )
    for index, (size, dim) in enumerate(zip(block_shape, buffer.shape, strict=True)):
        _check_coordinate(place[index], constant(size), constant(dim), f"`{what}`, dim {index}", where)
    ranges = [ir.Range.from_min_extent(at * size, size) for at, size in zip(place, block_shape, strict=True)]
    return tirx.BufferRegion(buffer, ranges)


def own_block(buffer: Any, annotation: BufferAnnotation | None, other: Any) -> Any:
    """The block that the annotation's `program_id` is the coordinate of, where a copy names none; the buffer itself
    where it has the shape of the other side, or where nothing says which block is meant."""
    if annotation is None or annotation.block_shape is None or not _is_sequence(annotation.program_id):
        return buffer
    extents = _extents(other)
    if extents is None or len(annotation.program_id) != len(buffer.shape) or _alike(_extents(buffer), extents):
        return buffer
    return block_at(buffer, annotation, annotation.program_id, "program_id")


def check_extents(src: Any, dst: Any) -> None:
    """Where both sides' extents are known, those other than 1 pair up in order: T.copy doesn't check that."""
    found = [_extents(side) for side in (src, dst)]
    known = [None if extents is None or not all(map(is_int, extents)) else extents for extents in found]
    if None in known or known[0] == known[1]:
        return
    names = [(side.buffer if isinstance(side, tirx.BufferRegion) else side).name for side in (src, dst)]
    refuse(
        f"can't copy {known[0]} elements of {names[0]!r} to {known[1]} elements of {names[1]!r}",
        where="mesh_tensor_copy (dims of extent 1 are left out)",
        fix="give `src_coord` or `dst_coord` where a block is meant, or a coordinate as `program_id`; "
        "with a `block_shape` like the other side's shape",
    )


def constant(value: Any) -> Any:
    """An int where the value is one, whatever its type; other values as they are."""
    if isinstance(value, tirx.IntImm):
        return value.value
    return int(value) if is_int(value) else value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple, tvm_ffi.Array))


def _check_coordinate(at: Any, size: Any, dim: Any, what: str, where: str) -> None:
    """A coordinate is an int or an expression, and names a block that exists where that is known."""
    if not is_int(at) and not isinstance(at, tirx.PrimExpr):
        refuse(f"{what}: {shown(at)} is no int or expression", where=where, fix="give the index of a block")
    if is_int(at) and is_int(size) and is_int(dim):
        blocks = max(1, ceildiv(dim, size))
        if not 0 <= at < blocks:
            refuse(f"{what}: there is no block {at}", where=where, fix=f"blocks of {size} go from 0 to {blocks - 1}")


def _extents(side: Any) -> list[Any] | None:
    """The extents of one side of a copy but for those of 1; None where the other side's count."""
    if isinstance(side, tirx.Buffer):
        extents = [constant(dim) for dim in side.shape]
    elif isinstance(side, tirx.BufferRegion):
        extents = [constant(dim.extent) for dim in side.region]
    else:
        return None
    return [extent for extent in extents if not is_int(extent) or extent != 1]


def _alike(ours: list[Any] | None, theirs: list[Any]) -> bool:
    """Whether both are certainly the same extents."""
    if ours is None or len(ours) != len(theirs):
        return False
    prove = arith.Analyzer().can_prove_equal
    return all(a == b if is_int(a) and is_int(b) else prove(a, b) for a, b in zip(ours, theirs, strict=True))
