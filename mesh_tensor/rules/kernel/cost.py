"""What a kernel computes and loads, counted from its statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from tvm import ir, tirx

from mesh_tensor.annotations.annotate import fits
from mesh_tensor.base.dtypes import dtype_bits, is_float
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.tir.nodes import nodes

from .loop_counts import total_function
from .reader import read_kernel
from .statements import Kernel, Statement

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
    """Of one run of the statement."""
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
