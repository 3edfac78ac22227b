"""What rows that a mask chooses have together: the largest, whether any, how far they spread. Those that it leaves out
are what changes nothing; where none is chosen and torch raises, a call is refused as looking up what isn't there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torch_rows_graph import Mask, OtherError, RowsGraph, args_of

_aten = torch.ops.aten

#: What is made of an old node, the dim of rows of its first operand, and their mask; several results are a tuple.
Reduce = Callable[[torch.fx.Node, int, Mask, RowsGraph], Any]


def reduced(node: torch.fx.Node, dim: int, mask: Mask, to: RowsGraph) -> Any:
    """The node, of the rows that are chosen."""
    if (known := _REDUCTIONS.get(node.target)) is None:
        raise OtherError
    return known(node, dim, mask, to)


def running(node: torch.fx.Node, dim: int, mask: Mask, to: RowsGraph) -> torch.fx.Node | None:
    """Rows that are made of all rows, or of those before; None if the node is none of these."""
    if node.target not in _RUNNING or args_of(node)[1] % _ndim(node.args[0]) != dim:
        return None
    x = args_of(node)[0]
    filled = _filled(to.place[x], dim, mask, _RUNNING[node.target], to)
    return to.substituted(to.emit(node.target, filled, *args_of(node)[1:], **node.kwargs), dim, mask)


def _ndim(node: Any) -> int:
    return node.meta["val"].dim()


def _filled(rows: torch.fx.Node, dim: int, mask: Mask, kind: str, to: RowsGraph) -> torch.fx.Node:
    dtype = rows.meta["val"].dtype
    number = {"zero": 0, "one": 1, "lowest": _extreme(dtype, -1), "highest": _extreme(dtype, 1)}[kind]
    return to.kept(rows, dim, mask, to.emit(_aten.scalar_tensor.default, number, dtype=dtype))


def _extreme(dtype: torch.dtype, sign: int) -> Any:
    if dtype.is_floating_point:
        return sign * math.inf
    if dtype == torch.bool:
        return sign > 0
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


def _neutral(kind: str) -> Reduce:
    """Nothing is raised of no rows."""

    def made(node: torch.fx.Node, dim: int, mask: Mask, to: RowsGraph) -> torch.fx.Node:
        filled = _filled(to.place[args_of(node)[0]], dim, mask, kind, to)
        return to.emit(node.target, filled, *args_of(node)[1:], **node.kwargs)

    return made


def _extremes(kind: str) -> Reduce:
    def made(node: torch.fx.Node, dim: int, mask: Mask, to: RowsGraph) -> torch.fx.Node:
        return _of_some(_neutral(kind)(node, dim, mask, to), mask, to)

    return made


def _of_some(value: torch.fx.Node, mask: Mask, to: RowsGraph) -> torch.fx.Node:
    """The value, which is not there if no row is chosen."""
    shape = tuple(value.meta["val"].shape)
    none = to.emit(_aten.logical_not.default, to.emit(_aten.any.default, to.flat(mask)))
    place = to.emit(_aten.reshape.default, to.emit(_aten._to_copy.default, none, dtype=torch.int64), [1])
    one = to.emit(_aten.reshape.default, value, [1, *shape])
    return to.reshaped(to.emit(_aten.index_select.default, one, 0, place), shape)


def _with_places(kind: str) -> Reduce:
    """Largest rows, and where they stand among those that are chosen."""

    def made(node: torch.fx.Node, dim: int, mask: Mask, to: RowsGraph) -> tuple[torch.fx.Node, torch.fx.Node]:
        if args_of(node)[1] % _ndim(args_of(node)[0]) != dim:
            raise OtherError
        both = _neutral(kind)(node, dim, mask, to)
        value, place = to.item(both, 0), _rank(to.item(both, 1), mask, to)
        return _of_some(value, mask, to), _of_some(place, mask, to)

    return made


def _places(kind: str) -> Reduce:
    def made(node: torch.fx.Node, dim: int, mask: Mask, to: RowsGraph) -> torch.fx.Node:
        x, *more = args_of(node)
        over = more[0] if more else None
        if (over is None and _ndim(x) != 1) or (over is not None and over % _ndim(x) != dim):
            raise OtherError
        return _of_some(_rank(_neutral(kind)(node, dim, mask, to), mask, to), mask, to)

    return made


def _rank(places: torch.fx.Node, mask: Mask, to: RowsGraph) -> torch.fx.Node:
    """Where rows at places of all stand among those that are chosen; the first, if it is one that isn't: all that are
    chosen are as low as what stands for it."""
    rank = to.emit(_aten.sub.Tensor, to.emit(_aten.cumsum.default, to.flat(mask), 0), 1)
    first = to.emit(_aten.scalar_tensor.default, 0, dtype=torch.int64)
    rank = to.emit(_aten.where.self, to.flat(mask), rank, first)
    size = places.meta["val"].numel()
    found = to.emit(_aten.index_select.default, rank, 0, to.reshaped(places, (size,)))
    return to.reshaped(found, tuple(places.meta["val"].shape))


def _spread(root: bool) -> Reduce:
    """Variances and deviations; torch's are NaN where there are too few rows."""

    def made(node: torch.fx.Node, dim: int, mask: Mask, to: RowsGraph) -> torch.fx.Node:
        x, *more = args_of(node)
        over = more[0] if more and more[0] else list(range(_ndim(x)))
        dims = [d % _ndim(x) for d in (over if isinstance(over, Sequence) else [over])]
        if dim not in dims:
            raise OtherError
        dtype = x.meta["val"].dtype
        rows = to.emit(_aten._to_copy.default, to.place[x], dtype=torch.float32) if dtype.itemsize < 4 else to.place[x]
        each = math.prod(x.meta["val"].shape[d] for d in dims if d != dim)
        count = to.emit(_aten.mul.Tensor, to.emit(_aten.sum.default, mask.node), each)
        total = to.emit(_aten.sum.dim_IntList, to.kept(rows, dim, mask), dims, True)
        off = to.kept(to.emit(_aten.sub.Tensor, rows, to.emit(_aten.div.Tensor, total, count)), dim, mask)
        squares = to.emit(_aten.mul.Tensor, off, off)
        keepdim, correction = bool(node.kwargs.get("keepdim", False)), node.kwargs.get("correction", 1)
        correction = 1 if correction is None else correction
        total = to.emit(_aten.sum.dim_IntList, squares, dims, keepdim)
        freedom = to.emit(_aten.clamp.default, to.emit(_aten.sub.Tensor, count, correction), 0)
        result = to.emit(_aten.div.Tensor, total, freedom)
        result = _root(result, to) if root else result
        return to.emit(_aten._to_copy.default, result, dtype=dtype) if dtype.itemsize < 4 else result

    return made


