"""What indices are known to be: the order of a sort, its inverse, ends of groups, places in a dim; and which parameters
of a module are looked up in which dims, so that calls can be checked before anything runs. What else is looked up is
checked where that happens, in what is no padding.

ids                 which group each row belongs to, as a topk gives it: no less than 0
order = argsort(ids)
inverse = argsort(order), or arange(n) scattered to the places `order`
ends = cumsum(histc(ids, groups, 0, groups - 1)), of ids in whatever order
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from mesh_tensor.rules.operator.aten import arguments_of

from .ir import Graph, Node, Value

_SAME_ELEMENTS = ("astype", "reshape", "flatten", "expand_dims", "squeeze", "permute_dims", "broadcast_to")


@dataclass(frozen=True)
class IndexCheck:
    """Elements of `parameter`, but for those that are `ignored`, are looked up in a dim of `size`: from `lowest` to
    size - 1."""

    parameter: str
    size: int
    lowest: int
    where: str
    ignored: int | None = None


def index_checks(graph: Graph) -> tuple[IndexCheck, ...]:
    """The parameters that operators look up as they are, or with their elements in other places."""
    origin = {param: _Origin(param.name) for param in graph.params if param.type.dtype in _INTS}
    checks, below_zero, chosen = [], dict[Value, Value](), dict[Value, tuple[str, Value, int | float]]()
    for node in graph.nodes:
        if node.call.name == "less" and number_of(node.inputs[1]) == 0:
            below_zero[node.outputs[0]] = node.inputs[0]
        elif node.call.name in _COMPARED and (number := number_of(node.inputs[1])) is not None:
            chosen[node.outputs[0]] = node.call.name, node.inputs[0], number
        elif node.inputs and node.inputs[0] in origin and _keeps_elements(node):
            origin[node.outputs[0]] = origin[node.inputs[0]]
        elif _without_sign(node, below_zero) and node.inputs[2] in origin:
            origin[node.outputs[0]] = replace(origin[node.inputs[2]], signed=False)
        elif (left := _with_zeros(node, chosen)) is not None and _is_given(origin.get(left[0])):
            origin[node.outputs[0]] = replace(origin[left[0]], ignored=left[1])
        for index, size, from_end in _look_ups(node):
            if index in origin:
                its = origin[index]
                lowest = -size if from_end and its.signed else 0
                checks.append(IndexCheck(its.parameter, size, lowest, node.where, its.ignored))
    return tuple(dict.fromkeys(checks))


@dataclass(frozen=True)
class _Origin:
    """A value has the elements of a parameter: `signed`, if negative ones count from a dim's end; 0 in place of those
    that are `ignored`."""

    parameter: str
    signed: bool = True
    ignored: int | None = None


_COMPARED = ("equal", "not_equal")


def _is_given(origin: _Origin | None) -> bool:
    """Whether a value has all elements of a parameter as they are."""
    return origin is not None and origin.signed and origin.ignored is None


def _with_zeros(node: Node, chosen: Mapping[Value, tuple[str, Value, int | float]]) -> tuple[Value, int] | None:
    """A value of which a node has 0 in place of elements that are one number, and that number."""
    if node.call.name != "where" or node.inputs[0] not in chosen:
        return None
    compared, value, number = chosen[node.inputs[0]]
    kept, instead = node.inputs[1:] if compared == "not_equal" else node.inputs[:0:-1]
    return (value, int(number)) if kept is value and number_of(instead) == 0 else None


def _keeps_elements(node: Node) -> bool:
    same = node.call.name in _SAME_ELEMENTS or node.is_annotation
    return same and node.outputs[0].type.dtype in (node.inputs[0].type.dtype, "int64")


def _without_sign(node: Node, below_zero: Mapping[Value, Value]) -> bool:
    """Whether it makes negative elements larger than any dim, and leaves others as they are: they don't count from the
    end."""
    if node.call.name != "where" or below_zero.get(node.inputs[0]) is not node.inputs[2]:
        return False
    dtype = node.outputs[0].type.dtype
    return dtype in ("int32", "int64") and number_of(node.inputs[1]) == np.iinfo(dtype).max


def number_of(value: Value) -> int | float | None:
    """What a constant of no dims is; None of any other value."""
    known = value.data.data.numpy() if value.data is not None else None
    return known.item() if known is not None and known.ndim == 0 else None


def _look_ups(node: Node) -> Iterator[tuple[Value, int, bool]]:
    """Operands that are looked up: in a dim of that size, and whether negative ones count from its end."""
    call = node.call
    if call.name == "take" and len(node.inputs) == 2:
        mode, axis = call.attr("mode", "fast"), call.attr("axis")
        if mode in ("fast", "nan") and axis is not None:
            yield node.inputs[1], call.inputs[0].shape[call.axis(axis)], mode == "fast"
    elif call.name in ("gather_elements", "scatter_elements"):
        yield node.inputs[1], call.inputs[0].shape[call.axis(call.attr("axis"))], True
    elif call.name == "index_tensor":
        for index, size in zip(node.inputs[1:], call.inputs[0].shape, strict=False):
            yield index, size, True


_EXACT = 2**24  # float32 has all whole numbers up to it
_MOST_GROUPS = 1024  # of a histogram: whole numbers stay in their own bin, whatever is rounded
_INTS = ("int32", "int64")
_NUMBERS = (*_INTS, "float32", "float64")
_RESHAPES = ("reshape", "flatten", "expand_dims", "squeeze", "broadcast_to", "permute_dims")
SORT, HISTOGRAM = "aten.sort.stable", "aten.histc.default"
_INDICES = {"argmax": 0, "argmin": 0, "argsort": 0, "topk": 1, "aten.topk.default": 1, SORT: 1}
_KEEP = (*_RESHAPES, "strided_slice", "split", "concat", "stack", "grad.no_grad")
_LOOK_UPS = ("take", "index_tensor", "gather_elements")


class Orders:
    """The indices of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.makers = graph.makers()
        # What is asked again and again of the same values.
        self.positions, self.below = cache(self._positions), cache(self._below)

    def _positions(self, value: Value) -> tuple[Value, int] | None:
        """A one-dimensional index whose elements are those of the order of a sort, divided by a number and rounded
        down: the order as its sort gave it, and the number."""
        node = self.makers.get(value)
        if node is None or value.type.ndim != 1 or value.type.dtype not in _INTS or value.type.elements >= 2**31:
            return None
        if _sorts(node) and value is node.outputs[_INDICES[node.call.operator]]:
            return value, 1
        if node.call.name == "floor_divide" and (by := number_of(node.inputs[1])) is not None and by >= 1:
            found = self.positions(node.inputs[0])
            return None if found is None else (found[0], found[1] * int(by))
        if node.call.name == "where":
            return self.positions(node.inputs[2]) if self._counts_from_the_end(node) else None
        return self.positions(node.inputs[0]) if _is_same(node) else None

    def taken(self, node: Node) -> tuple[Value, int] | None:
        """The order in which a node takes rows of its first operand, if it does (see `positions`)."""
        return self.positions(node.inputs[1]) if _looks_up_rows(node) else None

    def put_back(self, node: Node) -> Value | None:
        """The order that a node undoes as it takes rows of its first operand."""
        return self._inverse(node.inputs[1]) if _looks_up_rows(node) else None

    def scattered(self, node: Node, reduction: str) -> tuple[Value, int] | None:
        """The order to whose places a node scatters the rows of its last operand."""
        call = node.call
        if call.attr("reduction") != reduction or len(node.inputs) != 3:
            return None
        if call.name == "scatter_nd":
            return self._column(node.inputs[1])
        along = call.name == "scatter_elements" and node.inputs[0].type.ndim == 1
        return self.positions(node.inputs[1]) if along else None

    def source(self, value: Value) -> Value:
        """What has the same elements, perhaps in another order, and is nothing of that itself."""
        node = self.makers.get(value)
        while node is not None and value.type.ndim == 1:
            taken, is_sorted = self.taken(node), node.call.operator == SORT and value is node.outputs[0]
            in_order = taken is not None and taken[1] == 1 and node.inputs[0].type == value.type
            if not (_is_same(node) or in_order or is_sorted):
                break
            value = node.inputs[0]
            node = self.makers.get(value)
        return value

    def are_ends(self, value: Value, ids: Value, groups: int) -> bool:
        """Whether the elements say, of every one of so many groups, how many of the ids are of it or of one before."""
        node = self._past_casts(value)
        if node is None or node.call.name != "cumsum" or node.call.attr("exclusive"):
            return False
        if node.inputs[0].type.ndim != 1 or node.outputs[0].type.dtype not in _NUMBERS:
            return False
        node, below = self._past_casts(node.inputs[0]), self.below(ids)
        if node is None or node.call.operator != HISTOGRAM or below is None:
            return False
        (_, *stated), named = arguments_of(node.call)
        bins = dict(zip(("bins", "min", "max"), stated, strict=False)) | named
        fits = bins == {"bins": groups, "min": 0, "max": groups - 1} and 1 < groups <= _MOST_GROUPS
        return fits and max(below, *ids.type.shape) < _EXACT and self.source(node.inputs[0]) is self.source(ids)

    def _inverse(self, value: Value) -> Value | None:
        """The order whose inverse an index is."""
        node = self.makers.get(value)
        if node is None or value.type.ndim != 1 or value.type.dtype not in _INTS or value.type.elements >= 2**31:
            return None
        if _is_same(node):
            return self._inverse(node.inputs[0])
        found = None
        if _sorts(node) and value is node.outputs[_INDICES[node.call.operator]] and _ascends(node):
            found = self.positions(node.inputs[0])
        elif self._is_range(node.inputs[-1] if node.inputs else value):
            found = self.scattered(node, "update")
        return found[0] if found is not None and found[1] == 1 and found[0].type.shape == value.type.shape else None

    def _column(self, value: Value) -> tuple[Value, int] | None:
        """As `positions`, of an index of one column."""
        node = self.makers.get(value)
        is_column = value.type.ndim == 2 and value.type.shape[1] == 1
        if node is None or not is_column or node.call.name not in ("stack", "expand_dims", "reshape"):
            return None
        return self.positions(node.inputs[0]) if len(node.inputs) == 1 else None

    def _is_range(self, value: Value) -> bool:
        """Whether the elements are 0, 1, 2, ..."""
        node = self._past_casts(value)
        if node is None or node.call.name != "arange" or value.type.ndim != 1:
            return False
        return node.call.literals[:1] == (0,) and node.call.literals[2:] == (1,)

    def _counts_from_the_end(self, node: Node) -> bool:
        """Whether a choice is between an index and, where that is less than 0, something else."""
        test = self.makers.get(node.inputs[0])
        return (
            test is not None
            and test.call.name == "less"
            and test.inputs[0] is node.inputs[2]
            and number_of(test.inputs[1]) == 0
        )

    def _past_casts(self, value: Value) -> Node | None:
        node = self.makers.get(value)
        while node is not None and _is_same(node):
            node = self.makers.get(node.inputs[0])
        return node

    def _below(self, value: Value) -> int | None:
        """A number that all elements of an index are below, none of which is less than 0."""
        node = self.makers.get(value)
        if node is None or value.type.dtype not in _INTS or not node.inputs:
            return None
        if (number := _INDICES.get(node.call.operator)) is not None:
            there = number < len(node.outputs) and value is node.outputs[number]
            whole = node.call.name.startswith("arg") and node.call.attr("axis") is None
            return math.prod(node.inputs[0].type.shape) if whole else max(node.inputs[0].type.shape) if there else None
        if node.call.name in _KEEP or _is_same(node):
            found = [self.below(operand) for operand in node.inputs]
            known = [below for below in found if below is not None]
            return max(known) if len(known) == len(found) else None
        return None


