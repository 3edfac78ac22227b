"""Random expressions over the elements of tiles and inputs, coordinates and constants.

Every value comes with a bound of its size, so that small integers stay small: sums of them are exact in float32, and
results can be compared without tolerance."""

from __future__ import annotations

from dataclasses import dataclass

from .scene import Axis, Dim, Scene, Tile, walks

#: Values above this are clamped before anything else is done with them.
LARGEST = 2.0**18


@dataclass(frozen=True)
class Value:
    """An expression of the scene's dtype."""

    text: str
    bound: float


class Expressions:
    """Draws expressions at one place of a kernel: `names` are the element loops' variables (or "0") by axis."""

    def __init__(self, scene: Scene, names: dict[Axis, str], bounds: dict[Tile, float], hidden: tuple[Tile, ...] = ()):
        self.scene, self.names, self.bounds, self.hidden = scene, names, bounds, hidden
        self.lets: list[str] = []
        self._may_let = True

    # -- values ----------------------------------------------------------------------------------------------------

    def value(self, depth: int = 2, must: Tile | None = None) -> Value:
        """An expression; with `must`, one that uses that tile."""
        scene = self.scene
        if depth == 0 or scene.chance(25):
            return self.tile(must) if must is not None else self.leaf()
        kinds = ["binary", "binary", "unary", "select"]
        kind = scene.pick(kinds)
        first = self.value(depth - 1, must)
        if kind == "binary":
            return self.small(self._binary(first, self.value(depth - 1)))
        if kind == "unary":
            return self.small(self._unary(first))
        second = self.value(depth - 1)
        return Value(
            f"T.if_then_else({self.condition(depth - 1)}, {first.text}, {second.text})", max(first.bound, second.bound)
        )

    def _binary(self, a: Value, b: Value) -> Value:
        op = self.scene.pick(("+", "*", "-", "max", "min"))
        if op in ("max", "min"):
            return Value(f"T.{op}({a.text}, {b.text})", max(a.bound, b.bound))
        bound = a.bound * b.bound if op == "*" else a.bound + b.bound
        return Value(f"({a.text} {op} {b.text})", bound)

    def _unary(self, a: Value) -> Value:
        scene = self.scene
        kinds = ["negative", "twice", "absolute", "relu"]
        if not scene.exact and scene.dtype == "float32":
            kinds += ["exp", "divide", "round"]
        kind = scene.pick(kinds)
        if kind == "negative":
            return Value(f"({self.constant(0)} - {a.text})", a.bound)
        if kind == "twice":
            return Value(f"({a.text} * {self.constant(2)})", 2 * a.bound)
        if kind == "absolute":
            return Value(f"T.abs({a.text})", a.bound)
        if kind == "relu":
            return Value(f"T.max({a.text}, {self.constant(0)})", a.bound)
        if kind == "exp":
            return Value(f"T.exp(T.min({a.text}, 1.0))", 3.0)
        if kind == "divide":
            return Value(f"({a.text} / (T.abs({self.leaf().text}) + 1.0))", a.bound)
        return Value(f'T.cast(T.cast({self.small(a, 1000.0).text}, "float16"), "float32")', a.bound)

    def leaf(self) -> Value:
        """A tile's element, an input's element, a constant, or rarely a coordinate or the index of a block."""
        tiles = self.tiles()
        kinds = ["constant", "input", *(["tile"] * 3 if tiles else ["input"])]
        kinds += ["coordinate"] if self.names and self.scene.chance(15) else []
        kinds += ["block"] if self.scene.open and self.scene.chance(4) else []
        kind = self.scene.pick(kinds)
        if kind in ("tile", "input"):
            value = self.tile(self.scene.pick(tiles)) if kind == "tile" else self.input()
            return self._let(value) if self._may_let and self.scene.chance(6) else value
        if kind == "coordinate":
            axis = self.scene.pick(list(self.names))
            return self.cast(axis.at(self.names[axis]), axis.dim.size)
        if kind == "block":
            axis = self.scene.pick(self.scene.open)
            return self.cast(axis.var, axis.dim.blocks)
        number = self.scene.pick((1, 2, -1, 3))
        return Value(self.constant(number), abs(number))

    def _let(self, value: Value) -> Value:
        """The value by a name that is bound in a line before the statement."""
        name = self.scene.name("v")
        self.lets.append(f"{name} = {value.text}")
        return Value(name, value.bound)

    def test(self) -> str:
        """A condition that can stand before the lines of `lets`."""
        self._may_let, before = False, self._may_let
        text = self.condition()
        self._may_let = before
        return text

    def tiles(self) -> list[Tile]:
        """The tiles that have an element here."""
        hidden = [*self.hidden, *(self.scene.building if self.scene.plain else ())]
        return [t for t in self.scene.tiles if t not in hidden and all(self._is_here(axis) for axis in t.axes)]

    def _is_here(self, axis: Axis) -> bool:
        return axis in self.names or any(walks(a, axis) for a in self.names)

    def tile(self, tile: Tile) -> Value:
        text = tile.element(self.names)
        if tile.dtype != self.scene.dtype:
            text = f'T.cast({text}, "{self.scene.dtype}")'
        return self.small(Value(text, self.bounds.get(tile, 3.0)))

    def input(self) -> Value:
        """An element of an input that has some of the loops' dims, now and then another than the loops' own."""
        scene = self.scene
        axes = scene.some(list(self.names), 1 if self.names else 0, 2)
        if not axes:
            dim = scene.pick(scene.dims)
            return self._cast_input(scene.input((dim,)), [str(scene.pick((0, dim.size - 1)))])
        indices = [self.index(axis) for axis in axes]
        dims = [axis.dim for axis in axes]
        if scene.chance(8):
            dims.append(scene.pick(scene.dims))
            indices.append(str(scene.pick((0, dims[-1].size - 1))))
        return self._cast_input(scene.input(tuple(dims)), indices)

    def _cast_input(self, param, indices: list[str]) -> Value:
        text = f"{param.name}[{', '.join(indices)}]"
        return Value(text if param.dtype == self.scene.dtype else f'T.cast({text}, "{self.scene.dtype}")', 3.0)

    def index(self, axis: Axis) -> str:
        """Where an input is read: mostly at the coordinate itself."""
        scene, at, last = self.scene, axis.at(self.names[axis]), axis.dim.size - 1
        if not scene.chance(7):
            return at
        kind = scene.pick(("shift", "back", "reverse", "wrap", "halve", "stride", "gather"))
        if kind == "gather":
            return f"{self.ids(axis.dim).name}[{at}]"
        return {
            "shift": f"T.min({at} + 1, {last})",
            "back": f"T.max({at} - 1, 0)",
            "reverse": f"T.max({last} - ({at}), 0)",
            "wrap": f"({at} + 2) % {last + 1}",
            "halve": f"({at}) // 2",
            "stride": f"({at}) * 2 % {last + 1}",
        }[kind]

    def ids(self, dim: Dim):
        """An index buffer that says, for each position of a dim, where else to look."""
        known = [p for p, d in self.scene.params.values() if p.below is not None and d == (dim,)]
        return known[0] if known else self.scene.new_param((dim,), "in", "int32", below=dim.size)

    # -- conditions ------------------------------------------------------------------------------------------------

    def condition(self, depth: int = 0) -> str:
        """A comparison of coordinates, of block indices, or of values that are exact."""
        scene = self.scene
        kinds = ["limit", "parity", "limit"] if self.names else ["block"]
        kinds += ["block"] if scene.chance(5 if scene.plain else 30) else []
        kinds += ["causal"] if len(self.names) > 1 else []
        kinds += ["value"] if scene.exact else []
        kinds += ["length"] if scene.chance(10) else []
        kind = scene.pick(kinds)
        if kind == "block":
            return self.block_condition()
        if kind == "value":
            return f"{self.value(min(depth, 1)).text} {scene.pick(('>', '<='))} {self.constant(scene.pick((0, 1)))}"
        if kind == "length":
            return f"{self._position()} < {self._length()}"
        first, *rest = self.scene.some(list(self.names), 2, 2) if kind == "causal" else [scene.pick(list(self.names))]
        at = first.at(self.names[first])
        if kind == "causal" and rest:
            return f"{at} {scene.pick(('>=', '<'))} {rest[0].at(self.names[rest[0]])}"
        if kind == "limit":
            return f"{at} {scene.pick(('<', '>='))} {scene.number(0, first.dim.size)}"
        return f"({at}) % 2 == {scene.number(0, 1)}"

    def _position(self) -> str:
        if not self.names:
            return self.scene.open[0].var if self.scene.open else "0"
        axis = self.scene.pick(list(self.names))
        return axis.at(self.names[axis])

    def _length(self) -> str:
        """A limit that comes from data: a scalar loaded before, or an element of an index buffer."""
        if self.scene.scalars:
            return self.scene.pick(self.scene.scalars)
        if not self.names:
            return f"{self.ids(self.scene.dims[0]).name}[0]"
        axis = self.scene.pick(list(self.names))
        return f"{self.ids(axis.dim).name}[{axis.at(self.names[axis])}]"

    def block_condition(self) -> str:
        """A comparison of the index of a block."""
        if not self.scene.open:
            return "T.int32(0) < 1"
        axis = self.scene.pick(self.scene.open)
        last = axis.dim.blocks - 1
        return self.scene.pick((f"{axis.var} == 0", f"{axis.var} == {last}", f"{axis.var} % 2 == 0", f"{axis.var} > 0"))

    # -- small things ----------------------------------------------------------------------------------------------

    def constant(self, number: int) -> str:
        return str(number) if self.scene.dtype == "int32" else f"{number}.0"

    def cast(self, text: str, bound: float) -> Value:
        return Value(text if self.scene.dtype == "int32" else f'T.cast({text}, "{self.scene.dtype}")', float(bound))

    def small(self, value: Value, largest: float = LARGEST) -> Value:
        """The value, or one that is clamped to a small range."""
        if value.bound <= largest:
            return value
        low, high = self.constant(-5), self.constant(5)
        return Value(f"T.max(T.min({value.text}, {high}), {low})", 5.0)
