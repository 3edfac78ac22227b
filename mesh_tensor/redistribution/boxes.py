"""Layouts as states of the search, and what every device holds in them: Boxes.

A state has one number per axis: d where the axis splits dim d, WHOLE where it replicates, PARTIAL where it is partial.
Where axes don't split a dim in mesh order, those that come later there have d + n * ORDER (see `place_of`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy

from mesh_tensor.base.blocks import whole_blocks
from mesh_tensor.base.collectives import CollectiveKind
from mesh_tensor.base.mesh import Mesh, check_countable
from mesh_tensor.base.window import Window

State = tuple[int, ...]
WHOLE, PARTIAL = -1, -2
ORDER = 1 << 16

Windows = tuple[tuple[int, Window], ...]  # by dim
Blocks = tuple[tuple[int, int], ...]  # by dim
Spans = tuple[numpy.ndarray, numpy.ndarray]  # per device: first position in a dim, and the one after the last


class Boxes:
    """Which box of a tensor of `shape` every device holds in any state: what of it is there, without padding.

    `windows`: the dims of which a device wants a window; what is `missing` is missing of that. `before` and `wanted`:
    the dims of which it has and wants whole blocks."""

    def __init__(
        self, mesh: Mesh, shape: tuple[int, ...], windows: Windows = (), before: Blocks = (), wanted: Blocks = ()
    ) -> None:
        self.sizes, self.shape = tuple(mesh.shape.values()), shape
        self._windows, self._names = dict(windows), mesh.axis_names
        self._before, self._wanted = dict(before), dict(wanted)
        check_countable(mesh)
        grid = numpy.indices(self.sizes, dtype=numpy.int64)
        self._at = grid.reshape(len(self.sizes), -1)
        self._ones = numpy.ones(self._at.shape[1], dtype=numpy.int64)
        self._spans: dict[tuple[int, tuple[int, ...], int], Spans] = {}
        self._missing: dict[tuple[State, State], int] = {}

    def devices(self, axes: Sequence[int]) -> int:
        """How many devices differ only in their coordinates on `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def received(self, kind: CollectiveKind, before: State, after: State, axes: Sequence[int]) -> int:
        """The elements that the busiest device receives in a collective over `axes`."""
        group = self.devices(axes)
        if kind.received == "lacking":
            return self.missing(before, after)
        if kind.received == "around":
            return -(-2 * (group - 1) * self.volume(before) // group)
        return (group - 1) * int(self.volumes(after).max()) if kind.received == "parts" else 0

    def volume(self, state: State) -> int:
        """The elements of the largest tile, padding included."""
        parts = [math.prod(self.sizes[axis] for axis in axes_on(state, dim)) for dim in range(len(self.shape))]
        return math.prod(
            whole_blocks(size, count, self._before.get(dim, 1)) // count
            for dim, (size, count) in enumerate(zip(self.shape, parts, strict=True))
        )

    def missing(self, state: State, wanted: State) -> int:
        """The most elements that a device lacks in `state` of its box in `wanted`."""
        key = (state, wanted)
        if key not in self._missing:
            self._missing[key] = self._lacking(state, wanted)
        return self._missing[key]

    def _lacking(self, state: State, wanted: State) -> int:
        have = want = self._ones
        for dim in range(len(self.shape)):
            before, after = axes_on(state, dim), axes_on(wanted, dim)
            is_other = dim in self._windows or self._before.get(dim) != self._wanted.get(dim)
            wanted_here = self._window(dim, after) if dim in self._windows else [self._span(dim, after, self._wanted)]
            low, high = self._span(dim, before, self._before)
            total = held = self._ones * 0
            for start, stop in wanted_here:
                total = total + (stop - start)
                if before and (before != after or is_other):
                    start, stop = numpy.maximum(start, low), numpy.minimum(stop, high)
                held = held + numpy.maximum(stop - start, 0)
            want, have = want * total, have * held
        return int((want - have).max())

    def volumes(self, state: State) -> numpy.ndarray:
        """The elements of every device's box."""
        result = self._ones
        for dim in range(len(self.shape)):
            start, stop = self._span(dim, axes_on(state, dim), self._wanted)
            result = result * (stop - start)
        return result

    def _window(self, dim: int, axes: tuple[int, ...]) -> list[Spans]:
        """The pieces of the tensor that every device's window is made of."""
        window, count = self._windows[dim], self._at.shape[1]
        split = [(self._names[axis], self.sizes[axis]) for axis in axes]
        pieces = []
        for device in range(count):
            start = window.start(split, {self._names[axis]: int(self._at[axis][device]) for axis in axes})
            pieces.append([(low, high) for _, low, high in window.parts(self.shape[dim], start)])
        most = max(map(len, pieces))
        padded = numpy.array([[*found, *[(0, 0)] * (most - len(found))] for found in pieces]).reshape(count, most, 2)
        return [(padded[:, number, 0], padded[:, number, 1]) for number in range(most)]

    def _span(self, dim: int, axes: tuple[int, ...], blocks: Mapping[int, int]) -> Spans:
        block = blocks.get(dim, 1)
        key = (dim, axes, block)
        if key not in self._spans:
            tile = self.shape[dim]
            start = numpy.zeros(self._at.shape[1], dtype=numpy.int64)
            extent = start + tile
            tile = tile if block == 1 else whole_blocks(tile, self.devices(axes), block)
            for axis in axes:
                tile = -(-tile // self.sizes[axis])
                start = start + self._at[axis] * tile
                extent = numpy.clip(extent - self._at[axis] * tile, 0, tile)
            self._spans[key] = (start, start + extent)
        return self._spans[key]


@lru_cache(maxsize=64)
def boxes_of(
    mesh: Mesh, shape: tuple[int, ...], windows: Windows = (), before: Blocks = (), wanted: Blocks = ()
) -> Boxes:
    """The Boxes of these, made once."""
    return Boxes(mesh, shape, windows, before, wanted)


@lru_cache(maxsize=1 << 14)
def axes_on(state: State, dim: int) -> tuple[int, ...]:
    """The axes that split `dim`, major first."""
    found = [(place // ORDER, axis) for axis, place in enumerate(state) if place >= 0 and place % ORDER == dim]
    return tuple([axis for _, axis in sorted(found)])


def place_of(dim: int, minor: int) -> int:
    """The number of an axis that splits a dim, as in Shard."""
    return dim + minor * ORDER


def dim_at(place: int) -> int:
    """The dim of a place; WHOLE and PARTIAL stay."""
    return place % ORDER if place >= 0 else place
