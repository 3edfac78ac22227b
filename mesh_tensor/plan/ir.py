"""Graph: a Relax function as a flat list of operators on values, with the functions that it calls entered.

It is what sharding is decided on. A value knows its global shape; a node knows in which (nested) call it stands, so
that functions can be made again from what was decided.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator import OpCall, TensorType

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


# A function attribute: the name of a parameter -> which result, counted from 0, replaces it in the next call.
STATE_ATTR = "mesh_tensor_state"
ANNOTATE, REDISTRIBUTE = "dist.annotate_sharding", "dist.redistribute"

# A value, or the fields of a tuple.
Tree = Value | tuple["Tree", ...]


@dataclass(frozen=True)
class Interleaved:
    """A parameter's dim is made of `sections`, and is stored in another order: of each section the first of so many
    `parts`, then of each the second, and so on."""

    dim: int
    sections: tuple[int, ...]
    parts: int


@dataclass(eq=False)
class Graph:
    """`nodes` in an order in which they can run; `result` is what the function returns. `state`: results that lie as
    the parameter that they replace in the next call. `stored`: parameters that are in another order than the
    caller's. `prices`: what plans of it are priced by. `manual`: the axes of manual computations."""

    name: str
    mesh: Mesh
    params: list[Value]
    nodes: list[Node]
    result: Tree
    annotations: dict[Value, Annotation] = field(default_factory=dict)
    state: dict[Value, Value] = field(default_factory=dict)
    stored: dict[Value, Interleaved] = field(default_factory=dict)
    prices: Prices = PRICES
    manual: frozenset[str] = frozenset()

    def values(self) -> list[Value]:
        """Every value once: parameters, then constants and results in order of appearance."""
        touched = [v for node in self.nodes for v in (*node.inputs, *node.outputs)]
        return list(dict.fromkeys([*self.params, *touched, *leaves(self.result)]))

    def groups(self) -> dict[str, list[Value]]:
        """The values that are stated to lie alike, by their group's name."""
        found: dict[str, list[Value]] = {}
        for value, annotation in self.annotations.items():
            if annotation.group is not None:
                found.setdefault(annotation.group, []).append(value)
        return found

    def uses(self) -> dict[Value, list[tuple[Node, int]]]:
        """Per value: the nodes that take it, and as which operand."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for position, value in enumerate(node.inputs):
                found.setdefault(value, []).append((node, position))
        return found

    def inner_links(self) -> set[Value]:
        """The values that one operand is, and nothing else: the function does not return them."""
        results = set(leaves(self.result))
        return {value for value, users in self.uses().items() if len(users) == 1 and value not in results}


def nodes_before(graph: Graph, wanted: Collection[Value]) -> set[Node]:
    """The nodes that the values depend on."""
    found, reached = set[Node](), set(wanted)
    for node in reversed(graph.nodes):
        if not reached.isdisjoint(node.outputs):
            found.add(node)
            reached.update(node.inputs)
    return found


def leaves(tree: Tree) -> list[Value]:
    """The values of a tree, in order."""
    return [tree] if isinstance(tree, Value) else [leaf for item in tree for leaf in leaves(item)]


def map_tree(tree: Tree, change: Any) -> Any:
    """The tree with `change(value)` in place of every value; tuples stay tuples."""
    return change(tree) if isinstance(tree, Value) else tuple(map_tree(item, change) for item in tree)
