"""What a random kernel is made of while it is being drawn: dims, the loops that walk them, tiles, parameters, lines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from .spec import Block, Line, OnChip, Param
from .writer import Dice


@dataclass(eq=False)
class Dim:
    """A logical dim: parameters that have it share its size. `block` is how its loops walk it."""

    name: str
    size: int
    block: int

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)


@dataclass(eq=False)
class Axis:
    """What one dim of a tile stands for: a block of a dim at `base`, as long as the loop `var` is open, or the whole
    dim (`var` is empty, `base` is "")."""

    dim: Dim
    length: int
    base: str = ""
    var: str = ""
    loose: bool = False

    def at(self, element: str) -> str:
        """The coordinate of an element."""
        if self.length == 1 and element == "0":
            return self.base or "0"
        return f"{self.base} + {element}" if self.base else element

    @property
    def start(self) -> str:
        return self.base or "0"


@dataclass(eq=False)
class Tile:
    """An on-chip buffer with what its dims stand for. No axes: one element. `home` is the output that it was loaded
    from."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    scope: str
    home: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.length for axis in self.axes) or (1,)

    def element(self, names: dict[Axis, str]) -> str:
        return f"{self.name}[{', '.join(spot(axis, names) for axis in self.axes) or '0'}]"


def spot(axis: Axis, names: dict[Axis, str]) -> str:
    """Where an axis is at the position that `names` tells; a whole dim may be at the coordinate of a loop's block."""
    if axis in names:
        return names[axis]
    walk = next(a for a in names if walks(a, axis))
    return walk.at(names[walk])


def walks(loop: Axis, axis: Axis) -> bool:
    """Whether the blocks of a loop lie in a whole dim."""
    return (
        bool(loop.var) and not axis.var and loop.dim is axis.dim and loop.dim.size % loop.length == 0 and not loop.loose
    )


@dataclass(eq=False)
class Scene(Dice):
    """Everything drawn so far. `tiles` are those that hold something that counts here; `open` are the axes of the grid
    and of the loops around. In a `plain` kernel loops do nothing but accumulate, so that most of its dims can be split;
    `building` are the accumulators of the loops around, `depth` counts those loops and `guarded` the branches
    around."""

    random: Random
    dtype: str = "float32"
    dims: list[Dim] = field(default_factory=list)
    grid: list[tuple[str, int]] = field(default_factory=list)
    grid_axes: list[Axis] = field(default_factory=list)
    open: list[Axis] = field(default_factory=list)
    wholes: dict[Dim, Axis] = field(default_factory=dict)
    params: dict[str, tuple[Param, tuple[Dim, ...]]] = field(default_factory=dict)
    tiles: list[Tile] = field(default_factory=list)
    buffers: list[OnChip] = field(default_factory=list)
    unused: list[OnChip] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    outer_lines: list[list[Line]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    building: list[Tile] = field(default_factory=list)
    exact: bool = True
    plain: bool = False
    depth: int = 0
    guarded: int = 0

    # -- drawing ---------------------------------------------------------------------------------------------------

    def some(self, options: Sequence, least: int, most: int) -> list:
        """Between `least` and `most` different ones of `options`, in any order."""
        rest, found = list(options), []
        for _ in range(self.number(least, max(least, min(most, len(rest))))):
            if rest:
                found.append(rest.pop(self.number(0, len(rest) - 1)))
        return found

    # -- names and lines -------------------------------------------------------------------------------------------

    def name(self, stem: str) -> str:
        count = self.counters[stem] = self.counters.get(stem, -1) + 1
        return f"{stem}{count}" if count or stem in ("t", "g") else stem

    def emit(self, *lines: str) -> None:
        self.lines.extend(lines)

    @contextmanager
    def block(self, *headers: str):
        """What is emitted inside stands below these headers, nested."""
        self.outer_lines.append(self.lines)
        self.lines = []
        try:
            yield
        finally:
            body, self.lines = self.lines, self.outer_lines.pop()
            for header in reversed(headers):
                body = [Block(header, tuple(body))]
            self.lines.extend(body)

    # -- buffers ---------------------------------------------------------------------------------------------------

    def whole(self, dim: Dim) -> Axis:
        """The axis of a whole dim: exactly it, or as many whole blocks as it takes."""
        if dim not in self.wholes:
            length = dim.blocks * dim.block if self.chance(10) else dim.size
            self.wholes[dim] = Axis(dim, length)
        return self.wholes[dim]

    def axes(self) -> list[Axis]:
        """The axes that a tile can have here."""
        return [*self.open, *(self.whole(dim) for dim in self.dims)]

    def new_tile(self, axes: tuple[Axis, ...], scope: str = "", dtype: str = "") -> Tile:
        """A tile, in a buffer of its own or in one whose content counts no more."""
        dtype = dtype or ("float16" if self.dtype == "float32" and self.chance(4) else self.dtype)
        scope = scope or self.pick(("fragment", "shared"))
        self.exact = self.exact and dtype != "float16"
        shape = tuple(axis.length for axis in axes) or (1,)
        fits = [b for b in self.unused if (b.shape, b.dtype, b.scope) == (shape, dtype, scope)]
        if fits and self.chance(50):
            buffer = fits[0]
            self.unused.remove(buffer)
        else:
            buffer = OnChip(self.name("t"), shape, dtype, scope)
            self.buffers.append(buffer)
        tile = Tile(buffer.name, axes, dtype, scope)
        self.tiles.append(tile)
        return tile

    def drop(self, tile: Tile) -> None:
        """Nothing uses the tile's content any more; its buffer may serve again."""
        self.tiles.remove(tile)
        self.unused += [b for b in self.buffers if b.name == tile.name]

    def new_param(self, dims: tuple[Dim, ...], role: str, dtype: str = "", below: int | None = None) -> Param:
        stem = "ids" if below is not None else "ABDEFGHKLPQR"[sum(p.role == "in" for p, _ in self.params.values()) % 12]
        name = self.name(stem if role == "in" else "Y")
        shape = tuple(d.size for d in dims)
        param = Param(name, shape, dtype or self.dtype, role, below, tuple(d.name for d in dims))
        self.params[name] = (param, dims)
        return param

    def input(self, dims: tuple[Dim, ...]) -> Param:
        """An input with these dims: one that is there, or a new one."""
        known = [
            p
            for p, d in self.params.values()
            if p.role == "in" and p.below is None and [*map(id, d)] == [*map(id, dims)]
        ]
        if known and (len(self.params) > 4 or not self.chance(30)):
            return self.pick(known)
        shape = tuple(d.size for d in dims)
        alike = [p for p, _ in self.params.values() if p.role == "in" and p.below is None and p.shape == shape]
        if alike and self.chance(15):
            return self.pick(alike)
        half = self.dtype == "float32" and self.chance(7)
        return self.new_param(dims, "in", "float16" if half else "")

    def sorted_params(self) -> tuple[Param, ...]:
        """Inputs first, as people write them."""
        return tuple(sorted((p for p, _ in self.params.values()), key=lambda p: p.role != "in"))