def _sorts(node: Node) -> bool:
    """Whether it sorts all that there is, or makes its order."""
    return node.call.operator in ("argsort", SORT) and node.inputs[0].type.ndim == 1


def sorts_groups(node: Node) -> bool:
    """Whether it puts whole numbers in order, from the lowest to the highest."""
    return _sorts(node) and _ascends(node) and node.inputs[0].type.dtype in ("int32", "int64")


def _ascends(node: Node) -> bool:
    if node.call.name == "argsort":
        return not node.call.attr("descending")
    args, named = arguments_of(node.call)
    return not named.get("descending", args[3] if len(args) > 3 else False)


def _is_same(node: Node) -> bool:
    """Whether the result has the elements of the one operand where they were, as numbers of some other type at most."""
    if len(node.inputs) != 1 or len(node.outputs) != 1:
        return False
    before, after = node.inputs[0].type, node.outputs[0].type
    if node.call.name == "astype":
        return before.dtype in _NUMBERS and after.dtype in _NUMBERS
    return before.ndim == 1 and before == after and node.call.name in (*_RESHAPES, "grad.no_grad")


def _looks_up_rows(node: Node) -> bool:
    """Whether it takes whole rows of its first operand, one for each element of a one-dimensional index."""
    call = node.call
    if call.name not in _LOOK_UPS or len(node.inputs) != 2 or node.inputs[1].type.ndim != 1:
        return False
    if call.name == "take":
        return call.attr("axis") is not None and call.axis(call.attr("axis")) == 0
    return call.name == "index_tensor" or node.inputs[0].type.ndim == 1
