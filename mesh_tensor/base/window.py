"""Windows: tiles of a dim that overlap, as what reads a bounded neighbourhood of its own tile of another dim needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class Window:
    """Of a dim, every device has `length` elements, from `stride * o // per + first` on, where o is where its tile of
    another dim starts: one of `size` elements, which the axes that split this dim split as well. What lies outside the
    tensor is neutral for `outside` (a sum: 0); with `wraps`, it is what comes in from the other end.

    >>> window = Window(size=8, stride=1, first=-1, length=6)  # two devices, each with 4 elements and their neighbours
    >>> window.start([("x", 2)], {"x": 1}), window.box(8, 3)
    (3, (3, 8))
    """

    size: int
    stride: int
    first: int
    length: int
    wraps: bool = False
    per: int = 1
    outside: str = "sum"

    def start(self, axes: Sequence[tuple[str, int]], at: Mapping[str, int]) -> int:
        """Where the window of the device at `at` starts: before the tensor, if that is negative. `axes` split the dim,
        major first, with their sizes."""
        tile, offset = self.size, 0
        for axis, parts in axes:
            tile = -(-tile // parts)
            offset += at[axis] * tile
        return self.stride * offset // self.per + self.first

    def box(self, size: int, start: int) -> tuple[int, int]:
        """Which elements of a dim of `size` a window from `start` on has, of those that lie in the tensor."""
        low = min(max(start, 0), size)
        return low, max(low, min(start + self.length, size))

    def parts(self, size: int, start: int) -> list[tuple[int, int, int]]:
        """What a window from `start` on is made of: where in it, and which elements of the dim (from, to)."""
        if not self.wraps:
            low, high = self.box(size, start)
            return [(low - start, low, high)] if low < high else []
        found, at = [], 0
        while at < self.length and size:
            low = (start + at) % size
            high = min(size, low + self.length - at)
            found.append((at, low, high))
            at += high - low
        return found


def windows_text(windows: Sequence[tuple[int, Window]]) -> str:
    """Windows, by dim, as part of a layout's text: their fields, but for those at the end that have their defaults."""
    return "".join(f"; W[{dim}]{_stated(window)}" for dim, window in windows)


def _stated(window: Window) -> tuple:
    stated, left_out = astuple(window), astuple(Window(0, 1, 0, 1))
    count = next(n for n in range(len(stated), 0, -1) if n == 4 or stated[n - 1] != left_out[n - 1])
    return stated[:count]


def parse_windows(texts: Sequence[str], read: Callable[[str], tuple]) -> list[tuple[int, Window]]:
    """The windows that `windows_text` wrote, each without its `; `; `read` is for what is in brackets."""
    found = []
    for text in texts:
        dim, _, values = text.strip().removeprefix("W[").partition("]")
        found.append((int(dim), Window(*read(values))))
    return found


def parse_blocks(texts: Sequence[str]) -> list[tuple[int, int]]:
    """The dims of whole blocks, (dim, block), that a layout's text has, each without its `; `."""
    found = [text.strip().removeprefix("B[").partition("]") for text in texts]
    return [(int(dim), int(block)) for dim, _, block in found]


@dataclass(frozen=True)
class Reach:
    """How far something reads from where it is: at positions 0, `block`, 2 * `block`, ... p of a factor, elements from
    `stride * p / per + low` to `stride * p / per + high` of a dim, both included."""

    low: int
    high: int
    block: int = 1


#: In place of a factor: wherever something is, it reads the same.
EVERYWHERE = ""


@dataclass(frozen=True)
class Reaches:
    """All that something reads of a dim of `extent` elements, from where it is in `factor`. `always`: it has to have a
    window even where that is as long as the dim. With the factor EVERYWHERE all devices read the same."""

    factor: str
    extent: int
    stride: int
    per: int
    reaches: tuple[Reach, ...]
    wraps: bool = False
    always: bool = False
    outside: str = "sum"

    def along_first(self, factor: str, minor: int) -> Reaches | None:
        """The same from the factor's first atom, called `factor`, each of whose elements is `minor` of its own; None
        where that is not known."""
        if self.per != 1 or any(reach.block != 1 for reach in self.reaches):
            return None
        span = self.stride * (minor - 1)
        reaches = tuple([Reach(r.low + min(span, 0), r.high + max(span, 0)) for r in self.reaches])
        return replace(self, factor=factor, stride=self.stride * minor, reaches=reaches)

    @property
    def margin(self) -> int:
        """How many elements are read from one position."""
        return max(reach.high for reach in self.reaches) - min(reach.low for reach in self.reaches) + 1

    @lru_cache(maxsize=4096)  # noqa: B019  (few are made, and they are small)
    def lacking(self, size: int, parts: int) -> int:
        """The most elements that a device lacks of what it reads, where the dim and the factor's `size` are split into
        so many parts."""
        window, tile = self.window(size, [parts]), -(-self.extent // parts)
        if window is None:
            return 0
        lacks = [0]
        for device in range(parts):
            pieces = window.parts(self.extent, window.start([("", parts)], {"": device}))
            own = device * tile, (device + 1) * tile
            lacks.append(sum(high - low - max(0, min(high, own[1]) - max(low, own[0])) for _, low, high in pieces))
        return max(lacks)

    def window(self, size: int, parts: Sequence[int]) -> Window | None:
        """What a device reads whose tile is one of `parts` (nested: of every axis) of the factor's `size`; None if that
        is as long as the dim."""
        tile, starts_between = size, False
        for count in parts:
            tile = -(-tile // count)
            starts_between |= self.stride * tile % self.per != 0
        ends = [self.stride * (-(-tile // r.block) - 1) * r.block // self.per for r in self.reaches]
        first = min(r.low + min(end, 0) for r, end in zip(self.reaches, ends, strict=True))
        last = max(r.high + max(end, 0) for r, end in zip(self.reaches, ends, strict=True))
        length = max(1, last - first + 1 + starts_between)
        fits = self.always or length < self.extent
        return Window(size, self.stride, first, length, self.wraps, self.per, self.outside) if fits else None
