"""Where a device's tile lies, as expressions inside a kernel over tiles.

The helpers are pure operators in the `mesh.` namespace. Of a buffer's dim, `mesh.tile_offset("A", 0)` is the global
index of the tile's first element, and `mesh.tile_extent("A", 0)` how many of the tile's elements are valid;
`mesh.axis_index("x")` is the device's coordinate. `fill` writes down what they are worth, `resolve` leaves nothing but
that and the variables of the coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx

from mesh_tensor.base.sharding import Sharding

from .nodes import int_or, nodes

AXIS, OFFSET, EXTENT = "mesh.axis_index", "mesh.tile_offset", "mesh.tile_extent"

#: What users call the operators.
CALLED = {AXIS: "mesh_axis_index", OFFSET: "get_tile_offset", EXTENT: "get_tile_extent"}


@dataclass(frozen=True, eq=False)
class TileHelper:
    """A call of a helper: of `buffer`'s `dim`, whose tiles are `tile` long, or of `axis`. `value` is what `fill` found,
    None before."""

    op: str
    axis: str | None = None
    buffer: str | None = None
    dim: int | None = None
    tile: tirx.PrimExpr | None = None
    value: tirx.PrimExpr | None = None

    @property
    def key(self) -> tuple:
        """Equal for helpers that give the same."""
        return (self.op, self.axis) if self.axis is not None else (self.op, *self.place)

    @property
    def place(self) -> tuple[str, int]:
        """The buffer and its dim, of a helper that has one."""
        assert self.buffer is not None
        assert self.dim is not None
        return self.buffer, self.dim

    @property
    def is_extent(self) -> bool:
        return self.op == EXTENT

    def __str__(self) -> str:
        if self.axis is not None:
            return f'mesh_axis_index("{self.axis}")'
        return f"{CALLED[self.op]}({self.buffer})[{self.dim}]"


def axis_index(axis: str) -> tirx.PrimExpr:
    """This device's coordinate on the axis."""
    return tirx.Call("int32", ir.Op.get(AXIS), [tirx.StringImm(axis)])


def tile_offset(buffer: str, dim: int, tile: Any, dtype: str) -> tirx.PrimExpr:
    """The global index in `dim` of the first element of this device's tile, one of those that are `tile` long."""
    return _of_tile(OFFSET, buffer, dim, dtype, tile)


def tile_extent(buffer: str, dim: int, tile: Any, dtype: str) -> tirx.PrimExpr:
    """How many of the `tile` elements of this device's tile are valid in `dim`."""
    return _of_tile(EXTENT, buffer, dim, dtype, tile)


def _of_tile(op: str, buffer: str, dim: int, dtype: str, *numbers: Any) -> tirx.PrimExpr:
    args = [tirx.StringImm(buffer), tirx.IntImm("int32", dim), *(_typed(number, dtype) for number in numbers)]
    return tirx.Call(dtype, ir.Op.get(op), args)


def as_helper(node: object) -> TileHelper | None:
    """The helper that a node calls, or None."""
    if not (isinstance(node, tirx.Call) and isinstance(node.op, ir.Op) and node.op.name in CALLED):
        return None
    name, *args = node.args
    if node.op.name == AXIS:
        return TileHelper(AXIS, axis=name.value)
    return TileHelper(node.op.name, None, name.value, int(args[0]), *args[1:])


def helpers_in(node: tirx.Stmt | tirx.PrimExpr) -> list[TileHelper]:
    """The calls of helpers in a statement or an expression."""
    return [helper for call in nodes(node, tirx.Call) if (helper := as_helper(call)) is not None]


def with_bounds(expr: tirx.PrimExpr) -> tuple[tirx.PrimExpr, list[tirx.PrimExpr]]:
    """The expression with a variable for every extent of a tile, and what is known of these: no tile has more elements
    than there is room for."""
    bounds: list[tirx.PrimExpr] = []

    def name(node: tirx.Call) -> tirx.PrimExpr | None:
        helper = as_helper(node)
        if helper is None or not helper.is_extent:
            return None
        extent = tirx.Var("extent", node.dtype)
        bounds.extend((extent >= 0, extent <= helper.tile))
        return extent

    return tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), None, name, ["tirx.Call"]).value, bounds


