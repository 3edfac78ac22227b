"""What a kernel computes and loads, counted from its statements, and how often these run. Loops whose extents follow
from those around them, as the blocks below a diagonal do, are counted for each value of these; and for the device that
has most of them, where they follow from its coordinates. Sizes with symbols are functions of the symbols' values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any

from tvm import ir, tirx

from mesh_tensor.annotations.annotate import fits
from mesh_tensor.base.dtypes import dtype_bits, is_float
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.loops import is_one_iteration
from mesh_tensor.tir.nodes import nodes

from .reader import read_kernel
from .statements import Kernel, Loop, Statement, without_binds

#: What sizes are made of others by.
ON_SIZES: dict[type, Callable[[int, int], int]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Min: min,
    tirx.Max: max,
}


def is_size(size: Any, symbols: Sequence[tirx.Var]) -> bool:
    """Whether a size is known from the values of the symbols."""
    if isinstance(size, tirx.Var):
        return any(symbol.same_as(size) for symbol in symbols)
    if type(size) in ON_SIZES:
        return is_size(size.a, symbols) and is_size(size.b, symbols)
    return isinstance(size, (int, tirx.IntImm))


def size_function(size: Any, symbols: Sequence[tirx.Var]) -> Callable[[Sequence[int]], int]:
    """From the values of all `symbols`, in their order, to the value of a size.

    Raises:
        MeshTensorError: there is something else in it than the symbols and arithmetic.
    """
    if isinstance(size, (int, tirx.IntImm)):
        value = int(size)
        return lambda values: value
    if isinstance(size, tirx.Var):
        position = next((index for index, symbol in enumerate(symbols) if symbol.same_as(size)), None)
        if position is not None:
            return lambda values: values[position]
    operation = ON_SIZES.get(type(size))
    if operation is None:
        known = listing([symbol.name for symbol in symbols]) if symbols else "numbers"
        refuse(f"the size {size} is not known", why=f"only {known} are, and + - * // % min max of them")
    left, right = size_function(size.a, symbols), size_function(size.b, symbols)
    return lambda values: operation(left(values), right(values))


_MOST, _DEVICES = 4096, 64  # values of loops, and devices, that are gone through: of more, as many, evenly spread

Number = Callable[[Sequence[int]], int]


@dataclass(frozen=True)
class _Times:
    """How often a loop runs; `start`: the first value of its variable, if others follow from that."""

    count: Number
    start: Number | None


def unknown_extents(kernel: Kernel, known: Sequence[tirx.Var] = ()) -> list[str]:
    """The extents of loops that only data says, where these variables are known: they count as once."""
    found = dict[str, None]()
    for statement in kernel.statements:
        scope = [*known]
        for loop in _several(statement):
            start, extent = (without_binds(e, kernel) for e in (loop.min, loop.extent))
            if not is_size(extent, scope):
                found[str(extent)] = None
            elif is_size(start, scope):
                scope.append(loop.var)
    return list(found)


def total_function(
    terms: Iterable[tuple[Statement, int]],
    kernel: Kernel,
    symbols: Sequence[tirx.Var],
    coordinates: Mapping[tirx.Var, int],
) -> Number:
    """From the values of all `symbols` to what statements amount to, of which one run is so much, on the device with
    most of it. `coordinates`: the variables of a device's, with the sizes of their axes."""
    known = [*symbols, *coordinates]
    counted = [(each, _times(statement, kernel, known)) for statement, each in terms if each]
    used = vars_of((extent for statement, _ in terms for extent in _places(statement, kernel)), {})
    most = _each(_DEVICES, len(used.intersection(coordinates)))
    places = [_spread(size, most) if var in used else (0,) for var, size in coordinates.items()]

    def total(values: Sequence[int]) -> int:
        return max(
            sum(round(each * _all_runs(times, [*values, *at])) for each, times in counted) for at in product(*places)
        )

    return total


def _several(statement: Statement) -> list[Loop]:
    return [loop for loop in statement.loops if loop.node is None or not is_one_iteration(loop.node)]


def _places(statement: Statement, kernel: Kernel) -> list[Any]:
    return [without_binds(e, kernel) for loop in statement.loops for e in (loop.min, loop.extent)]


def _times(statement: Statement, kernel: Kernel, known: Sequence[tirx.Var]) -> list[_Times]:
    """The loops around a statement, the outermost first. One of which only data says how often it runs counts once."""
    found, scope, loops = list[_Times](), list(known), _several(statement)
    for number, loop in enumerate(loops):
        start, extent = (without_binds(e, kernel) for e in (loop.min, loop.extent))
        if not is_size(extent, scope):
            continue
        inner = vars_of((e for other in loops[number + 1 :] for e in (other.min, other.extent)), kernel.binds)
        walked = loop.var in inner and is_size(start, scope)
        found.append(_Times(size_function(extent, scope), size_function(start, scope) if walked else None))
        scope += [loop.var] * walked
    return found


def _all_runs(loops: Sequence[_Times], values: list[int]) -> float:
    return _runs(loops, values, _each(_MOST, sum(loop.start is not None for loop in loops)))


