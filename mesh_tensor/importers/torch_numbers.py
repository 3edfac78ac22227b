"""Operators of torch on numbers, whose results have other dtypes or forms than TVM's importer makes of them, as Relax
operators. See torch_ops for what each function takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from tvm import relax, tirx

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.targets.dtypes import dtype_name

from .torch_args import COMPARISONS, arguments, emit, in_dtype, in_result_dtype, op_name, result_dtype, widened
from .torch_sizes import SIZES, counted, parted, selected, sliced

Convert = Callable[[Any, Any], Any]


def over_dims(op: Callable[..., Any], node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A reduction over dims (none: all), in the result's dtype: whole numbers and bools are summed in int64."""
    x, dims, keep = arguments(node, importer, 1, dim=None, keepdim=False)
    return emit(importer, op(in_result_dtype(node, importer, x), _dims(dims), keep))


def any_true(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Whether any element is not zero."""
    x, dims, keep = arguments(node, importer, 1, dim=None, keepdim=False)
    if any(isinstance(size, tirx.IntImm) and int(size) == 0 for size in x.struct_info.shape):
        return emit(importer, relax.op.zeros(list(node.meta["val"].shape), "bool"))
    if x.struct_info.dtype != "bool":
        x = emit(importer, relax.op.not_equal(x, relax.const(0, x.struct_info.dtype)))
    counts = emit(importer, relax.op.max(emit(importer, relax.op.astype(x, "int8")), _dims(dims), keep))
    return emit(importer, relax.op.astype(counts, "bool"))


def extreme_along(where: Callable[..., relax.Expr], node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The maximum or minimum along a dim, and where it is first: that element alone has a gradient."""
    x, dim, keep = arguments(node, importer, 2, keepdim=False)
    compared = emit(importer, relax.op.astype(x, "int8")) if x.struct_info.dtype == "bool" else x
    indices = emit(importer, relax.op.astype(emit(importer, where(compared, dim, True)), "int64"))
    made = [emit(importer, relax.op.gather_elements(x, indices, axis=dim)), indices]
    made = made if keep else [emit(importer, relax.op.squeeze(each, [dim])) for each in made]
    return emit(importer, relax.Tuple(made))


def sort(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Sorted along a dim, and where each element was."""
    x, dim, descending = arguments(node, importer, 1, dim=-1, descending=False)
    indices = emit(importer, relax.op.argsort(x, dim, descending, "int64"))
    return emit(importer, relax.Tuple([emit(importer, relax.op.gather_elements(x, indices, axis=dim)), indices]))


def divide_rounded(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A quotient, as it is, rounded down, or towards zero."""
    mode = node.kwargs.get("rounding_mode")
    op = relax.op.floor_divide if mode == "floor" else relax.op.divide  # which rounds whole numbers towards zero
    quotient = of_two(op, node, importer)
    is_whole = mode != "trunc" or "float" not in result_dtype(node)
    return quotient if is_whole else emit(importer, relax.op.trunc(quotient))


def cumulative(op: Callable[..., Any], node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Sums or products of all elements up to each, in the result's dtype: whole numbers and bools are int64."""
    x, dim = arguments(node, importer, 2)
    dtype = result_dtype(node)
    return emit(importer, op(in_result_dtype(node, importer, x), dim, dtype))


def promoting(op: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """TVM's conversion, if it has one; the operator in the result's dtype where an operand has another one, which TVM
    would keep."""
    own = promotes(node, importer) or op_name(node) not in importer.conversions_of_tvm
    return of_two(op, node, importer) if own else of_tvm(node, importer)


def widening(op: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The conversion, of float32 where it takes tensors of 16 bits beside wider ones, as norms do under autocast: torch
    computes so, and rounds what comes out once."""
    operands = {operand: importer.env[operand] for operand in node.all_input_nodes}
    found = {value.struct_info.dtype for value in operands.values() if isinstance(value, relax.Expr)}
    if not found.intersection(NARROW) or found.issubset(NARROW):
        return op(node, importer)
    wide = {n: widened(importer, value) for n, value in operands.items() if isinstance(value, relax.Expr)}
    importer.env.update(wide)
    try:
        made = op(node, importer)
    finally:
        importer.env.update(operands)
    first, *_ = pytree.tree_leaves(node.meta["val"])  # what TVM gives of a batch norm
    return in_dtype(importer, made, dtype_name(first.dtype))


def power(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A power; with a half it is a root, as torch has it: NaN of -infinity."""
    x, exponent = arguments(node, importer, 2)
    if exponent in (0.5, -0.5):
        return emit(importer, (relax.op.sqrt if exponent > 0 else relax.op.rsqrt)(in_result_dtype(node, importer, x)))
    return promoting(relax.op.power, node, importer)


def comparison(op: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A comparison in the dtype that torch compares in: whole numbers and a fraction as floats."""
    meant: list[Any] = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in node.args]
    if any(isinstance(value, torch.SymInt) for value in meant):
        return of_tvm(node, importer)
    meant = [1.0 if isinstance(value, torch.SymFloat) else value for value in meant]
    dtype = dtype_name(torch.result_type(*meant))
    return emit(importer, op(*(in_dtype(importer, operand, dtype) for operand in arguments(node, importer, 2))))


def where(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """One or the other, in the result's dtype."""
    condition, *both = arguments(node, importer, 3)
    return emit(importer, relax.op.where(condition, *(in_result_dtype(node, importer, value) for value in both)))


def clamp(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Between bounds, in the result's dtype."""
    if not promotes(node, importer):
        return of_tvm(node, importer)
    x, lowest, highest = arguments(node, importer, 1, min=None, max=None)
    x = in_result_dtype(node, importer, x)
    if lowest is not None:
        x = emit(importer, relax.op.maximum(x, in_result_dtype(node, importer, lowest)))
    return x if highest is None else emit(importer, relax.op.minimum(x, in_result_dtype(node, importer, highest)))


def of_tvm(node: torch.fx.Node, importer: Any) -> Any:
    """What TVM's importer makes of the node."""
    return importer.conversions_of_tvm[op_name(node)](node)


def is_zero(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Whether each element is zero."""
    (x,) = arguments(node, importer, 1)
    if x.struct_info.dtype == "bool":
        return emit(importer, relax.op.logical_not(x))
    return emit(importer, relax.op.equal(x, relax.const(0, x.struct_info.dtype)))


def promotes(node: torch.fx.Node, importer: Any) -> bool:
    """Whether an operand is a tensor of another dtype than the result: whole numbers times a fraction are floats."""
    values = [importer.env.get(arg) for arg in node.args if isinstance(arg, torch.fx.Node)]
    return any(isinstance(v, relax.Expr) and v.struct_info.dtype != result_dtype(node) for v in values)


def of_two(op: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The operator on two operands, tensors or numbers, both in the dtype of the result."""
    operands = arguments(node, importer, 2)
    return emit(importer, op(*(in_result_dtype(node, importer, operand) for operand in operands)))


def _of_bools(op: Convert, node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The operator on two tensors of any dtype, of which it matters whether elements are zero."""
    operands = []
    for operand in arguments(node, importer, 2):
        zero = relax.const(0, operand.struct_info.dtype)
        is_bool = operand.struct_info.dtype == "bool"
        operands.append(operand if is_bool else emit(importer, relax.op.not_equal(operand, zero)))
    return emit(importer, op(*operands))


def _dims(dims: Any) -> list[int] | None:
    """Dims as Relax takes them; none means all."""
    return list(dims) or None if isinstance(dims, (list, tuple)) else None if dims is None else [dims]


NUMBERS: dict[str, Convert] = {
    **SIZES,
    "arange.start_step": partial(counted, of_tvm),
    "select.int": partial(selected, of_tvm),
    "slice.Tensor": partial(sliced, of_tvm),
    "split_with_sizes.default": partial(parted, of_tvm),
    "__lshift__.Scalar": partial(of_two, relax.op.left_shift),
    "__rshift__.Scalar": partial(of_two, relax.op.right_shift),
    "amax.default": partial(over_dims, relax.op.max),
    "amin.default": partial(over_dims, relax.op.min),
    **dict.fromkeys(("any.default", "any.dim", "any.dims"), any_true),
    "atan2.default": partial(of_two, relax.op.atan2),
    **dict.fromkeys(("clamp.default", "clamp.Tensor"), clamp),
    "cumprod.default": partial(cumulative, relax.op.cumprod),
    "cumsum.default": partial(cumulative, relax.op.cumsum),
    **dict.fromkeys(("div.Scalar", "div.Tensor"), partial(of_two, relax.op.divide)),
    **dict.fromkeys(("div.Scalar_mode", "div.Tensor_mode"), divide_rounded),
    "logical_and.default": partial(_of_bools, relax.op.logical_and),
    "logical_not.default": is_zero,
    "logical_or.default": partial(_of_bools, relax.op.logical_or),
    "logical_xor.default": partial(_of_bools, relax.op.logical_xor),
    "max.dim": partial(extreme_along, relax.op.argmax),
    "min.dim": partial(extreme_along, relax.op.argmin),
    **dict.fromkeys(("prod.default", "prod.dim_int"), partial(over_dims, relax.op.prod)),
    "sort.default": sort,
    **dict.fromkeys(("sum.default", "sum.dim_IntList"), partial(over_dims, relax.op.sum)),
    "where.self": where,
}
_PROMOTING = {
    "fmod": relax.op.mod,
    "maximum": relax.op.maximum,
    "minimum": relax.op.minimum,
    "mul": relax.op.multiply,
    "pow": relax.op.power,
    "remainder": relax.op.floor_mod,
}
_COMPARISONS = {compare.__name__: op for compare, op in COMPARISONS.items()}
_FORMS = ("Scalar", "Tensor", "Tensor_Scalar", "Tensor_Tensor", "default")
NUMBERS |= {f"{name}.{form}": partial(promoting, op) for name, op in _PROMOTING.items() for form in _FORMS}
NUMBERS["pow.Tensor_Scalar"] = power
NUMBERS |= {
    f"{name}.{form}": partial(comparison, op) for name, op in _COMPARISONS.items() for form in ("Scalar", "Tensor")
}

# Operators that may take a symbolic size for a number.
WITH_NUMBERS = {
    f"{name}.{kind}" for name in ("add", "sub", "mul", "div", *_COMPARISONS) for kind in ("Tensor", "Scalar")
}
