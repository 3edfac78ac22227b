"""Open sizes of torch's: numbers that are computed of them, and operators that take such numbers. Whole ones are TIR's,
others tensors in float64. See torch_ops for what each function takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions
from tvm import relax, tirx

from mesh_tensor.base.errors import refuse

from .torch_args import arguments, emit, in_dtype, in_result_dtype, result_dtype, tensor_of

Convert = Callable[[Any, Any], Any]
Known = Mapping[sympy.Expr, tirx.PrimExpr]


def sizes_of(shapes: Iterable[tuple[Any, Any]]) -> dict[sympy.Expr, tirx.PrimExpr]:
    """What open sizes are here, by what torch calls them: those of pairs of shapes, torch's and ours."""
    return {
        size.node.expr: ours
        for meant, made in shapes
        for size, ours in zip(meant, made, strict=True)
        if isinstance(size, torch.SymInt)
    }


def symbols_of(known: Known) -> dict[sympy.Expr, tuple[tirx.PrimExpr, str]]:
    """The symbols that some sizes are made of (n, where 2 * n + 1 is known), with what these sizes have to fulfil."""
    found = {}
    for size, ours in known.items():
        symbols = size.free_symbols
        if size.is_symbol or len(symbols) != 1 or not isinstance(ours, tirx.Var):
            continue
        (symbol,) = symbols
        factor, rest = size.coeff(symbol), size.subs(symbol, 0)
        if factor.is_Integer and factor > 0 and rest.is_Integer and size == factor * symbol + rest:
            made = tirx.floordiv(ours - int(rest), tirx.IntImm("int64", int(factor)))
            found[symbol] = made, f"({ours.name} - ({rest})) % {factor} == 0"
    return found


def in_tir(size: sympy.Expr, known: Known) -> tirx.PrimExpr | None:
    """The size as TIR has it; None if it is made of others than those that are known."""
    if size in known:
        return known[size]
    if size.is_Integer:
        return tirx.IntImm("int64", int(size))
    if isinstance(size, functions.TruncToInt):
        return _cut_off(size.args[0], known)
    parts = [in_tir(part, known) for part in size.args]
    if not parts or any(part is None for part in parts):
        return None
    if size.is_Pow:
        exponent = size.args[1]
        return reduce(operator.mul, [parts[0]] * int(exponent)) if exponent.is_Integer and exponent > 0 else None
    combine = _OF_SIZES.get(type(size).__name__)
    return None if combine is None else reduce(combine, parts)


def _cut_off(product: sympy.Expr, known: Known) -> tirx.PrimExpr | None:
    """A size times a fraction, as interpolations have it, without what follows the point. Fractions of few bits are
    exact, whatever the size."""
    factors = [factor for factor in product.args if factor.is_Float] if product.is_Mul else []
    sizes = [factor.args[0] for factor in product.args if isinstance(factor, functions.ToFloat)]
    if len(factors) != 1 or len(sizes) != 1 or len(product.args) != 2:
        return None
    above, below = float(factors[0]).as_integer_ratio()
    size = in_tir(sizes[0], known)
    if size is None or not 0 < above <= _MOST or below > _MOST:
        return None
    return tirx.floordiv(size * above, tirx.IntImm("int64", below))


_MOST = 2**20
_OF_SIZES: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "CleanDiv": tirx.floordiv,
    "FloorDiv": tirx.floordiv,
    "Max": tirx.max,
    "Min": tirx.min,
    "Mod": tirx.floormod,
    "Mul": operator.mul,
    "PythonMod": tirx.floormod,
}


def _computed(
    of_sizes: Callable[..., Any] | None, of_numbers: Callable[..., relax.Expr], node: torch.fx.Node, importer: Any
) -> Any:
    """Arithmetic on sizes; where the result is no whole number, in float64, as Python computes it."""
    operands = arguments(node, importer, len(node.args))
    if of_sizes is not None and not isinstance(node.meta["val"], torch.SymFloat):
        return of_sizes(*operands)
    return emit(importer, of_numbers(*(_number(importer, operand) for operand in operands)))


def _number(importer: Any, value: Any) -> relax.Expr:
    """A number as a tensor in float64."""
    if isinstance(value, tirx.PrimExpr):
        return tensor_of(importer, value, "float64")
    return in_dtype(importer, value, "float64")


