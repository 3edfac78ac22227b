"""Graph: a Relax function as a flat list of operators on values, with the functions that it calls entered.

It is what sharding is decided on. A value knows its global shape; a node knows in which (nested) call it stands, so
that functions can be made again from what was decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from tvm import relax, tirx

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.joined import Joined
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator import OpCall, TensorType
from mesh_tensor.rules.operator.manual import MARKS

from .prices import PRICES, Prices


@dataclass(eq=False)
class Value:
    """A tensor of the graph. `data` is set for constants."""

    name: str
    type: TensorType
    data: relax.Constant | None = None

    def __repr__(self) -> str:
        return f"{self.name}: {self.type.dtype}{list(self.type.shape)}"

    @property
    def info(self) -> relax.TensorStructInfo:
        """Its type in Relax."""
        return relax.TensorStructInfo(self.type.shape, self.type.dtype)

    def variable(self) -> relax.Var:
        """A variable of Relax that stands for it."""
        return relax.Var(self.name, self.info)


@dataclass(frozen=True)
class Scope:
    """A call of a function: `site` tells calls of the same function apart."""

    function: str
    site: int


Scopes = tuple[Scope, ...]  # outer calls before inner ones


@dataclass(eq=False)
class Node:
    """One operator: `call` on `inputs` gives `outputs`. `kernel` is the TIR function of a call_tir, `flops` those of
    one run of it, if they are counted already. `where` names the binding for messages."""

    call: OpCall
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    scopes: tuple[Scope, ...]
    where: str
    kernel: tirx.PrimFunc | None = None
    flops: int | None = None

    @property
    def is_annotation(self) -> bool:
        """It only states a layout: its output is its input."""
        return self.call.name in (ANNOTATE, REDISTRIBUTE)

    @property
    def names(self) -> tuple[str, ...]:
        """What its results are called, which tells it from other nodes."""
        return tuple([value.name for value in self.outputs])

    @cached_property
    def mark(self) -> str:
        """What of a loop it marks, if it does (a key of `rules.operator.loops.MARKS`)."""
        name = self.call.operator
        return name if name in MARKS else ""


# A function attribute: the name of a parameter -> which result, counted from 0, replaces it in the next call.
STATE_ATTR = "mesh_tensor_state"
# A function attribute: how many rows each mask chooses from, of a function that computes all of them.
CHOSEN_ROWS_ATTR = "mesh_tensor_chosen_rows"
ANNOTATE, REDISTRIBUTE = "dist.annotate_sharding", "dist.redistribute"

UNKNOWN_TIMES = 16  # a loop of which only data says how long it is

# A value, or the fields of a tuple.
T = TypeVar("T")
Tree = Value | tuple["Tree", ...]


@dataclass(frozen=True)
class Interleaved:
    """A parameter's dim is made of `sections`, and is stored in another order: of each section the first of so many
    `parts`, then of each the second, and so on."""

    dim: int
    sections: tuple[int, ...]
    parts: int


@dataclass(frozen=True, eq=False)
class GraphLoop:
    """A part of a graph that runs several times: the nodes that stand in its scope. Nodes that mark it say what enters
    it before, what it begins the next time with, which rows it gives, and, in a scope of its own, whether it goes on.

    `count`: how often it runs, None where a test says it, before every time. `entered`: by what a carried value is in
    the end, what it is in the loop. `where` names its binding."""

    count: int | None
    entered: dict[Value, Value]
    where: str

    @property
    def times(self) -> int:
        """How often it runs, or is taken to run."""
        return UNKNOWN_TIMES if self.count is None else self.count


@dataclass(eq=False)
class Graph:
    """`nodes` in an order in which they can run; `result` is what the function returns. `state`: by parameter the
    result that replaces it in the next call, and lies as it. `stored`: parameters that are in another order than the
    caller's. `prices`: what plans of it are priced by; `decided`: by the names of what nodes give, what axes split
    in them, where they may, whatever is cheap. `loops`: by the scope that their nodes stand in. `manual`: the axes of
    manual computations. `chosen_rows`: of how many rows each mask chooses some, where all are computed."""

    name: str
    mesh: Mesh
    params: list[Value]
    nodes: list[Node]
    result: Tree
    annotations: dict[Value, Annotation] = field(default_factory=dict)
    state: dict[Value, Value] = field(default_factory=dict)
    stored: dict[Value, Interleaved] = field(default_factory=dict)
    prices: Prices = PRICES
    decided: Mapping[tuple[str, ...], Mapping[str, str]] = field(default_factory=dict)
    loops: dict[Scope, GraphLoop] = field(default_factory=dict)
    manual: frozenset[str] = frozenset()
    chosen_rows: tuple[int, ...] = ()

    def values(self) -> list[Value]:
        """Every value once: parameters, then constants and results in order of appearance."""
        touched = [v for node in self.nodes for v in (*node.inputs, *node.outputs)]
        return list(dict.fromkeys([*self.params, *touched, *leaves(self.result)]))

    def alike(self) -> list[list[Value]]:
        """The values that lie alike: groups, and what loops carry, before a step and after it, unless something is
        stated of one of them, or it is not made in the loop."""
        found = list(self.groups().values())
        inside = {value for node in self.nodes if self.loops_of(node) for value in node.outputs}
        free = inside.difference(self.annotations)
        joined = Joined[Value]()
        for now, then, _ in self.carried():
            if now not in self.annotations and then in free:
                joined.join(now, then)
        return [*found, *joined.sets()]

    def groups(self) -> dict[str, list[Value]]:
        """The values that are stated to lie alike, by their group's name."""
        found: dict[str, list[Value]] = {}
        for value, annotation in self.annotations.items():
            if annotation.group is not None:
                found.setdefault(annotation.group, []).append(value)
        return found

    def loops_of(self, node: Node) -> tuple[Scope, ...]:
        """The loops that a node stands in, the outermost first."""
        return tuple([scope for scope in node.scopes if scope in self.loops]) if self.loops else ()

    def times(self, scopes: tuple[Scope, ...]) -> int:
        """How often what stands in these scopes runs."""
        return math.prod([self.loops[scope].times for scope in scopes if scope in self.loops])

    def carried(self) -> Iterator[tuple[Value, Value, Value]]:
        """Of every value that a loop carries: what it is in the loop, what it is there the next time, and in the
        end."""
        for node in self.nodes:
            if node.mark == "loop.next":
                (loop,) = self.loops_of(node)[-1:]
                yield self.loops[loop].entered[node.outputs[0]], node.inputs[0], node.outputs[0]

    def uses(self) -> dict[Value, list[tuple[Node, int]]]:
        """Per value: the nodes that take it, and as which operand."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for position, value in enumerate(node.inputs):
                found.setdefault(value, []).append((node, position))
        return found

    def makers(self) -> dict[Value, Node]:
        """Per value that a node makes: that node."""
        return {value: node for node in self.nodes for value in node.outputs}

    def kept(self) -> set[Value]:
        """The values that stay whatever is written otherwise: what is returned, and of what a layout is stated."""
        return {*leaves(self.result), *self.annotations}

    def inner_links(self) -> set[Value]:
        """The values that one operand is, and nothing else: the function does not return them."""
        results = set(leaves(self.result))
        return {value for value, users in self.uses().items() if len(users) == 1 and value not in results}


def chosen_rows(func: relax.Function) -> tuple[int, ...]:
    """Of how many rows each mask chooses some, in a function that computes all of them."""
    return tuple(int(count) for count in (func.attrs or {}).get(CHOSEN_ROWS_ATTR, ()))


def nodes_before(
    nodes: Sequence[Node], wanted: Collection[Value], stays: Callable[[Node], bool] = lambda node: False
) -> list[Node]:
    """Those of the nodes that the values, or a node which `stays`, depend on."""
    found, taken = list[Node](), set(wanted)
    for node in reversed(nodes):
        if stays(node) or not taken.isdisjoint(node.outputs):
            found.append(node)
            taken.update(node.inputs)
    return found[::-1]


def leaves(tree: T | tuple[Any, ...]) -> list[T]:
    """What a tree has that is no tuple, in order."""
    return [leaf for item in tree for leaf in leaves(item)] if isinstance(tree, tuple) else [tree]


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with `change(leaf)` in place of every leaf; tuples stay tuples."""
    return tuple([map_tree(item, change) for item in tree]) if isinstance(tree, tuple) else change(tree)
