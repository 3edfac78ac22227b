"""Operators of torch on numbers, whose results have other dtypes or forms than TVM's importer makes of them, as Relax
operators. See torch_ops for what each function takes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from tvm import relax

from .torch_args import arguments, emit, in_result_dtype, result_dtype

Convert = Callable[[Any, Any], Any]


def total(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A sum in the result's dtype: whole numbers and bools are counted in int64."""
    x, dims, keep = arguments(node, importer, 1, dim=None, keepdim=False)
    return emit(importer, relax.op.sum(in_result_dtype(node, importer, x), _dims(dims), keep))


def product(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A product along one dim, in the result's dtype."""
    x, dim, keep = arguments(node, importer, 2, keepdim=False)
    return emit(importer, relax.op.prod(in_result_dtype(node, importer, x), [dim], keep))


def product_of_all(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A product of all elements, in the result's dtype."""
    (x,) = arguments(node, importer, 1)
    return emit(importer, relax.op.prod(in_result_dtype(node, importer, x)))


def any_true(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Whether any element is not zero."""
    x, dims, keep = arguments(node, importer, 1, dim=None, keepdim=False)
    if x.struct_info.dtype != "bool":
        x = emit(importer, relax.op.not_equal(x, relax.const(0, x.struct_info.dtype)))
    counts = emit(importer, relax.op.max(emit(importer, relax.op.astype(x, "int8")), _dims(dims), keep))
    return emit(importer, relax.op.astype(counts, "bool"))


def smallest_along(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The minimum along a dim, and where it is."""
    x, dim, keep = arguments(node, importer, 2, keepdim=False)
    indices = emit(importer, relax.op.astype(emit(importer, relax.op.argmin(x, dim, keep)), "int64"))
    return emit(importer, relax.Tuple([emit(importer, relax.op.min(x, [dim], keep)), indices]))


def sort(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Sorted along a dim, and where each element was."""
    x, dim, descending = arguments(node, importer, 1, dim=-1, descending=False)
    indices = emit(importer, relax.op.argsort(x, dim, descending, "int64"))
    return emit(importer, relax.Tuple([emit(importer, relax.op.gather_elements(x, indices, axis=dim)), indices]))


def divide(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A quotient; of whole numbers, a float."""
    return _of_two(relax.op.divide)(node, importer)


def divide_rounded(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A quotient, as it is, rounded down, or towards zero."""
    mode = node.kwargs.get("rounding_mode")
    op = relax.op.floor_divide if mode == "floor" else relax.op.divide  # which rounds whole numbers towards zero
    quotient = _of_two(op)(node, importer)
    is_whole = mode != "trunc" or "float" not in result_dtype(node)
    return quotient if is_whole else emit(importer, relax.op.trunc(quotient))


def nothing(node: torch.fx.Node, importer: Any) -> None:
    """What torch asserts about values has no result."""


def _of_two(op: Convert) -> Convert:
    """The operator on two operands, tensors or numbers, both in the dtype of the result."""

    def converted(node: torch.fx.Node, importer: Any) -> relax.Expr:
        operands = arguments(node, importer, 2)
        return emit(importer, op(*(in_result_dtype(node, importer, operand) for operand in operands)))

    return converted


def _of_bools(op: Convert) -> Convert:
    """The operator on two tensors of any dtype, of which it matters whether elements are zero."""

    def converted(node: torch.fx.Node, importer: Any) -> relax.Expr:
        operands = []
        for operand in arguments(node, importer, 2):
            zero = relax.const(0, operand.struct_info.dtype)
            is_bool = operand.struct_info.dtype == "bool"
            operands.append(operand if is_bool else emit(importer, relax.op.not_equal(operand, zero)))
        return emit(importer, op(*operands))

    return converted


def _of_sizes(op: Convert) -> Convert:
    """Arithmetic on sizes, which are numbers or symbols."""

    def converted(node: torch.fx.Node, importer: Any) -> Any:
        return op(*arguments(node, importer, 2))

    return converted


def _dims(dims: Any) -> list[int] | None:
    """Dims as Relax takes them; none means all."""
    return list(dims) or None if isinstance(dims, (list, tuple)) else None if dims is None else [dims]


NUMBERS: dict[str, Convert] = {
    "__lshift__.Scalar": _of_two(relax.op.left_shift),
    "__rshift__.Scalar": _of_two(relax.op.right_shift),
    "_assert_async.msg": nothing,
    "add": _of_sizes(operator.add),
    "any.default": any_true,
    "any.dim": any_true,
    "any.dims": any_true,
    "atan2.default": _of_two(relax.op.atan2),
    "div.Scalar": divide,
    "div.Scalar_mode": divide_rounded,
    "div.Tensor": divide,
    "div.Tensor_mode": divide_rounded,
    "floordiv": _of_sizes(operator.floordiv),
    "logical_or.default": _of_bools(relax.op.logical_or),
    "logical_xor.default": _of_bools(relax.op.logical_xor),
    "min.dim": smallest_along,
    "mod": _of_sizes(operator.mod),
    "pow.Scalar": _of_two(relax.op.power),
    "prod.default": product_of_all,
    "prod.dim_int": product,
    "sort.default": sort,
    "sub": _of_sizes(operator.sub),
    "sum.default": total,
    "sum.dim_IntList": total,
}

# Operators that may take a symbolic size for a number.
WITH_NUMBERS = {f"{name}.{kind}" for name in ("add", "sub", "mul", "div") for kind in ("Tensor", "Scalar")} | {
    f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")
}
