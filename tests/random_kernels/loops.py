"""Random loops over blocks of a dim, with what they accumulate."""

from __future__ import annotations

import math

from .scene import Axis, Dim, Tile
from .statements import Statements, combine


class Loops(Statements):
    """Emits serial loops over blocks."""

    def walk(self, dim: Dim) -> list[Tile]:
        """A loop over the blocks of `dim` that adds to one or two accumulators, and may do more on the way; returns
        them."""
        scene = self.scene
        axis, headers = self._axis(dim)
        may_not_run = "T.min(" in headers[0]
        pending = [self._accumulator(axis) for _ in range(1 + scene.chance(25))]
        accumulators = [tile for _, tile, _, _ in pending]
        before = list(scene.tiles)
        scene.open.append(axis)
        scene.building += accumulators
        scene.depth += 1
        with scene.block(*headers):
            self._body(axis, pending)
        scene.depth -= 1
        scene.open.remove(axis)
        scene.building = [tile for tile in scene.building if tile not in accumulators]
        for tile in list(scene.tiles):
            kept = tile in before or (not may_not_run and not scene.plain and scene.chance(10))
            stale = axis in tile.axes or not kept
            if stale:
                scene.drop(tile)
        return accumulators

    def _axis(self, dim: Dim) -> tuple[Axis, list[str]]:
        """The axis of a loop's blocks, and the loop's header; two of them, where it takes two blocks per step."""
        scene = self.scene
        var = scene.name("ko")
        block, blocks = dim.block, dim.blocks
        base = var if block == 1 else f"{var} * {block}"
        kind = scene.pick(
            ("serial",) * 6 + ("pipelined",) * 2 + ("reversed", "shuffled", "peeled", "halves", "triangle")
        )
        if kind == "reversed" and blocks > 1:
            return Axis(dim, block, f"({blocks - 1} - {var}) * {block}", var), [f"for {var} in T.serial({blocks})"]
        if kind == "shuffled" and blocks > 1:
            step = scene.pick([n for n in range(1, blocks + 1) if math.gcd(n, blocks) == 1])
            place = f"({var} * {step} + {scene.number(0, blocks - 1)}) % {blocks}"
            return Axis(dim, block, f"{place} * {block}", var), [f"for {var} in T.serial({blocks})"]
        if kind == "peeled" and blocks > 1 and scene.chance(60):
            return Axis(dim, block, base, var), [f"for {var} in T.serial(1, {blocks})"]
        if kind == "halves" and blocks > 1:
            inner = f"{var}h"
            both = f"({var} * 2 + {inner})"
            headers = [
                f"for {var} in T.serial({-(-blocks // 2)})",
                f"for {inner} in {scene.pick(('T.unroll', 'T.serial'))}(2)",
            ]
            return Axis(dim, block, f"{both} * {block}", both, loose=blocks % 2 == 1), headers
        count = f"T.ceildiv({dim.size}, {block})" if scene.chance(50) else str(blocks)
        if kind == "triangle" and scene.open and blocks > 1:
            outer = scene.pick(scene.open).var
            count = scene.pick((f"T.min({outer} + 1, {blocks})", f"T.min({outer}, {blocks})"))
        if kind == "pipelined":
            return Axis(dim, block, base, var), [f"for {var} in T.Pipelined({count}, num_stages=2)"]
        return Axis(dim, block, base, var), [f"for {var} in T.serial({count})"]

    # -- accumulators ----------------------------------------------------------------------------------------------

    def _accumulator(self, axis: Axis) -> tuple[str, Tile, str, tuple[Axis, ...]]:
        """Start an accumulator; returns how it is updated, itself, its operation, and axes that the way needs."""
        scene = self.scene
        ways = ["reduce", "reduce", "reduce", "elements", "elements", "lanes", "gemm", "gemm", "blocks", "blocks"]
        ways += ["slices"] if axis.dim.size % axis.length == 0 and not axis.loose else []
        if not scene.plain:
            ways += ["count", "carry", "best", "rescale"]
        way = scene.pick(ways)
        op = scene.pick(("sum", "sum", "max", "min", "prod"))
        if way in ("gemm", "count", "carry", "best", "rescale"):
            op = "sum"
        if way == "reduce" and op == "prod":
            op = "sum"
        extra: tuple[Axis, ...] = ()
        if way == "gemm":
            axes = tuple(scene.some([a for a in scene.axes() if a.dim is not axis.dim], 2, 2))
            if len(axes) < 2:
                way, axes = "reduce", self.choose_axes(0, 1)
        elif way == "slices":
            axes = (*self.choose_axes(0, 1), scene.whole(axis.dim))
            axes = tuple(dict.fromkeys(axes))
        elif way == "lanes":
            lane = Axis(Dim("lane", axis.length, axis.length), axis.length)
            extra = (lane,)
            axes = (*self.choose_axes(0, 1), lane)
        else:
            axes = self.choose_axes(0, 2 if way in ("elements", "carry") else 1)
        known = [t for t in scene.tiles if t.axes == axes and t.dtype == scene.dtype and t not in scene.building]
        if known and not extra and scene.chance(25):
            return way, scene.pick(known), op, extra
        tile = scene.new_tile(axes, "fragment", scene.dtype)
        self.start(tile, op)
        return way, tile, op, extra

    def _body(self, axis: Axis, pending: list) -> None:
        scene = self.scene
        for _ in range(scene.number(0, 1)):
            tile = self.load(self.choose_axes(1, 2, include=(axis,)))
            if scene.chance(40):
                self.modify(tile)
        if scene.chance(6):
            self.add_directly(axis)
        for way, accumulator, op, extra in pending:
            getattr(self, f"_{way}")(axis, accumulator, op, *extra)
        if scene.depth < 2 and scene.chance(12):
            others = [d for d in scene.dims if d is not axis.dim]
            if others:
                self.walk(scene.pick(others))
        if scene.chance(20):
            usable = [t for t in scene.tiles if axis in t.axes] if scene.plain else scene.tiles
            if usable:
                self.modify(scene.pick(usable))

    def add_directly(self, axis: Axis) -> None:
        """What stores.py adds to loops."""
        raise NotImplementedError

    def _times(self, axis: Axis) -> int:
        return axis.dim.blocks * axis.length

    def _reduce(self, axis: Axis, accumulator: Tile, op: str) -> None:
        scene = self.scene
        tile = self._tile_with((*accumulator.axes, axis))
        self.contribution(tile, op, self._times(axis))
        if axis.dim.size % axis.length and scene.chance(80 if scene.plain else 50):
            self.mask(tile, axis, op)
        if tile.dtype == accumulator.dtype:
            self.emit_reduce(tile, axis, accumulator, op, clear=False)
        else:
            self.update(accumulator, axis, op, tile)
        self.grow(accumulator, tile, op, self._times(axis))
        if scene.chance(10) and axis in tile.axes:
            self.modify(tile)

    def _tile_with(self, axes: tuple[Axis, ...]) -> Tile:
        """A tile with just these axes, in this order or another."""
        scene = self.scene
        known = [t for t in scene.tiles if set(t.axes) == set(axes) and t not in scene.building]
        if known and scene.chance(50):
            return scene.pick(known)
        position = scene.number(0, len(axes) - 1)
        ordered = [*axes[:-1]]
        ordered.insert(len(ordered) - position, axes[-1])
        tile = self.load(tuple(ordered))
        if scene.chance(50):
            self.modify(tile)
        return tile

    def _elements(self, axis: Axis, accumulator: Tile, op: str) -> None:
        bound = self.update(accumulator, axis, op)
        times = self._times(axis)
        factor = {"sum": bound * times, "prod": 2.0 ** min(times, 1000)}.get(op, bound)
        self.bounds[accumulator] = self.bounds.get(accumulator, 1.0) + factor

    def _lanes(self, axis: Axis, accumulator: Tile, op: str, lane: Axis) -> None:
        scene = self.scene
        plain = [a for a in accumulator.axes if a is not lane]
        names = self.names([*plain, axis])
        here = self.expressions(names, accumulator)
        value = self._fit(here, here.value(1), op)
        target = accumulator.element({**names, lane: names[axis]})
        with scene.block(*self.nest([*plain, axis], names)):
            scene.emit(*here.lets, combine(target, value.text, op))
        times = axis.dim.blocks
        factor = {"sum": value.bound * times, "prod": 2.0 ** min(times, 1000)}.get(op, value.bound)
        self.bounds[accumulator] = self.bounds.get(accumulator, 1.0) + factor

    def _slices(self, axis: Axis, accumulator: Tile, op: str) -> None:
        """Each block goes to its own part of a tile that holds the whole dim."""
        scene = self.scene
        rest = tuple(a for a in accumulator.axes if a is not scene.whole(axis.dim) and a is not axis)
        part = tuple(axis if a is scene.whole(axis.dim) else a for a in accumulator.axes)
        if scene.chance(30):
            param = scene.input(tuple(a.dim for a in part))
            if param.dtype == accumulator.dtype:
                source = ", ".join(f"{a.start}:{a.start} + {a.length}" for a in part)
                target = ", ".join(
                    f"{axis.start}:{axis.start} + {axis.length}" if a is axis else f"0:{a.length}" for a in part
                )
                scene.emit(f"T.copy({param.name}[{source}], {accumulator.name}[{target}])")
                return
        names = self.names([*rest, axis])
        here = self.expressions(names, accumulator)
        value = here.value(1)
        with scene.block(*self.nest([*rest, axis], names)):
            scene.emit(*here.lets, f"{accumulator.element(names)} = {value.text}")
        self.bounds[accumulator] = max(value.bound, self.bounds.get(accumulator, 1.0))

    def _gemm(self, axis: Axis, accumulator: Tile, op: str) -> None:
        scene = self.scene
        m, n = accumulator.axes
        transposed = [scene.chance(30), scene.chance(30)]
        a = self.operand((axis, m) if transposed[0] else (m, axis))
        b = self.operand((n, axis) if transposed[1] else (axis, n))
        flags = ["transpose_A=True"] * transposed[0] + ["transpose_B=True"] * transposed[1]
        scene.emit(f"T.gemm({', '.join([a.name, b.name, accumulator.name, *flags])})")
        product = self.bounds.get(a, 3.0) * self.bounds.get(b, 3.0) * self._times(axis)
        self.bounds[accumulator] = self.bounds.get(accumulator, 1.0) + product

    def _blocks(self, axis: Axis, accumulator: Tile, op: str) -> None:
        """Reduce each block on its own, then combine the blocks."""
        scene = self.scene
        tile = self._tile_with((*accumulator.axes, axis))
        inner = op if scene.plain else scene.pick((op, op, "max", "sum"))
        part = self.reduce(tile, axis, "sum" if inner == "prod" else inner)
        names = self.names(accumulator.axes)
        here = self.expressions(names, accumulator)
        value = self._fit(here, here.value(1, must=part) if scene.chance(30) else here.tile(part), op)
        with scene.block(*self.nest(accumulator.axes, names)):
            scene.emit(*here.lets, combine(accumulator.element(names), value.text, op))
        times = axis.dim.blocks
        factor = {"sum": value.bound * times, "prod": 2.0 ** min(times, 1000)}.get(op, value.bound)
        self.bounds[accumulator] = self.bounds.get(accumulator, 1.0) + factor

    def _count(self, axis: Axis, accumulator: Tile, op: str) -> None:
        """Something that depends on how often the loop runs."""
        scene = self.scene
        names = self.names(accumulator.axes)
        here = self.expressions(names, accumulator)
        value = here.small(here.value(scene.number(0, 1)), 100.0)
        headers = self.nest(accumulator.axes, names)
        if scene.chance(30):
            headers.insert(0, f"if {here.block_condition()}")
        with scene.block(*headers):
            scene.emit(*here.lets, combine(accumulator.element(names), value.text, "sum"))
        self.bounds[accumulator] = self.bounds.get(accumulator, 1.0) + 100.0 * axis.dim.blocks

    def _best(self, axis: Axis, accumulator: Tile, op: str) -> None:
        """Where a value is the largest so far: keep something else that belongs to it."""
        scene = self.scene
        rest = accumulator.axes
        top = scene.new_tile(rest, "fragment", scene.dtype)
        names = self.names([*rest, axis])
        here = self.expressions(names, accumulator, top)
        here.lets.clear()
        kept, value = here.value(0), here.value(1)
        largest, chosen = top.element(names), accumulator.element(names)
        plain = self.names(rest)
        at = len(scene.lines)
        with scene.block(*self.nest(rest, plain)):
            scene.emit(f"{top.element(plain)} = {here.constant(-4)}")
        if scene.chance(75):  # once before the loop, not in every block
            scene.outer_lines[-1].extend(scene.lines[at:])
            del scene.lines[at:]
        with scene.block(*self.nest([*rest, axis], names, serial=(axis,))):
            scene.emit(*here.lets)
            with scene.block(f"if {value.text} > {largest}"):
                scene.emit(f"{largest} = {value.text}", f"{chosen} = {kept.text}")
        self.bounds[accumulator] = max(kept.bound, self.bounds.get(accumulator, 1.0))
        self.bounds[top] = max(4.0, value.bound)

    def _rescale(self, axis: Axis, accumulator: Tile, op: str) -> None:
        """A sum that starts anew whenever the maximum so far grows, as an online softmax scales its."""
        scene = self.scene
        tile = self._tile_with((*accumulator.axes, axis))
        self.contribution(tile, "sum", self._times(axis))
        top, part = self.reduce(tile, axis, "max"), self.reduce(tile, axis, "sum")
        names = self.names(accumulator.axes)
        total = accumulator.element(names)
        here = self.expressions(names)
        limit = here.constant(scene.pick((1, 2, 3)))
        anew = f"{top.element(names)} > {limit}"
        with scene.block(*self.nest(accumulator.axes, names)):
            scene.emit(f"{total} = T.if_then_else({anew}, {part.element(names)}, {total} + {part.element(names)})")
        self.bounds[accumulator] = self.bounds.get(accumulator, 1.0) + self.bounds[part] * axis.dim.blocks

    def _carry(self, axis: Axis, accumulator: Tile, op: str) -> None:
        """A value that goes from one position to the next, and may be kept for each of them."""
        scene = self.scene
        axes = [*accumulator.axes, axis]
        keep = scene.new_tile(tuple(axes), "", scene.dtype) if scene.chance(50) else None
        names = self.names(axes)
        hidden = (accumulator,) if keep is None else (accumulator, keep)
        here = self.expressions(names, *hidden)
        value, state = here.small(here.value(1), 100.0), accumulator.element(names)
        zero = here.constant(0)
        step = scene.pick(
            (
                f"{state} + {value.text}",
                f"{value.text} - {state}",
                f"T.max({state} + {value.text}, {zero})",
                f"T.if_then_else({state} > {here.constant(3)}, {value.text}, {state} + {value.text})",
            )
        )
        self.bounds[accumulator] = self.bounds.get(accumulator, 1.0) + value.bound * self._times(axis)
        with scene.block(*self.nest(axes, names, serial=(axis,))):
            scene.emit(*here.lets, f"{state} = {step}")
            if keep is not None:
                scene.emit(f"{keep.element(names)} = {state}")
        if keep is not None:
            self.bounds[keep] = self.bounds[accumulator]