def as_float(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A size as a number with a fraction."""
    (size,) = arguments(node, importer, 1)
    return _number(importer, size)


def elements(node: torch.fx.Node, importer: Any) -> tirx.PrimExpr:
    """How many elements a tensor has."""
    (x,) = arguments(node, importer, 1)
    return reduce(operator.mul, x.struct_info.shape.values, tirx.IntImm("int64", 1))


def _is_open(value: Any) -> bool:
    return isinstance(value, relax.Expr) or (isinstance(value, tirx.PrimExpr) and not isinstance(value, tirx.IntImm))


def one_number(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A tensor of one number, which a size may say."""
    (value,) = arguments(node, importer, 1)
    if isinstance(value, tirx.PrimExpr):
        return tensor_of(importer, value, result_dtype(node))
    return in_result_dtype(node, importer, value)


def filled(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A tensor of one number everywhere, which a size may say."""
    sizes, value = arguments(node, importer, 2)
    shape = [importer.env[size] if isinstance(size, torch.fx.Node) else size for size in sizes]
    return _full(node, importer, shape, value)


def filled_like(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The same, of another one's sizes. (TVM's importer has numbers with fractions in float32.)"""
    x, value = arguments(node, importer, 2)
    return _full(node, importer, list(x.struct_info.shape), value)


def _full(node: torch.fx.Node, importer: Any, shape: Sequence[Any], value: Any) -> relax.Expr:
    if not isinstance(value, (relax.Expr, tirx.PrimExpr)):
        dtype = result_dtype(node)
        return emit(importer, relax.op.full(shape, relax.const(value, dtype), dtype))
    number = tensor_of(importer, value, result_dtype(node)) if isinstance(value, tirx.PrimExpr) else value
    return emit(importer, relax.op.broadcast_to(in_result_dtype(node, importer, number), shape))


def counted(otherwise: Convert, node: torch.fx.Node, importer: Any) -> Any:
    """Numbers one step apart. Of steps down, and of fractions in whole numbers, which torch cuts off, TVM makes others:
    these are steps up, multiplied."""
    start, end, step = arguments(node, importer, 2, step=1)
    (count,), dtype = node.meta["val"].shape, result_dtype(node)
    fractions = any(isinstance(number, float) for number in (start, end, step))
    if not dtype.startswith("int") or isinstance(step, tirx.PrimExpr) or (step > 0 and not fractions):
        return otherwise(node, importer)
    if (many := importer.size(count)) is None or (fractions and not isinstance(count, int)):
        refuse(f"numbers from {start} to {end} by {step}", fix="make them with a positive step, and flip them")
    steps = emit(importer, relax.op.arange(0, many, 1, dtype))
    moved = emit(importer, relax.op.multiply(steps, relax.const(int(step), dtype)))
    first = tensor_of(importer, start, dtype) if _is_open(start) else relax.const(int(start), dtype)
    return emit(importer, relax.op.add(moved, first))


def sliced(otherwise: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Part of a dim. Open bounds count from its end, or lie before it begins, where they did so in the example: torch
    takes no sizes with which they don't."""
    x, dim, start, end, step = arguments(node, importer, 1, dim=0, start=None, end=None, step=1)
    example = _hint(node.args[0].meta["val"].shape[dim])  # type: ignore[union-attr]
    given = [node.args[place] if place < len(node.args) else None for place in (2, 3)]
    stated = [bound.meta["val"] if isinstance(bound, torch.fx.Node) else bound for bound in given]
    if not any(isinstance(bound, torch.SymInt) and _hint(bound) < 0 for bound in stated):
        return otherwise(node, importer)
    size = x.struct_info.shape[dim]

    def from_start(bound: Any, meant: Any) -> Any:
        if _hint(meant) >= 0:
            return bound
        return bound + size if _hint(meant) + example >= 0 else 0

    first = 0 if start is None else from_start(start, stated[0])
    last = size if end is None else tirx.min(from_start(end, stated[1]), size)
    return emit(importer, relax.op.strided_slice(x, [dim], [first], [last], [step]))


def _hint(size: Any) -> int:
    """What a size is in the example that the program was recorded with."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def selected(otherwise: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """One place of a dim, which a size may say."""
    x, dim, place = arguments(node, importer, 3)
    if not _is_open(place):
        return otherwise(node, importer)
    return emit(importer, relax.op.take(x, tensor_of(importer, place, "int64"), axis=dim))


def parted(otherwise: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Parts of a dim, one after the other, of which some are as long as sizes say."""
    x, lengths, dim = arguments(node, importer, 2, dim=0)
    if not any(isinstance(length, torch.fx.Node) for length in lengths):
        return otherwise(node, importer)
    parts, start = [], tirx.IntImm("int64", 0)
    for length in lengths:
        end = start + (importer.env[length] if isinstance(length, torch.fx.Node) else length)
        parts.append(emit(importer, relax.op.strided_slice(x, [dim], [start], [end])))
        start = end
    return emit(importer, relax.Tuple(parts))


_op = relax.op
SIZES: dict[str, Convert] = {
    "add": partial(_computed, operator.add, _op.add),
    "floordiv": partial(_computed, operator.floordiv, _op.floor_divide),
    "full.default": filled,
    "full_like.default": filled_like,
    "mod": partial(_computed, operator.mod, _op.floor_mod),
    "mul": partial(_computed, operator.mul, _op.multiply),
    "neg": partial(_computed, operator.neg, _op.negative),
    "pow": partial(_computed, operator.pow, _op.power),
    "scalar_tensor.default": one_number,
    "sub": partial(_computed, operator.sub, _op.subtract),
    "sym_float": as_float,
    "sym_numel.default": elements,
    "truediv": partial(_computed, None, _op.divide),
}
