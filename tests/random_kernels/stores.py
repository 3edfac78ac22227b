"""Random ways for tiles to leave a kernel: copies, stores by element, atomics, updates of what the output holds."""

from __future__ import annotations

from .loops import Loops
from .scene import Axis, Dim, Tile
from .spec import Param
from .statements import combine


class Stores(Loops):
    """Emits stores to outputs. No two programs of the grid store different values to one element without an atomic."""

    def store(self, tile: Tile) -> None:
        """Write a tile to an output: a new one, or now and then once more to one that such a tile went to."""
        scene = self.scene
        if tile.home and scene.chance(90):
            scene.emit(f"T.copy({tile.name}, {tile.home}[{self._starts(tile)}])")
            return
        missing = [a for a in scene.grid_axes if a not in tile.axes]
        if missing and any(a.dim.blocks > 1 for a in missing):
            if self._is_float16(tile) or not scene.chance(70):
                self._by_one_program(tile, missing)
            else:
                self._atomic(tile)
            return
        ways = [
            self._copy,
            self._copy,
            self._elements_out,
            self._elements_out,
            self._in_place,
            self._atomic,
            self._scatter,
        ]
        scene.pick(ways)(tile)

    def split_reduction(self) -> None:
        """Every program reduces its block of a dim, and adds it to an output atomically."""
        scene = self.scene
        axis = scene.pick(scene.grid_axes)
        rest = [a for a in scene.axes() if a.dim is not axis.dim]
        tile = self.load((*scene.some(rest, 0, 1), axis))
        if scene.chance(50):
            self.modify(tile)
        op = scene.pick(("sum", "sum", "max", "min"))
        self._atomic(self.reduce(tile, axis, op), {"sum": "add"}.get(op, op))

    def _is_float16(self, tile: Tile) -> bool:
        return tile.dtype == "float16"

    def _dims(self, tile: Tile) -> tuple[Dim, ...]:
        return tuple(a.dim for a in tile.axes) or (Dim("one", 1, 1),)

    def _output(self, tile: Tile, role: str, *, narrow: bool = False) -> Param:
        scene = self.scene
        half = narrow and scene.dtype == "float32" and scene.chance(20)
        param = scene.new_param(self._dims(tile), role, "float16" if half else scene.dtype)
        if half:
            self._shrink(tile, 1000.0)
        return param

    def _shrink(self, tile: Tile, largest: float) -> None:
        """What goes to float16 has to fit."""
        names = self.names(tile.axes)
        here = self.expressions(names)
        if self.bounds.get(tile, 3.0) > largest:
            self._assign(tile, tile.axes, names, here.small(here.tile(tile), 1.0))

    def _starts(self, tile: Tile) -> str:
        return ", ".join(a.start for a in tile.axes) or "0"

    def _covers(self, tile: Tile) -> bool:
        """Whether a store here certainly writes the whole output."""
        return not self.scene.depth + self.scene.guarded

    def _copy(self, tile: Tile) -> None:
        param = self._output(tile, "out" if self._covers(tile) else "inout", narrow=True)
        self.scene.emit(f"T.copy({tile.name}, {param.name}[{self._starts(tile)}])")
        if self.scene.chance(12) and param.dtype == tile.dtype and tile.axes:
            self._again(tile, param)

    def _again(self, tile: Tile, param: Param) -> None:
        """Read the output back, or write to it once more."""
        scene = self.scene
        if scene.chance(50):
            scene.emit(f"T.copy({param.name}[{self._starts(tile)}], {tile.name})")
        else:
            self._guarded(tile, param, self.names(tile.axes), condition=True)

    def _elements_out(self, tile: Tile) -> None:
        """Stores of an expression by element, maybe transposed, reversed, or only where a condition holds."""
        scene = self.scene
        condition = scene.chance(25)
        role = "out" if self._covers(tile) and not condition else "inout"
        turned = len(tile.axes) > 1 and scene.chance(20)
        axes = tile.axes[::-1] if turned else tile.axes
        param = self._output(Tile(tile.name, axes, tile.dtype, tile.scope), role)
        self._guarded(tile, param, self.names(tile.axes), condition=condition, order=axes)

    def _guarded(
        self, tile: Tile, param: Param, names: dict[Axis, str], *, condition: bool, order: tuple[Axis, ...] = ()
    ) -> None:
        scene = self.scene
        order = order or tile.axes
        here = self.expressions(names)
        value = here.value(1, must=tile)
        indices, inside = [], []
        for axis in order:
            at = axis.at(names[axis])
            if axis.dim.size % axis.length or scene.chance(10):
                inside.append(f"{at} < {axis.dim.size}")
            indices.append(
                f"{axis.dim.size - 1} - ({at})" if inside and axis in order and self._turn(axis, inside) else at
            )
        conditions = [*inside, *([here.test()] if condition else [])]
        text = (
            value.text if param.dtype == scene.dtype else f'T.cast({here.small(value, 1000.0).text}, "{param.dtype}")'
        )
        headers = self.nest(tile.axes, names) + ([f"if {' and '.join(conditions)}"] if conditions else [])
        with scene.block(*headers):
            scene.emit(*here.lets, f"{param.name}[{', '.join(indices) or '0'}] = {text}")

    def _turn(self, axis: Axis, inside: list[str]) -> bool:
        """Whether to store a dim from its end; only where a test keeps the index inside."""
        tested = any(test.endswith(f"< {axis.dim.size}") for test in inside[-1:])
        return tested and self.scene.chance(10)

    def _in_place(self, tile: Tile) -> None:
        """Update what an output holds already."""
        scene = self.scene
        param = self._output(tile, "inout")
        names = self.names(tile.axes)
        indices = [a.at(names[a]) for a in tile.axes] or ["0"]
        target = f"{param.name}[{', '.join(indices)}]"
        inside = [f"{a.at(names[a])} < {a.dim.size}" for a in tile.axes if a.dim.size % a.length or a.loose]
        here = self.expressions(names)
        value = here.small(here.value(1, must=tile), 1000.0)
        kind = scene.pick(("sum", "max", "other"))
        text = f"{target} = {value.text} - {target}" if kind == "other" else combine(target, value.text, kind)
        with scene.block(*self.nest(tile.axes, names), *([f"if {' and '.join(inside)}"] if inside else [])):
            scene.emit(*here.lets, text)

    def _atomic(self, tile: Tile, op: str = "") -> None:
        scene = self.scene
        self._shrink(tile, 1000.0)
        param = self._output(tile, "inout")
        op = op or scene.pick(("add", "add", "max", "min"))
        if op == "add" and tile.dtype == scene.dtype and tile.axes and scene.chance(50):
            scene.emit(f"T.atomic_add({param.name}[{self._starts(tile)}], {tile.name})")
            return
        names = self.names(tile.axes)
        indices = [a.at(names[a]) for a in tile.axes] or ["0"]
        inside = [f"{a.at(names[a])} < {a.dim.size}" for a in tile.axes if a.dim.size % a.length or a.loose]
        value = self.expressions(names).tile(tile)
        with scene.block(*self.nest(tile.axes, names), *([f"if {' and '.join(inside)}"] if inside else [])):
            scene.emit(f"T.atomic_{op}({param.name}[{', '.join(indices)}], {value.text})")

    def _scatter(self, tile: Tile) -> None:
        """Add rows to where an index buffer says."""
        if not tile.axes or not self.scene.chance(40):
            self._copy(tile)
            return
        scene = self.scene
        self._shrink(tile, 1000.0)
        param = self._output(tile, "inout")
        names = self.names(tile.axes)
        here = self.expressions(names)
        first, *rest = tile.axes
        at = first.at(names[first])
        indices = [f"{here.ids(first.dim).name}[{at}]", *(a.at(names[a]) for a in rest)]
        inside = [f"{a.at(names[a])} < {a.dim.size}" for a in tile.axes if a.dim.size % a.length or a.loose]
        value = here.tile(tile)
        with scene.block(*self.nest(tile.axes, names), *([f"if {' and '.join(inside)}"] if inside else [])):
            scene.emit(f"T.atomic_add({param.name}[{', '.join(indices)}], {value.text})")

    def _spread(self, tile: Tile) -> None:
        """Store to every second position of an output, or some way behind its start."""
        if not tile.axes:
            self._copy(tile)
            return
        scene = self.scene
        first, *rest = tile.axes
        step, behind = scene.pick(((2, 0), (2, 1), (1, 3)))
        wide = Dim("wide", first.dim.size * step + behind, 1)
        param = scene.new_param((wide, *(a.dim for a in rest)), "inout")
        names = self.names(tile.axes)
        at = first.at(names[first])
        place = f"({at}) * {step} + {behind}" if step > 1 else f"{at} + {behind}"
        inside = [f"{a.at(names[a])} < {a.dim.size}" for a in tile.axes if a.dim.size % a.length or a.loose]
        here = self.expressions(names)
        value = here.tile(tile)
        indices = [place, *(a.at(names[a]) for a in rest)]
        with scene.block(*self.nest(tile.axes, names), *([f"if {' and '.join(inside)}"] if inside else [])):
            scene.emit(f"{param.name}[{', '.join(indices)}] = {value.text}")

    def add_directly(self, axis: Axis) -> None:
        """Combine into an output, element by element, inside a loop."""
        scene = self.scene
        missing = [a for a in scene.grid_axes if a not in scene.open]
        others = scene.some([a for a in scene.axes() if a.dim is not axis.dim and a not in scene.grid_axes], 0, 1)
        axes = [*(a for a in scene.grid_axes if a is not axis), *others]
        if missing or axis in scene.grid_axes:
            return
        param = scene.new_param(tuple(a.dim for a in axes) or (Dim("one", 1, 1),), "inout")
        names = self.names([*axes, axis])
        here = self.expressions(names)
        value = here.small(here.value(1), 1000.0)
        inside = [f"{a.at(names[a])} < {a.dim.size}" for a in [*axes, axis] if a.dim.size % a.length or a.loose]
        target = f"{param.name}[{', '.join(a.at(names[a]) for a in axes) or '0'}]"
        headers = self.nest([*axes, axis], names, serial=(axis,))
        with scene.block(*headers, *([f"if {' and '.join(inside)}"] if inside else [])):
            scene.emit(*here.lets, combine(target, value.text, scene.pick(("sum", "sum", "max", "min"))))

    def _by_one_program(self, tile: Tile, missing: list[Axis]) -> None:
        """Only one of the programs that have the tile stores it."""
        scene = self.scene
        which = " and ".join(f"{a.var} == {scene.pick((0, a.dim.blocks - 1))}" for a in missing)
        param = self._output(tile, "out" if self._covers(tile) else "inout")
        with scene.block(f"if {which}"):
            scene.emit(f"T.copy({tile.name}, {param.name}[{self._starts(tile)}])")
