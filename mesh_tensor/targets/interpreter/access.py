"""Loads and stores of single elements, over the lanes that are active where they stand, and in boxes; with the
bounds checked.

An index that is `lane + offset` in some dims and the same for all lanes in the others is a slice of the array, and
needs no index arrays; everything else is gathered and scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from mesh_tensor.base.errors import MeshTensorError, refuse

from .independence import AffineReader
from .intrinsics import assign
from .scope import MASK, Action, Code, Frame, FunctionScope, Lane, Storage, constant

Compiler = Callable[[tirx.PrimExpr, FunctionScope], Code]
Part = tuple[Lane | None, Code]


@dataclass(frozen=True)
class Slices:
    """An access that is a slice: per dim the lane that walks it (or None) and where it starts; then how to bring the
    slice's dims into the lanes' order. `known`: the slice, where that is known at compile time to be inside."""

    parts: tuple[Part, ...]
    order: tuple[int, ...] | None
    expand: tuple[Any, ...] | None
    known: tuple[Any, ...] | None

    def view(self, frame: Frame, array: np.ndarray) -> np.ndarray | None:
        """The slice, with one dim per axis; None if it is not wholly inside `array`."""
        index = self.known if self.known is not None else self._index(frame, array.shape)
        if index is None:
            return None
        found = array[index]
        if self.order is not None:
            found = found.transpose(self.order)
        return found if self.expand is None else found[self.expand]

    def _index(self, frame: Frame, shape: Sequence[int]) -> tuple[Any, ...] | None:
        index: list[Any] = []
        for (lane, offset), n in zip(self.parts, shape, strict=True):
            low = offset.run(frame)
            if lane is None:
                if not 0 <= low < n:
                    return None
                index.append(low)
                continue
            low += frame[lane.start]
            high = low + frame[lane.size]
            if low < 0 or high > n:
                return None
            index.append(slice(low, high))
        index.append(Ellipsis)
        return tuple(index)


class BufferAccess:
    """One place in a kernel where elements of a buffer are read or written."""

    def __init__(
        self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr], scope: FunctionScope, compile_expr: Compiler
    ) -> None:
        if sum("x" in index.dtype for index in indices) > 1:
            what = f"an access to {buffer.name!r} has vectors in several dims"
            refuse(what, why="it is not said which elements meet", fix="write it in a T.Parallel loop, or as T.copy")
        self.storage = scope.storage(buffer)
        self.array = scope.array(buffer)
        codes = [compile_expr(i, scope) for i in indices]
        self.index = [code.run for code in codes]
        self.varies = any(code.varies for code in codes)
        self.lanes = scope.axes > 0
        self.slices = _slices(buffer, indices, codes, scope, compile_expr) if self.varies or self.lanes else None

    def load(self) -> Code:
        """The elements."""
        return Code(self._load_lanes, True) if self.varies else Code(self._load_one)

    def store(self, value: Code) -> Action:
        """What writes `value` to the elements."""
        if not self.varies and not self.lanes:
            return self._storing_one(value.run)
        return self._storing_lanes(value.run)

    def _load_one(self, frame: Frame) -> Any:
        array = self.array(frame)
        index = tuple([i(frame) for i in self.index])
        if inside(index, array.shape):
            return array[index]
        self.storage.outside("reads", index, array.shape)
        return array.dtype.type(0)

    def _load_lanes(self, frame: Frame) -> np.ndarray:
        array = self.array(frame)
        if self.slices is not None:
            view = self.slices.view(frame, array)
            if view is not None:
                return view
        return gather(array, [i(frame) for i in self.index], frame[MASK], self.storage)

    def _storing_one(self, value: Callable[[Frame], Any]) -> Action:
        def run(frame: Frame) -> None:
            array = self.array(frame)
            index = tuple([i(frame) for i in self.index])
            if inside(index, array.shape):
                array[index] = value(frame)
            else:
                self.storage.outside("writes", index, array.shape)

        return run

    def _storing_lanes(self, value: Callable[[Frame], Any]) -> Action:
        def run(frame: Frame) -> None:
            array, new, mask = self.array(frame), value(frame), frame[MASK]
            view = None if self.slices is None else self.slices.view(frame, array)
            if view is None:
                scatter(array, [i(frame) for i in self.index], new, mask, self.storage)
            elif mask is None:
                view[...] = new
            else:
                np.copyto(view, new, casting="unsafe", where=mask)

        return run


def _slices(
    buffer: tirx.Buffer,
    indices: Sequence[tirx.PrimExpr],
    codes: Sequence[Code],
    scope: FunctionScope,
    compile_expr: Compiler,
) -> Slices | None:
    reader = AffineReader(scope.binds, lambda e: isinstance(e, tirx.Var) or not compile_expr(e, scope).varies)
    parts: list[Part] = []
    axes: list[int] = []
    for index, code in zip(indices, codes, strict=True):
        if not code.varies:
            parts.append((None, code))
            continue
        form = reader.read(index)
        if form is None:
            return None
        lanes = [(scope.lanes[a], c) for a, c in form.terms.items() if a in scope.lanes]
        rest = [(reader.atoms[a], c) for a, c in form.terms.items() if a not in scope.lanes]
        offsets = [(compile_expr(atom, scope), c) for atom, c in rest]
        if len(lanes) != 1 or lanes[0][1] != 1 or any(o.varies for o, _ in offsets):
            return None
        parts.append((lanes[0][0], _sum(offsets, form.const)))
        axes.append(lanes[0][0].axis)
    if len(set(axes)) < len(axes):
        return None
    order = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    expand = tuple(slice(None) if axis in axes else None for axis in range(scope.axes))
    in_order = order == tuple(range(len(axes)))
    order_if_needed, expand_if_needed = None if in_order else order, expand if None in expand else None
    return Slices(tuple(parts), order_if_needed, expand_if_needed, _known_index(parts, buffer))


def _known_index(parts: Sequence[Part], buffer: tirx.Buffer) -> tuple[Any, ...] | None:
    index: list[Any] = []
    for (lane, offset), extent in zip(parts, buffer.shape, strict=True):
        steps = range(1) if lane is None else lane.known
        if steps is None or offset.const is None or not isinstance(extent, tirx.IntImm):
            return None
        low, high = offset.const + steps.start, offset.const + steps.stop
        if low < 0 or high > int(extent):
            return None
        index.append(low if lane is None else slice(low, high))
    return (*index, Ellipsis)


def _sum(terms: list[tuple[Code, int]], const: int) -> Code:
    if not terms:
        return constant(const)
    if len(terms) == 1:
        ((only, scale),) = terms
        return Code(lambda frame: int(only.run(frame)) * scale + const)
    return Code(lambda frame: sum(int(term.run(frame)) * scale for term, scale in terms) + const)


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
