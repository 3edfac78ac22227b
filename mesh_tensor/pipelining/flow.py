"""Flow: the top-level bindings of a Relax function, and which takes what from which. Layers: the part of it that
repeats; what is known of one of them is known of all.

Bindings are compared by what they compute, on what types, of what: values of their own layer or of the one before it at
the same places, values from before all layers, or parameters of the same type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import eq
from typing import Any

from tvm import ir, relax

from mesh_tensor.annotations.annotation import from_attr
from mesh_tensor.annotations.module_annotations import HINTS_ATTR
from mesh_tensor.annotations.named_values import NamedValues
from mesh_tensor.annotations.names import (
    check_module,
    meant_function,
    relax_function,
    source_names,
    unique_names,
    with_flat_parameters,
)
from mesh_tensor.base.dtypes import is_float
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.plan.ir import STATE_ATTR
from mesh_tensor.plan.repeats import UnknownKindError, kind_of, stretches
from mesh_tensor.rules.operator.call import Structure


class Flow:
    """The bindings of `function`, by name, in an order in which they can run. Every variable has a name of its own;
    calls of the module's functions are one binding each."""

    def __init__(self, mod: ir.IRModule, function: str) -> None:
        check_module(mod, "pipeline", takes_imported=True)
        self.function = meant_function(mod, function)
        self.mod = unique_names(with_flat_parameters(mod, self.function))
        self.func = relax_function(self.mod, self.function)
        blocks = self.func.body.blocks[:]  # a slice of TVM's arrays is a list: several times as fast to go through
        self.blocks = [(type(block), {b.var.name_hint: b for b in block.bindings[:]}) for block in blocks]
        self.bindings = {name: b for _, bindings in self.blocks for name, b in bindings.items()}
        self.params = {var.name_hint: var for var in self.func.params}
        self.operands = {name: operands(b.value) for name, b in self.bindings.items()}

    @cached_property
    def sources(self) -> dict[str, str]:
        """From the names that values had where the module comes from to theirs."""
        return source_names(self.func)

    @cached_property
    def named(self) -> NamedValues:
        """What names of callers mean here."""
        return NamedValues(self.mod, self.function)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """What TVM has no words for in annotations, by what they bind."""
        return from_attr((self.func.attrs or {}).get(HINTS_ATTR, {}))

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The names of the tensors that the function returns, in order; tuples are taken apart."""
        return tuple(self._leaves(self.func.body.body))

    @cached_property
    def state(self) -> dict[str, str]:
        """Per parameter that a call leaves another value for: the result that is this value."""
        return {name: self.results[number] for name, number in self._state.items()}

    @cached_property
    def _state(self) -> dict[str, int]:
        return {name: int(number) for name, number in (self.func.attrs or {}).get(STATE_ATTR, {}).items()}

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """The results that callers get: those that are no state."""
        kept = set(self._state.values())
        return tuple(name for number, name in enumerate(self.results) if number not in kept)

    def tree(self, values: Mapping[str, Any]) -> Any:
        """What callers get, with these values in place of the function's variables: without the state, and one result
        beside it as that alone."""
        made = self._tree(self.func.body.body, {**dict.fromkeys(self.state.values()), **values})
        if not self._state:
            return made
        others = made[: len(made) - len(self._state)]  # results that are state come last
        return others[0] if len(others) == 1 else others

    def _tree(self, expr: relax.Expr, values: Mapping[str, Any]) -> Any:
        if isinstance(expr, relax.Tuple):
            return tuple(self._tree(field, values) for field in expr.fields)
        name = expr.name_hint
        return values[name] if name in values else self._tree(self.bindings[name].value, values)

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """Per value: the bindings that take it."""
        found: dict[str, list[str]] = {name: [] for name in (*self.params, *self.bindings)}
        for name, taken in self.operands.items():
            for value in taken:
                found[value].append(name)
        return found

    def origin(self, name: str) -> str:
        """The binding that one is another name of: a variable, or a field of a tuple that is written as one."""
        value = self.bindings[name].value if name in self.bindings else None
        if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
            made = self.bindings.get(self.origin(value.tuple_value.name_hint))
            value = made.value.fields[value.index] if made and isinstance(made.value, relax.Tuple) else None
        return self.origin(value.name_hint) if isinstance(value, relax.Var) else name

    def is_float(self, name: str) -> bool:
        """Whether a value is a tensor of floats."""
        info = (self.params[name] if name in self.params else self.bindings[name].var).struct_info
        return isinstance(info, relax.TensorStructInfo) and is_float(str(info.dtype))

    def above(self, roots: Iterable[str], among: Iterable[str] | None = None) -> set[str]:
        """The bindings that `roots` depend on, and they themselves; if so, only those among some."""
        allowed = self.bindings if among is None else set(among)
        found: set[str] = set()
        todo = [name for name in roots if name in allowed]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [value for value in self.operands[name] if value in allowed]
        return found

    def below(self, roots: Iterable[str]) -> set[str]:
        """The bindings that depend on `roots` (parameters or bindings)."""
        reached = set(roots)
        for name, taken in self.operands.items():
            if not reached.isdisjoint(taken):
                reached.add(name)
        return reached & self.bindings.keys()

    def _leaves(self, expr: relax.Expr) -> list[str]:
        if isinstance(expr, relax.Tuple):
            return [name for field in expr.fields for name in self._leaves(field)]
        if isinstance(expr, relax.Var) and not isinstance(expr.struct_info, relax.TupleStructInfo):
            return [expr.name_hint]
        if isinstance(expr, relax.Var) and expr.name_hint in self.bindings:
            value = self.bindings[expr.name_hint].value
            if isinstance(value, (relax.Tuple, relax.Var)):
                return self._leaves(value)
        return refuse(
            f"the result {expr} is no variable, or a tuple that is not written as one",
            where=f"module function {self.function!r}",
            why="every result has to come from one stage",
            fix="bind each result to a variable, and return a tuple of these",
        )


_STATED = "name values of submodules, as 'blocks.0.norm', or bindings"


def stated_names(names: Any, what: str, fix: str) -> list[str]:
    """Names in a list, or a single one."""
    if isinstance(names, str):
        return [names]
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        refuse(f"{what}={shown(names)}", fix=fix)
    return list(names)


def stated_bindings(flow: Flow, names: Sequence[str]) -> list[str]:
    """The bindings whose statistics are those of each microbatch, by the names of `per_microbatch`."""
    meant, problems = flow.named.meant_by(stated_names(names, "per_microbatch", _STATED))
    problems += [
        f"{name!r} is in a function that is called" for name, (function, _), _ in meant if function != flow.function
    ]
    if problems:
        refuse(problems, where="per_microbatch", fix=_STATED)
    return [flow.origin(value) for _, (_, value), _ in meant]


def operands(expr: relax.Expr) -> list[str]:
    """The variables that an expression takes, by name, each once."""
    free = relax.analysis.free_vars(expr)
    return list(dict.fromkeys(var.name_hint for var in free))


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
    """What a binding computes, on what types."""
    value, refs = binding.value, list[relax.Var]()
    try:
        kind = kind_of(value, refs)
    except UnknownKindError:
        return type(value).__name__, ir.structural_hash(value, map_free_vars=True)
    return kind, *[Structure(var.struct_info) for var in (*refs, binding.var)]


def _repeats(marks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(period, start, end) of stretches in which every mark is that of one period earlier; a few of the longest."""
    found = [
        (period, start, start + size + period)
        for period in range(1, len(marks) // 2 + 1)
        for start, size in stretches(map(eq, marks, marks[period:]))
        if size >= period
    ]
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
    """Whether every layer takes what the second one takes (the first, one value in place of what that is handed) and
    hands on to the next one alone, and the results are of what comes after them."""
    inside = {name for layer in made.layers for name in layer}
    if inside & set(flow.results) or not made.before:
        return False
    for layer, following in pairwise((*made.layers, made.after)):  # nothing goes further than to the next one
        near = {*layer, *following}
        if any(user in varying and user not in near for name in layer for user in flow.users[name]):
            return False
    first, *taken = [_taken(flow, layer, before, varying) for before, layer in pairwise(((), *made.layers))]
    handed = {mine for mine, other in zip(first, taken[0], strict=True) if other[0] == "before"}
    same = all(mine == other or mine in handed for mine, other in zip(first, taken[0], strict=True))
    return len(handed) == 1 and same and all(each == taken[0] for each in taken)


def _taken(flow: Flow, layer: Sequence[str], before: Sequence[str], varying: set[str]) -> list[tuple]:
    """Per operand of a layer where it comes from; of weights, and what follows from them alone, only what they are."""
    places: dict[str, tuple] = {name: ("own", at) for at, name in enumerate(layer)}
    places |= {name: ("before", at) for at, name in enumerate(before)}
    found = []
    for name in layer:
        for value in _places(flow.bindings[name].value):
            found.append(places.get(value) or (("outside", value) if value in varying else ("weight",)))
    return found


def _places(expr: relax.Expr) -> list[str]:
    """The variables that an expression takes, by name, for each place in it; where its places are not known, each once:
    its mark says the rest."""
    refs = list[relax.Var]()
    try:
        kind_of(expr, refs)
    except UnknownKindError:
        return operands(expr)
    return [var.name_hint for var in refs]
