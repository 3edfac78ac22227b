"""Loads and stores of single elements, over the lanes that are active where they stand.

An index that is `lane + offset` in some dims and the same for all lanes in the others is a slice of the array, and
needs no index arrays; everything else is gathered and scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from .independence import AffineReader
from .memory import gather, inside, scatter
from .scope import MASK, Action, Code, Frame, Lane, Scope, constant

Compiler = Callable[[tirx.PrimExpr, Scope], Code]
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
        self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr], scope: Scope, compile_expr: Compiler
    ) -> None:
        self.storage = scope.storage(buffer)
        self.array = scope.array(buffer)
        codes = [compile_expr(i, scope) for i in indices]
        self.index = [code.run for code in codes]
        self.varies = any(code.varies for code in codes)
        self.lanes = scope.axes > 0
        self.slices = _slices(buffer, indices, codes, scope, compile_expr) if self.varies or self.lanes else None

    def load(self) -> Code:
        """The elements."""
        if not self.varies:
            return Code(self._load_one)
        return Code(self._load_lanes, True)

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
    buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr], codes: Sequence[Code], scope: Scope, compile_expr: Compiler
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