def _runs(loops: Sequence[_Times], values: list[int], most: int) -> float:
    if not loops:
        return 1
    first, rest = loops[0], loops[1:]
    try:
        count, start = max(0, first.count(values)), first.start and first.start(values)
    except ZeroDivisionError:  # no kernel comes there: a branch leaves these values out
        return 0
    if start is None or not count:
        return count * _runs(rest, values, most) if count else 0
    at = _spread(count, most)
    return sum(_runs(rest, [*values, start + each], most) for each in at) * count / len(at)


def _each(most: int, several: int) -> int:
    """How many values of each are gone through, of several, if all together are to be so many at most."""
    return int(most ** (1 / max(1, several)) + 1e-9)


def _spread(count: int, most: int) -> Sequence[int]:
    """The numbers below one, or so many of them, from the first to the last; of one alone, that in the middle."""
    if count <= most:
        return range(count)
    return [count // 2] if most == 1 else [n * (count - 1) // (most - 1) for n in range(most)]


NOWHERE: Mapping[tirx.Var, int] = MappingProxyType({})  # no device's coordinates

_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_NO_WORK = ("tirx.if_then_else", "tl.region", "tl.access_ptr", "tl.infinity", "tirx.reinterpret")


def count_flops(func: tirx.PrimFunc, coordinates: Mapping[tirx.Var, int] = NOWHERE) -> int:
    """Floating-point operations of one run of a kernel: 2 per multiply-add, 1 per other operation or function; on the
    device with most of them, by its `coordinates`, with the sizes of their axes.

    Loops of which only data says how often they run count once. Branches count as taken."""
    return flops_of(read_kernel(func), coordinates)


def coordinates_of(func: tirx.PrimFunc, axes: Sequence[str], mesh: Mesh) -> dict[tirx.Var, int]:
    """The last parameters of a local kernel, which are a device's coordinates on these axes, with their sizes."""
    params = func.params[len(func.params) - len(axes) :]
    return dict(zip(params, map(mesh.size, axes), strict=True))


@lru_cache(maxsize=256)
def has_products(func: tirx.PrimFunc) -> bool:
    """Whether a kernel multiplies matrices by what machines have for that."""
    return any(isinstance(c.op, ir.Op) and c.op.name.startswith("tl.tileop.gemm") for c in nodes(func.body, tirx.Call))


@lru_cache(maxsize=256)
def loaded_bytes(
    func: tirx.PrimFunc,
    tiles: tuple[tuple[int, ...], ...] = (),
    numbers: tuple[int, ...] = (),
    places: tuple[int, ...] = (),
) -> int:
    """Bytes that one run of a kernel reads of its parameters, as often as it reads them, on the device that reads most.
    `tiles` are the shapes of its tensors, which are its first parameters; the last ones are sizes, `numbers`, and a
    device's coordinates on axes of so many `places`. Loops of which data say how often they run count once."""
    kernel, terms = read_kernel(func), list[tuple[Statement, int]]()
    for statement in kernel.statements:
        bits = sum(dtype_bits(str(each.buffer.dtype)) for each in statement.reads if kernel.is_param(each.buffer))
        terms.append((statement, bits))
    first = len(func.params) - len(places)
    sizes = dict(zip(func.params[first - len(numbers) : first], numbers, strict=True))
    for param, tile in zip(func.params, tiles, strict=False):
        fits(func.buffer_map[param].shape, tile, sizes)
    coordinates = dict(zip(func.params[first:], places, strict=True))
    return total_function(terms, kernel, [*sizes], coordinates)([*sizes.values()]) // 8


def loaded_again(loaded: int, sizes: Sequence[int]) -> tuple[float, float]:
    """Of `loaded` bytes of tensors of these sizes: those that are loaded a second time and more often; and what is
    loaded between two loads of the same block: the largest tensor, and in every round of it a part of the others."""
    whole, largest = sum(sizes), max(sizes, default=0)
    rounds = max(1.0, loaded / whole) if whole else 1.0
    return max(0, loaded - whole), largest + (whole - largest) / rounds


def flops_of(kernel: Kernel, coordinates: Mapping[tirx.Var, int] = NOWHERE) -> int:
    """`count_flops` of a kernel that is read already."""
    return _flops_function(kernel, (), coordinates)(())


def flops_function(
    func: tirx.PrimFunc, symbols: Sequence[tirx.Var], coordinates: Mapping[tirx.Var, int] = NOWHERE
) -> Callable[[Sequence[int]], int]:
    """`count_flops` for kernels with symbols in the extents of their loops: from the values of all `symbols`."""
    return _flops_function(read_kernel(func), symbols, coordinates)


def _flops_function(
    kernel: Kernel, symbols: Sequence[tirx.Var], coordinates: Mapping[tirx.Var, int]
) -> Callable[[Sequence[int]], int]:
    terms = [(statement, _flops(statement)) for statement in kernel.statements]
    return total_function([(one, each) for one, each in terms if each], kernel, symbols, coordinates)


def _flops(statement: Statement) -> int:
    record = statement.tile_op
    if record is not None:
        return record.flops
    if statement.write is None:
        return 0
    work = sum(_operations(value) for value in statement.values[:1])
    return work + (statement.op is not None)


def _operations(expr: tirx.PrimExpr) -> int:
    calls = [c for c in nodes(expr, tirx.Call) if isinstance(c.op, ir.Op) and c.op.name not in _NO_WORK]
    return sum(is_float(node.dtype) for node in [*nodes(expr, *_ARITHMETIC), *calls])
