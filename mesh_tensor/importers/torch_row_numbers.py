"""Numbers that data say, in arithmetic on tensors: how many rows a mask chooses (`h.shape[0]`), and what `.item()`
reads. They stay tensors. Where one says a size, or a branch, it has to be known."""

from __future__ import annotations

import operator
from typing import Any

import torch

from .torch_rows_graph import OtherError, RowsGraph, args_of, is_open, rows_of, symbol_of

_aten = torch.ops.aten
_ARITHMETIC = {
    _aten.add.Tensor: _aten.add.Tensor,
    _aten.add.Scalar: _aten.add.Tensor,
    _aten.sub.Tensor: _aten.sub.Tensor,
    _aten.sub.Scalar: _aten.sub.Tensor,
    _aten.mul.Tensor: _aten.mul.Tensor,
    _aten.mul.Scalar: _aten.mul.Tensor,
    _aten.div.Tensor: _aten.div.Tensor,
    _aten.div.Scalar: _aten.div.Tensor,
}
_COMPARISONS = {
    getattr(_aten, name).Scalar: getattr(_aten, name).Tensor for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_FILLED = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.scalar_tensor.default: 0}
_OF_NUMBERS = {
    operator.add: _aten.add.Tensor,
    operator.sub: _aten.sub.Tensor,
    operator.mul: _aten.mul.Tensor,
    torch.sym_max: _aten.maximum.default,
    torch.sym_min: _aten.minimum.default,
}


def with_number(node: torch.fx.Node, again: Any, to: RowsGraph) -> torch.fx.Node | None:
    """What a node gives that takes such a number for a value; None if it takes none. `again(node, args)`: what it gives
    of other operands."""
    if node.target in _FILLED:
        position = _FILLED[node.target]
        fill = args_of(node)[position]
        if not _is_number(fill):
            return None
        zero = 0.0 if node.meta["val"].is_floating_point() else 0
        zeros = again(node, [zero if at == position else arg for at, arg in enumerate(args_of(node))])
        return to.emit(_aten.add.Tensor, zeros, _cast(_number(fill, to), zeros.meta["val"].dtype, to))
    if node.target not in (*_ARITHMETIC, *_COMPARISONS) or not any(map(_is_number, args_of(node))):
        return None
    if node.kwargs:
        raise OtherError
    meant = node.meta["val"].dtype
    operands = [_number(arg, to) if _is_number(arg) else to.place.get(arg, arg) for arg in args_of(node)]
    dtype = meant
    if node.target in _COMPARISONS:
        dtype = _compared_as(operands)
        operands = [_cast(each, dtype, to) for each in operands]
    wide = _wide(dtype)
    operands = [_cast(each, wide, to) if isinstance(each, torch.fx.Node) else each for each in operands]
    if (dim := rows_of(node)) is not None:
        mask = to.mask_of(node.meta["val"].shape[dim])
        operands = [
            to.if_some(each, mask) if _is_number(arg) else each
            for arg, each in zip(args_of(node), operands, strict=True)
        ]
    made = to.emit({**_ARITHMETIC, **_COMPARISONS}[node.target], *operands)
    return _cast(made, meant, to)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In what numbers are computed whose result has a dtype."""
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    if dtype.is_complex or dtype == torch.bool:
        raise OtherError
    return torch.int64


def _compared_as(operands: list[Any]) -> torch.dtype:
    """What a tensor and a number are before they are compared: the tensor's dtype, in which numbers are rounded, or
    wrap, if it can be."""
    tensor, number = (each.meta["val"].dtype for each in operands)
    if not tensor.is_floating_point and number.is_floating_point:
        return torch.float32
    return torch.int64 if tensor == torch.bool else tensor


def _is_number(arg: Any) -> bool:
    return isinstance(arg, torch.fx.Node) and _is_open(arg.meta.get("val"))


def _is_open(value: Any) -> bool:
    return is_open(value) or (isinstance(value, torch.SymFloat) and not value.node.expr.is_number)


def _number(value: Any, to: RowsGraph) -> torch.fx.Node:
    """A number as a tensor without dims, as precise as Python's."""
    if not isinstance(value, torch.fx.Node):
        return to.emit(_aten.scalar_tensor.default, value, dtype=_dtype(value))
    meant = value.meta["val"]
    if (mask := to.masks.get(symbol_of(meant))) is not None:
        return to.emit(_aten.sum.default, mask.node)
    if value.target is _aten._local_scalar_dense.default and args_of(value)[0] in to.place:
        return _cast(to.reshaped(to.place[args_of(value)[0]], ()), _dtype(meant), to)
    if value.target is torch.sym_float:
        return _cast(_number(args_of(value)[0], to), torch.float64, to)
    if value.target not in _OF_NUMBERS:
        raise OtherError  # Python raises where it divides by 0
    dtype = _dtype(meant)
    return to.emit(_OF_NUMBERS[value.target], *(_cast(_number(each, to), dtype, to) for each in args_of(value)))


def _dtype(value: Any) -> torch.dtype:
    return torch.float64 if isinstance(value, (float, torch.SymFloat)) else torch.int64


def _cast(value: torch.fx.Node, dtype: torch.dtype, to: RowsGraph) -> torch.fx.Node:
    return value if value.meta["val"].dtype == dtype else to.emit(_aten._to_copy.default, value, dtype=dtype)
