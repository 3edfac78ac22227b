"""Rows that are made of rows that masks choose: several side by side, also with others, and those that a mask chooses
from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .torch_rows_graph import Along, Mask, OtherError, RowsGraph, args_of, symbol_of

_aten = torch.ops.aten


def is_beside(node: torch.fx.Node, result: int | None) -> bool:
    """Whether rows, which are along this dim of the result, are put side by side."""
    if node.target is not _aten.cat.default or result is None:
        return False
    dim = args_of(node)[1] if len(args_of(node)) > 1 else 0
    return dim % node.meta["val"].dim() == result


def beside(node: torch.fx.Node, masks: Mapping[torch.fx.Node, Mask], to: RowsGraph) -> None:
    """Note the mask of what is put side by side: rows of `masks`, and others."""
    dim = args_of(node)[1] if len(args_of(node)) > 1 else 0
    parts = tuple(masks[part] if part in masks else part.meta["val"].shape[dim] for part in args_of(node)[0])
    if not all(isinstance(part, (Mask, int)) for part in parts):
        raise OtherError
    symbol = symbol_of(node.meta["val"].shape[dim])
    known = to.known(symbol, parts)
    if known is None:
        flags = [
            to.flat(part) if isinstance(part, Mask) else to.emit(_aten.ones.default, [part], dtype=torch.bool)
            for part in parts
        ]
        flag = to.emit(_aten.cat.default, flags, 0)
        known = Mask(flag, parts, tuple(flag.meta["val"].shape))
    to.masks[symbol] = known


def is_chosen_again(node: torch.fx.Node, along: Along) -> bool:
    """Whether a mask of rows chooses among rows."""
    if node.target not in (_aten.index.Tensor, _aten.index_put.default):
        return False
    x, (of, *more) = args_of(node)[:2]
    if more or of not in along or along.get(x) != 0:
        return False
    return of.meta["val"].dtype == torch.bool and of.meta["val"].dim() == 1


def chosen_again(node: torch.fx.Node, masks: Mapping[torch.fx.Node, Mask], to: RowsGraph) -> torch.fx.Node:
    """`h[mask]` and `h[mask] = ...` of rows that were chosen, and a mask of them."""
    x, (of,), *more = args_of(node)
    outer, place = masks[x], to.place[x]
    if masks[of] is not outer or more[1:] == [True]:
        raise OtherError
    flag = to.emit(_aten.logical_and.default, to.flat(outer), to.place[of])
    if node.target is _aten.index.Tensor:
        symbol = symbol_of(node.meta["val"].shape[0])
        known = to.known(symbol, (outer, of)) or Mask(flag, (outer, of), (outer.count,))
        to.masks[symbol] = known
        return to.substituted(place, 0, known)
    values, inner = more[0], masks.get(more[0])
    rest = x.meta["val"].dim() - 1
    if inner is None and values.meta["val"].dim() > rest:
        raise OtherError  # as many rows as are known
    if inner is not None and inner.of != (outer, of):
        raise OtherError
    flag = to.reshaped(flag, (outer.count, *([1] * rest)))
    return to.emit(_aten.where.self, flag, to.place[values], place)
