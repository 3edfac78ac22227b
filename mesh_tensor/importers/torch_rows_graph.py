"""A graph in which all rows are computed that masks choose from, in the making; and what tells rows in the old one."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

_aten = torch.ops.aten

#: By operand the dim that rows are along; operands that have no rows are left out.
Along = Mapping[torch.fx.Node, int]


class OtherError(Exception):
    """Rows are taken for something else."""


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask of known shape in the new graph, and what it is of: a mask in the old one, or, of rows side by side, what
    each part has (a number: as many rows, all of which are there), or, of rows that are chosen from chosen ones, the
    mask of these and the old one."""

    node: torch.fx.Node
    of: torch.fx.Node | tuple[Mask | int | torch.fx.Node, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many rows there are in all."""
        return math.prod(self.shape)


@dataclass(eq=False)
class RowsGraph:
    """The new graph. `place`: what old nodes are in it; `masks`: by how many rows they choose; `dims`: along which dim
    of the mask old nodes are where rows stand; `fake`: in which results' types are found; `is_smooth`: whether
    what is made of rows has finite gradients wherever these are finite."""

    fake: Any
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    place: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    dims: dict[torch.fx.Node, int] = field(default_factory=dict)
    masks: dict[Any, Mask] = field(default_factory=dict)
    is_smooth: bool = False

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A node that calls an operator."""
        made = self.graph.call_function(target, args, kwargs)
        with self.fake:
            taken = torch.fx.map_arg((args, kwargs), lambda node: node.meta["val"])
            made.meta["val"] = target(*taken[0], **taken[1])
        return made

    def item(self, value: torch.fx.Node, number: int) -> torch.fx.Node:
        """One of an operator's results."""
        made = self.graph.call_function(operator.getitem, (value, number))
        made.meta["val"] = value.meta["val"][number]
        return made

    def flat(self, mask: Mask) -> torch.fx.Node:
        """The mask in one dim."""
        return self.reshaped(mask.node, (mask.count,))

    def reshaped(self, value: torch.fx.Node, shape: tuple[int, ...]) -> torch.fx.Node:
        """The value in a shape."""
        same = tuple(value.meta["val"].shape) == shape
        return value if same else self.emit(_aten.reshape.default, value, [*shape])

    def permuted(self, value: torch.fx.Node, order: list[int]) -> torch.fx.Node:
        """The value's dims in an order."""
        return value if order == sorted(order) else self.emit(_aten.permute.default, value, order)

    def kept(self, rows: torch.fx.Node, dim: int, mask: Mask, other: torch.fx.Node | None = None) -> torch.fx.Node:
        """Rows along a dim, with another one, or 0, for those that the mask leaves out."""
        value = rows.meta["val"]
        chosen = self.reshaped(mask.node, (mask.count, *([1] * (value.dim() - dim - 1))))
        return self.chosen(chosen, rows) if other is None else self.emit(_aten.where.self, chosen, rows, other)

    def substituted(self, rows: torch.fx.Node, dim: int, mask: Mask) -> torch.fx.Node:
        """Rows along a dim that are chosen, with others in place of those that are not: what these hold may be NaN, and
        what becomes of them infinite, which would be in gradients (0 times infinity). Where an operator on the way has
        gradients that may be infinite, that is the first row that is chosen (if none is, a number at which logarithms,
        roots and quotients are finite); else 0."""
        if self.is_smooth:
            return self.kept(rows, dim, mask)
        flat = self.flat(mask)
        numbers = self.emit(_aten._to_copy.default, flat, dtype=torch.int64)
        first = self.emit(_aten.argmax.default, numbers, 0, True)
        other = self.emit(_aten.index_select.default, rows, dim, first)
        dtype = rows.meta["val"].dtype
        number = self.emit(_aten.scalar_tensor.default, 0.5 if dtype.is_floating_point else 1, dtype=dtype)
        other = self.emit(_aten.where.self, self.emit(_aten.any.default, flat), other, number)
        return self.kept(rows, dim, mask, other)

    def if_some(self, value: torch.fx.Node, mask: Mask) -> torch.fx.Node:
        """A value without rows, beside rows: if none is chosen, a number at which gradients are finite. A mean of no
        rows is NaN, and 0 times NaN would be in gradients of what rows that are left out are made of."""
        dtype = value.meta["val"].dtype
        if not dtype.is_floating_point:
            return value
        number = self.emit(_aten.scalar_tensor.default, 0.5, dtype=dtype)
        return self.emit(_aten.where.self, self.emit(_aten.any.default, self.flat(mask)), value, number)

    def mask_of(self, size: Any) -> Mask:
        """The mask that chooses as many rows."""
        if (mask := self.masks.get(symbol_of(size))) is None:
            raise OtherError
        return mask

    def known(self, symbol: Any, of: tuple[Mask | int | torch.fx.Node, ...]) -> Mask | None:
        """The mask of these parts, if there is one; refused is another one of as many rows."""
        known = next((mask for mask in self.masks.values() if mask.of == of), None)
        if symbol in self.masks and self.masks[symbol] is not known:
            raise OtherError
        return known

    def chosen(self, where: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
        """The value where that is true, else 0."""
        zero = self.emit(_aten.scalar_tensor.default, 0, dtype=value.meta["val"].dtype)
        return self.emit(_aten.where.self, where, value, zero)

    def index(self, index: torch.fx.Node, along: Along, mask: Mask) -> torch.fx.Node:
        """An index that is 0 in rows that the mask leaves out, where it may be anything."""
        place = self.place[index]
        return place if index not in along else self.kept(place, along[index], mask)


def rows_of(node: torch.fx.Node) -> int | None:
    """The dim of an old node's tensors that rows are along; None if there is none. Refused are several such dims."""
    found = set()
    for tensor in tensors_of(node):
        dims = [dim for dim, size in enumerate(tensor.shape) if is_open(size)]
        if len(dims) > 1:
            raise OtherError
        found.add(dims[0] if dims else None)
    if len(found) > 1:
        raise OtherError
    return found.pop() if found else None


def args_of(node: torch.fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node."""
    return node.args


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def is_open(size: Any) -> bool:
    """Whether only data tell a size."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def symbol_of(size: Any) -> Any:
    """What tells an open size from others: what it is made of. None of others."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def same(one: Any, other: Any, depth: int = 8) -> bool:
    """Whether nodes compute the same, of the same operands at that depth."""
    if not isinstance(one, torch.fx.Node) or not isinstance(other, torch.fx.Node):
        return type(one) is type(other) and one == other
    if one is other or depth == 0:
        return one is other
    alike = one.op == other.op == "call_function" and one.target is other.target
    if not alike or len(one.args) != len(other.args) or one.kwargs != other.kwargs:
        return False
    if torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ()):
        return False
    return all(same(a, b, depth - 1) for a, b in zip(one.args, other.args, strict=True))