def text_of(expr: tirx.PrimExpr) -> str:
    """The expression in one line, for messages: with the helpers as users call them."""
    called: list[str] = []

    def name(node: tirx.Call) -> tirx.PrimExpr | None:
        helper = as_helper(node)
        if helper is None:
            return None
        called.append(str(helper))
        return tirx.Var(f"helper_{len(called) - 1}_called", node.dtype)

    if isinstance(expr, tirx.PrimExpr):
        expr = tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), None, name, ["tirx.Call"]).value
    text = " ".join(str(expr).split())
    for index, call in enumerate(called):
        text = text.replace(f"helper_{index}_called", call)
    return text


def fill(body: tirx.Stmt, layouts: Mapping[str, Sharding], shapes: Mapping[str, tuple]) -> tirx.Stmt:
    """The body with the value in every call of a helper, for tensors of these shapes and layouts. A variable per axis
    stands for the device's coordinate."""
    stand_ins: dict[str, tirx.PrimExpr] = {}

    def coordinate(axis: str) -> tirx.PrimExpr:
        if axis not in stand_ins:
            stand_ins[axis] = tirx.Call("int32", ir.Op.get(AXIS), [tirx.StringImm(axis), tirx.Var(axis, "int32")])
        return stand_ins[axis]

    def write(node: tirx.Call) -> tirx.PrimExpr | None:
        helper = as_helper(node)
        if helper is None:
            return None
        if helper.axis is not None:
            return coordinate(helper.axis)
        buffer, dim = helper.place
        layout, size = layouts[buffer], shapes[buffer][dim]
        value = (_valid if helper.is_extent else _offset)(layout, dim, int_or(size, size), coordinate)
        return _of_tile(helper.op, buffer, dim, node.dtype, layout.tile_shape(shapes[buffer])[dim], value)

    return tirx.stmt_functor.ir_transform(body, None, write, ["tirx.Call"])


def resolve(body: tirx.Stmt, coordinate: Callable[[str], tirx.PrimExpr]) -> tirx.Stmt:
    """The filled body with the helpers' values in their place, in terms of `coordinate(axis)`."""

    def unwrap(node: tirx.Call) -> tirx.PrimExpr | None:
        helper = as_helper(node)
        if helper is None:
            return None
        return helper.value if helper.axis is None else coordinate(helper.axis)

    return tirx.stmt_functor.ir_transform(body, None, unwrap, ["tirx.Call"])


_Coordinate = Callable[[str], tirx.PrimExpr]


def _offset(layout: Sharding, dim: int, size: Any, coordinate: _Coordinate) -> Any:
    total: Any = 0
    for axis, step in layout.tile_steps(dim, size):
        if layout.mesh.size(axis) > 1:
            total = total + coordinate(axis) * step
    return total


def _valid(layout: Sharding, dim: int, size: Any, coordinate: _Coordinate) -> Any:
    """Every axis splits what the axes before it leave; its last parts are short or empty."""
    if isinstance(size, int) and size % layout.num_shards(dim) == 0:
        return size // layout.num_shards(dim)
    valid = size
    for axis, step in layout.tile_steps(dim, size):
        if layout.mesh.size(axis) > 1:
            valid = tirx.max(tirx.min(step, valid - coordinate(axis) * step), 0)
    return valid


def _typed(value: Any, dtype: str) -> tirx.PrimExpr:
    expr = tirx.convert(value)
    return expr if expr.dtype == dtype else expr.astype(dtype)


def register_op(name: str, what: str, effect: Any) -> None:
    """Make an operator known to TVM, unless it is: what it does in words, and its kind of effect."""
    if name not in ir.Op.list_op_names():
        ir._ffi_api.RegisterOp(name, what)
        ir.register_op_attr(name, "TCallEffectKind", effect.value)
        ir.register_op_attr(name, "TScriptPrinterName", name)


for _name, _what in CALLED.items():
    register_op(_name, f"{_what} in a kernel over tiles", tirx.CallEffectKind.Pure)
