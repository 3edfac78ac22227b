"""Reading and writing numpy arrays at scalar indices, at index arrays and in boxes, with the bounds rules of each.

Direct accesses (loads, stores) outside a buffer: see :class:`Storage`. Boxes (what tile operations name) are clipped:
what lies outside the source reads as a neutral value, what lies outside the destination is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mesh_tensor.base.errors import MeshTensorError

from .intrinsics import assign
from .scope import Storage

Indices = Sequence[Any]


def inside(index: Indices, shape: Sequence[int]) -> bool:
    """Whether scalar indices are within `shape`."""
    return all(0 <= i < n for i, n in zip(index, shape, strict=True))


def gather(array: np.ndarray, index: Indices, mask: np.ndarray | None, storage: Storage) -> np.ndarray:
    """`array[index]` over lanes; lanes that `mask` switches off may be anywhere, and read anything."""
    valid = _valid(index, array.shape)
    if valid is None:
        return array[tuple(index)]
    _check(valid, index, mask, storage, "reads", array.shape)
    if 0 in array.shape:
        return np.zeros(valid.shape, array.dtype)
    safe = tuple(np.where(valid, i, 0) for i in index)
    return np.where(valid, array[safe], array.dtype.type(0))


def scatter(array: np.ndarray, index: Indices, value: Any, mask: np.ndarray | None, storage: Storage) -> None:
    """`array[index] = value` on the lanes that `mask` leaves on."""
    valid = _valid(index, array.shape)
    if valid is not None:
        _check(valid, index, mask, storage, "writes", array.shape)
        mask = valid if mask is None else mask & valid
    if mask is None:
        array[tuple(index)] = value
        return
    on, value, *index = np.broadcast_arrays(mask, value, *index)
    array[tuple(i[on] for i in index)] = value[on]


def _valid(index: Indices, shape: Sequence[int]) -> np.ndarray | None:
    """Where the indices are within `shape`; None if that is everywhere."""
    valid = None
    for i, n in zip(index, shape, strict=True):
        bad = (i.min() < 0 or i.max() >= n) if isinstance(i, np.ndarray) and i.size else np.any((i < 0) | (i >= n))
        if bad:
            here = np.asarray((i >= 0) & (i < n))
            valid = here if valid is None else valid & here
    return None if valid is None else np.broadcast_to(valid, np.broadcast_shapes(*(np.shape(i) for i in index)))


def _check(
    valid: np.ndarray, index: Indices, mask: np.ndarray | None, storage: Storage, verb: str, shape: tuple[int, ...]
) -> None:
    bad = ~valid if mask is None else mask & ~valid
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), bad.shape)
        storage.outside(verb, tuple(np.broadcast_to(i, bad.shape)[at] for i in index), shape)


def read_box(
    array: np.ndarray, mins: Sequence[int], extents: Sequence[int | None], fill: Any, storage: Storage
) -> np.ndarray:
    """The box as an array without the dims whose extent is None (a single index); a view, if nothing lies outside."""
    clipped = _clip(array, mins, extents, storage)
    if clipped is not None and clipped[0] is None:
        return array[clipped[1]]
    block = np.full([n for n in extents if n is not None], fill, array.dtype)
    if clipped is not None:
        block[clipped[0]] = array[clipped[1]]
    return block


def write_box(
    array: np.ndarray, mins: Sequence[int], extents: Sequence[int | None], block: Any, storage: Storage
) -> None:
    """The box, where it lies inside `array`, becomes `block` (an array without the single-index dims, or a scalar)."""
    clipped = _clip(array, mins, extents, storage)
    if clipped is not None:
        where, parts = clipped
        assign(array, parts, block if where is None or np.ndim(block) == 0 else block[where])


def box_view(array: np.ndarray, mins: Sequence[int], extents: Sequence[int], storage: Storage) -> np.ndarray:
    """The box as a view with all its dims; a box that is not wholly inside is an error."""
    for low, extent, n in zip(mins, extents, array.shape, strict=True):
        if low < 0 or low + extent > n:
            raise MeshTensorError(
                f"the kernel uses the box at {list(map(int, mins))} of size {list(map(int, extents))} of "
                f"{storage.name}, which reaches outside its shape {array.shape}"
            )
    return array[tuple(slice(low, low + extent) for low, extent in zip(mins, extents, strict=True))]


def _clip(
    array: np.ndarray, mins: Sequence[int], extents: Sequence[int | None], storage: Storage
) -> tuple[tuple[slice, ...] | None, tuple[Any, ...]] | None:
    """What of the box is inside `array`: where in the box (None: all of it) and where in the array; None if a
    single-index dim is outside, so that nothing is."""
    where: list[slice] = []
    parts: list[Any] = []
    whole = True
    for low, extent, n in zip(mins, extents, array.shape, strict=True):
        if extent is None:
            if not 0 <= low < n:
                if not storage.is_param:
                    storage.outside("uses", tuple(mins), array.shape)
                return None
            parts.append(low)
        elif low >= 0 and low + extent <= n:
            where.append(slice(0, extent))
            parts.append(slice(low, low + extent))
        else:
            start, stop = max(0, -low), max(0, min(extent, n - low))
            whole = False
            where.append(slice(start, stop))
            parts.append(slice(low + start, low + max(start, stop)))
    parts.append(Ellipsis)
    return (None if whole else tuple(where)), tuple(parts)
