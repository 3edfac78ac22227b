"""Layers: the part of a function that repeats. What is known of one of them is known of all.

Bindings are compared by what they compute, on what types, of what: values of their own layer or of the one before it at
the same places, values from before all layers, or parameters of the same type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tvm import ir, relax

from .flow import Flow, operands

_MOST_VALUES = 8  # that go from a layer to the next one: more are no layers that one would cut between


@dataclass(frozen=True)
class Layers:
    """The bindings of a function in order: those before its layers, each layer's, and those after them. `leaving` is
    the value that every layer hands to the next one, the last to what comes after."""

    before: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    after: tuple[str, ...]
    leaving: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.layers)


def find_layers(flow: Flow, inputs: Sequence[str]) -> Layers | None:
    """The layers of a function, which `inputs` go through: those that are most of it; None if nothing repeats, or if
    more than one value goes from layer to layer."""
    varying = flow.below(inputs)
    names = [name for name in flow.bindings if name in varying]
    marks = _marks(flow, names)
    found = [each for period, start, end in _repeats(marks) for each in _layers(flow, names, period, start, end)]
    return max(found, key=lambda each: (each.count * len(each.layers[0]), each.count), default=None)


def _marks(flow: Flow, names: Sequence[str]) -> list[int]:
    """A number per binding: equal ones compute the same on the same types."""
    known: dict[tuple, int] = {}
    return [known.setdefault(_mark(flow.bindings[name]), len(known)) for name in names]


def _mark(binding: relax.Binding) -> tuple:
    value = binding.value
    if isinstance(value, relax.Call):
        name = getattr(value.op, "name", None) or getattr(value.op, "name_hint", str(value.op))
        attrs = 0 if value.attrs is None else ir.structural_hash(value.attrs)
        return (name, attrs, tuple(map(_operand, value.args)), str(binding.var.struct_info))
    if isinstance(value, relax.TupleGetItem):
        return ("field", value.index, str(binding.var.struct_info))
    return (type(value).__name__, ir.structural_hash(value, map_free_vars=True))


def _operand(expr: relax.Expr) -> object:
    if isinstance(expr, relax.Constant):
        return ir.structural_hash(expr)
    return str(expr.struct_info) if isinstance(expr, relax.Var) else str(expr)


def _repeats(marks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(period, start, end) of stretches in which every mark is that of one period earlier; a few of the longest."""
    found = []
    for period in range(1, len(marks) // 2 + 1):
        start = length = 0
        for at in range(period, len(marks) + 1):
            if at < len(marks) and marks[at] == marks[at - period]:
                length += 1
                continue
            if length >= period:
                start = at - length - period
                found.append((period, start, at))
            length = 0
    return sorted(found, key=lambda each: (each[1] - each[2], each[0]))[:4]


def _layers(flow: Flow, names: Sequence[str], period: int, start: int, end: int) -> list[Layers]:
    """The layers of a stretch, at every place in the period where a single value goes from one to the next."""
    found = []
    position = {name: at for at, name in enumerate(names)}
    last = {name: max((position[u] for u in flow.users[name] if u in position), default=-1) for name in names}
    for first in range(start, min(start + period, end - 2 * period + 1)):
        count = (end - first) // period
        cuts = [first + number * period for number in range(count + 1)]
        leaving = [_leaving(names, last, cut, period) for cut in cuts[1:]]
        if any(len(each) != 1 for each in leaving):
            continue
        made = Layers(
            tuple(names[:first]),
            tuple(tuple(names[a:b]) for a, b in pairwise(cuts)),
            tuple(names[cuts[-1] :]),
            tuple(each[0] for each in leaving),
        )
        if _alike(flow, made, set(names)):
            found.append(made)
    return found


def _leaving(names: Sequence[str], last: Mapping[str, int], cut: int, period: int) -> list[str]:
    """The values of the layer before a cut that are used after it; too many are as good as none."""
    return [name for name in names[cut - period : cut] if last[name] >= cut][:_MOST_VALUES]


def _alike(flow: Flow, made: Layers, varying: set[str]) -> bool:
    """Whether every layer takes what the second one takes and hands on to the next one alone, and the results are of
    what comes after them."""
    inside = {name for layer in made.layers for name in layer}
    if inside & set(flow.results) or not made.before:
        return False
    for layer, following in pairwise((*made.layers, made.after)):  # nothing goes further than to the next one
        near = {*layer, *following}
        if any(user in varying and user not in near for name in layer for user in flow.users[name]):
            return False
    taken = [_taken(flow, layer, before, varying) for before, layer in pairwise(made.layers)]
    return all(each == taken[0] for each in taken)


def _taken(flow: Flow, layer: Sequence[str], before: Sequence[str], varying: set[str]) -> list[tuple]:
    """Per operand of a layer where it comes from; of weights, and what follows from them alone, only what they are."""
    places: dict[str, tuple] = {name: ("own", at) for at, name in enumerate(layer)}
    places |= {name: ("before", at) for at, name in enumerate(before)}
    found = []
    for name in layer:
        for value in operands(flow.bindings[name].value):
            found.append(places.get(value) or (("outside", value) if value in varying else ("weight",)))
    return found
