"""Random statements: loads, element-wise work and reductions of tiles. Loops and stores are in loops.py and
stores.py."""

from __future__ import annotations

from collections.abc import Sequence

from .elements import element_loops, element_names
from .expressions import LARGEST, Expressions, Value
from .scene import Axis, Scene, Tile

NEUTRAL = {
    "float16": {"sum": "0.0", "max": '-T.infinity("float16")', "min": 'T.infinity("float16")', "prod": "1.0"},
    "float32": {"sum": "0.0", "max": '-T.infinity("float32")', "min": 'T.infinity("float32")', "prod": "1.0"},
    "int32": {"sum": "0", "max": 'T.min_value("int32")', "min": 'T.max_value("int32")', "prod": "1"},
}


class Statements:
    """Emits statements into a scene. `bounds` are of the values in tiles."""

    def __init__(self, scene: Scene):
        self.scene = scene
        self.bounds: dict[Tile, float] = {}

    def names(self, axes: Sequence[Axis], *, whole: bool = False) -> dict[Axis, str]:
        return element_names(self.scene, axes, whole=whole)

    def nest(self, axes: Sequence[Axis], names: dict[Axis, str], serial: Sequence[Axis] = ()) -> list[str]:
        return element_loops(self.scene, axes, names, serial)

    def expressions(self, names: dict[Axis, str], *hidden: Tile) -> Expressions:
        return Expressions(self.scene, names, self.bounds, hidden)

    # -- tiles -----------------------------------------------------------------------------------------------------

    def choose_axes(self, least: int = 1, most: int = 2, include: Sequence[Axis] = ()) -> tuple[Axis, ...]:
        """Distinct axes for a tile: mostly those of the grid, and maybe others."""
        scene = self.scene
        chosen = list(include)
        room = max(0, most - len(chosen))
        if room and not scene.chance(20):
            chosen += [a for a in scene.grid_axes if a not in chosen][:room]
        for _ in range(scene.number(max(0, least - len(chosen)), max(0, most - len(chosen)))):
            used = [a.dim for a in chosen]
            pool = [a for a in scene.axes() if a not in chosen and (a.dim not in used or scene.chance(10))]
            if pool:
                chosen.append(scene.pick(pool))
        return tuple(scene.some(chosen, len(chosen), len(chosen))) if scene.chance(20) else tuple(chosen)

    def load(self, axes: tuple[Axis, ...] | None = None, scope: str = "") -> Tile:
        """A tile that is filled from an input, by a copy or by element."""
        scene = self.scene
        axes = self.choose_axes() if axes is None else axes
        if not axes or scene.chance(20):
            return self.compute(axes, scope)
        if scene.chance(8):
            return self._load_slice(axes, scope)
        param = scene.input(tuple(a.dim for a in axes))
        narrow = param.dtype == "float16" and scene.chance(40)
        tile = scene.new_tile(axes, scope, param.dtype if narrow else scene.dtype)
        scene.emit(f"T.copy({param.name}[{', '.join(a.start for a in axes)}], {tile.name})")
        self.bounds[tile] = 3.0
        return tile

    def _load_slice(self, axes: tuple[Axis, ...], scope: str) -> Tile:
        """A copy from an input that has one dim more, at one position of it."""
        scene = self.scene
        dim = scene.pick(scene.dims)
        position = scene.pick(["0", str(dim.size - 1), *(a.start for a in scene.open if a.dim is dim)])
        param = scene.new_param((dim, *(a.dim for a in axes)), "in")
        tile = scene.new_tile(axes, scope, scene.dtype)
        scene.emit(f"T.copy({param.name}[{', '.join([position, *(a.start for a in axes)])}], {tile.name})")
        self.bounds[tile] = 3.0
        return tile

    def product(self) -> None:
        """A T.gemm over whole dims, or over blocks of the loops around."""
        scene = self.scene
        axes = scene.some(scene.axes(), 3, 3)
        if len({id(a.dim) for a in axes}) < 3:
            return
        m, n, k = axes
        a, b = self.operand((m, k)), self.operand((k, n))
        result = scene.new_tile((m, n), "fragment", scene.dtype)
        self.start(result, "sum")
        scene.emit(f"T.gemm({a.name}, {b.name}, {result.name})")
        self.bounds[result] = self.bounds[result] + self.bounds[a] * self.bounds[b] * k.length

    def operand(self, axes: tuple[Axis, ...]) -> Tile:
        """A tile in shared memory whose values are small."""
        tile = self.load(axes, "shared")
        if self.scene.chance(30):
            self.modify(tile)
        if self.bounds.get(tile, 3.0) > 50:
            names = self.names(axes)
            here = self.expressions(names)
            self._assign(tile, axes, names, here.small(here.tile(tile), 1.0))
        return tile

    def compute(self, axes: tuple[Axis, ...] | None = None, scope: str = "") -> Tile:
        """A new tile from an expression."""
        scene = self.scene
        axes = self.choose_axes() if axes is None else axes
        names = self.names(axes, whole=True)
        here = self.expressions(names)
        value = here.value()
        tile = scene.new_tile(axes, scope, scene.dtype)
        self._assign(tile, axes, names, value, here.lets)
        return tile

    def mask(self, tile: Tile, axis: Axis, op: str) -> None:
        """Set what lies past a dim's end to the neutral element."""
        names = self.names(tile.axes)
        element = tile.element(names)
        inside = f"{axis.at(names[axis])} < {axis.dim.size}"
        with self.scene.block(*self.nest(tile.axes, names)):
            neutral = NEUTRAL[tile.dtype][op]
            self.scene.emit(f"{element} = T.if_then_else({inside}, {element}, {neutral})")

    def _assign(
        self, tile: Tile, axes: Sequence[Axis], names: dict[Axis, str], value: Value, lets: Sequence[str] = ()
    ) -> None:
        with self.scene.block(*self.nest(axes, names)):
            self.scene.emit(*lets, f"{tile.element(names)} = {value.text}")
        self.bounds[tile] = value.bound

    def modify(self, tile: Tile) -> None:
        """An element-wise change of a tile, maybe only where a condition holds."""
        scene = self.scene
        names = self.names(tile.axes, whole=True)
        here = self.expressions(names)
        value = here.value(must=tile)
        headers = self.nest(tile.axes, names)
        narrow = tile.dtype != scene.dtype
        text = f'T.cast({here.small(value, 1000.0).text}, "{tile.dtype}")' if narrow else value.text
        if scene.chance(10):
            headers.insert(0, f"if {here.block_condition()}")
        elif scene.chance(15):
            headers.append(f"if {here.test()}")
        with scene.block(*headers):
            scene.emit(*here.lets, f"{tile.element(names)} = {text}")
        self.bounds[tile] = max(self.bounds.get(tile, 3.0), value.bound)

    def start(self, tile: Tile, op: str) -> None:
        """Give an accumulator its first value: mostly neutral, else a constant, an input or an expression."""
        scene = self.scene
        names = self.names(tile.axes)
        kind = scene.pick(
            ("neutral", "neutral", "neutral", "neutral", "neutral", "constant", "copy", "expression", "home")
        )
        if (
            kind == "home"
            and tile.axes
            and all(a in tile.axes for a in scene.grid_axes)
            and not scene.depth + scene.guarded
        ):
            param = scene.new_param(tuple(a.dim for a in tile.axes), "inout")
            tile.home = param.name
            scene.emit(f"T.copy({param.name}[{', '.join(a.start for a in tile.axes)}], {tile.name})")
            self.bounds[tile] = 3.0
            return
        if kind == "copy" and tile.axes:
            param = scene.input(tuple(a.dim for a in tile.axes))
            if param.dtype == tile.dtype:
                scene.emit(f"T.copy({param.name}[{', '.join(a.start for a in tile.axes)}], {tile.name})")
                self.bounds[tile] = 3.0
                return
        if kind == "expression" and op != "prod":
            here = self.expressions(names, tile)
            self._assign(tile, tile.axes, names, here.value(1), here.lets)
            return
        neutral = NEUTRAL[tile.dtype][op]
        number = "1" if tile.dtype == "int32" else "1.0"
        value = number if kind == "constant" else neutral
        self.bounds[tile] = 1.0
        if op == "sum" and value == neutral and not scene.chance(20):
            scene.emit(f"T.clear({tile.name})")
        elif scene.chance(80):
            scene.emit(f"T.fill({tile.name}, {value})")
        else:
            self._assign(tile, tile.axes, names, Value(value, 1.0))

    def scan(self, tile: Tile) -> None:
        """Running sums along one of a tile's axes."""
        if tile.axes and len(tile.axes) < 3 and tile.dtype != "float16" and not self.scene.chance(50):
            axis = self.scene.pick(tile.axes)
            self.contribution(tile, "sum", axis.length)
            reverse = ", reverse=True" if self.scene.chance(20) else ""
            self.scene.emit(f"T.cumsum({tile.name}, dim={tile.axes.index(axis)}{reverse})")
            self.bounds[tile] = self.bounds.get(tile, 3.0) * axis.length

    def scalar(self) -> None:
        """A number loaded from an index buffer, for later conditions."""
        scene = self.scene
        dim = scene.pick(scene.dims)
        axis = next((a for a in scene.open if a.dim is dim and a.length == 1), None)
        name = scene.name("c")
        ids = self.expressions({}).ids(dim).name
        scene.emit(f"{name} = {ids}[{axis.start if axis and scene.chance(50) else 0}]")
        scene.scalars.append(name)

    # -- reductions ------------------------------------------------------------------------------------------------

    def reduce(self, tile: Tile, axis: Axis, op: str) -> Tile:
        """A new tile with the reduction of another over one of its axes."""
        scene = self.scene
        rest = tuple(a for a in tile.axes if a is not axis)
        self.contribution(tile, op, axis.length)
        if axis.length * axis.dim.blocks > axis.dim.size and scene.chance(60):
            self.mask(tile, axis, op)
        result = scene.new_tile(rest, "fragment", scene.dtype)
        if tile.dtype == scene.dtype and op in ("sum", "max", "min") and scene.chance(75):
            clear = not scene.chance(25)
            if not clear:
                self.start(result, op)
            kind = f"abs{op}" if clear and op != "min" and scene.chance(12) else op
            self.emit_reduce(tile, axis, result, kind, clear)
        else:
            self.start(result, op)
            self.update(result, axis, op, tile)
        self.grow(result, tile, op, axis.length)
        return result

    def emit_reduce(self, tile: Tile, axis: Axis, result: Tile, op: str, clear: bool) -> None:
        flag = "" if clear else ", clear=False"
        self.scene.emit(f"T.reduce_{op}({tile.name}, {result.name}, dim={tile.axes.index(axis)}{flag})")

    def contribution(self, tile: Tile, op: str, times: int) -> None:
        """Make a tile's values fit to be combined so many times: small for a sum, near 1 for a product."""
        scene = self.scene
        names = self.names(tile.axes)
        element, here = tile.element(names), self.expressions(names)
        if op == "prod":
            text = f"T.if_then_else({element} > {here.constant(1)}, {here.constant(2)}, {here.constant(1)})"
            if not scene.exact:
                text = f"(1.0 + 0.25 * T.max(T.min({element}, 1.0), -1.0))"
            self._assign(tile, tile.axes, names, Value(text, 2.0))
        elif op == "sum" and self.bounds.get(tile, 3.0) * times > LARGEST * 16:
            text = here.small(Value(element, self.bounds[tile]), 1.0).text
            self._assign(tile, tile.axes, names, Value(text, 5.0))

    def grow(self, result: Tile, tile: Tile, op: str, times: int) -> None:
        """Note how large a combined value can be."""
        bound, known = self.bounds.get(tile, 3.0), self.bounds.get(result, 1.0)
        factor = {"sum": bound * times, "prod": 2.0 ** min(times, 1000)}.get(op, bound)
        self.bounds[result] = max(known, 1.0) + factor

    def update(self, result: Tile, axis: Axis, op: str, tile: Tile | None = None) -> float:
        """`result[i] op= value[i, j]` for each j of `axis`, in order; returns the value's bound."""
        scene = self.scene
        axes = [*result.axes, axis]
        names = self.names(axes)
        here = self.expressions(names, result)
        value = here.tile(tile) if tile is not None else self._fit(here, here.value(1), op)
        target = result.element(names)
        headers = self.nest(axes, names, serial=(axis,))
        if axis.dim.size % axis.length and scene.chance(60 if scene.plain else 20):
            headers.append(f"if {axis.at(names[axis])} < {axis.dim.size}")
        elif tile is None and scene.chance(20):
            headers.append(f"if {here.test()}")
        with scene.block(*headers):
            scene.emit(*here.lets, combine(target, value.text, op))
        return value.bound

    def _fit(self, here: Expressions, value: Value, op: str) -> Value:
        if op != "prod":
            return here.small(value, 1000.0)
        if self.scene.exact:
            two, one = here.constant(2), here.constant(1)
            return Value(f"T.if_then_else({value.text} > {one}, {two}, {one})", 2.0)
        return Value(f"(1.0 + 0.25 * T.max(T.min({value.text}, 1.0), -1.0))", 2.0)


def combine(target: str, value: str, op: str) -> str:
    """`target = target op value` as people write it."""
    if op in ("max", "min"):
        return f"{target} = T.{op}({target}, {value})"
    return f"{target} {'+' if op == 'sum' else '*'}= {value}"