def _root(value: torch.fx.Node, to: RowsGraph) -> torch.fx.Node:
    """A root whose gradient at 0 is 0, as that of torch's deviations."""
    dtype = value.meta["val"].dtype
    zero, one = (to.emit(_aten.scalar_tensor.default, number, dtype=dtype) for number in (0, 1))
    none = to.emit(_aten.eq.Scalar, value, 0)
    root = to.emit(_aten.sqrt.default, to.emit(_aten.where.self, none, one, value))
    return to.emit(_aten.where.self, none, zero, root)


_REDUCTIONS: dict[Any, Reduce] = {
    **dict.fromkeys((_aten.amax.default, _aten.max.default), _extremes("lowest")),
    **dict.fromkeys((_aten.amin.default, _aten.min.default), _extremes("highest")),
    _aten.max.dim: _with_places("lowest"),
    _aten.min.dim: _with_places("highest"),
    _aten.argmax.default: _places("lowest"),
    _aten.argmin.default: _places("highest"),
    **dict.fromkeys((_aten.any.default, _aten.any.dim, _aten.any.dims), _neutral("zero")),
    **dict.fromkeys((_aten.all.default, _aten.all.dim, _aten.all.dims), _neutral("one")),
    **dict.fromkeys((_aten.prod.default, _aten.prod.dim_int), _neutral("one")),
    _aten.var.correction: _spread(root=False),
    _aten.std.correction: _spread(root=True),
}
_RUNNING = {
    _aten.cumsum.default: "zero",
    _aten.cumprod.default: "one",
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default, _aten._safe_softmax.default), "lowest"),
}
