"""Choices between a value and itself as a constant, as embeddings make of their padding: once gradients were taken, the
value alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .ir import Graph, Node, Value, leaves


def without_fixed_rows(graph: Graph) -> Graph:
    """The graph in which such a value is made under the name of the choice, and conditions that nothing else takes are
    not made."""
    choices = [node for node in graph.nodes if node.call.name == "where"]
    if not choices:
        return graph
    makers = {value: node for node in graph.nodes for value in node.outputs}
    made: dict[Node, Node] = {}
    gone: set[Node] = set()
    kept = {*leaves(graph.result), *graph.annotations}
    users: dict[Value, set[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            users.setdefault(value, set()).add(node)
    for choice in choices:
        maker, constant = makers.get(choice.inputs[-1]), makers.get(choice.inputs[1])
        if maker is None or constant is None or not _is_itself(choice, constant, maker):
            continue
        if users[maker.outputs[0]] == {constant, choice} and kept.isdisjoint({*maker.outputs, *constant.outputs}):
            made[maker] = replace(maker, outputs=choice.outputs)
            gone |= {choice, constant}
    for choice in [node for node in choices if node in gone]:
        gone.update(_alone(choice.inputs[0], makers, users, kept, gone))
    return replace(graph, nodes=[made.get(node, node) for node in graph.nodes if node not in gone]) if made else graph


def _is_itself(choice: Node, constant: Node, maker: Node) -> bool:
    """Whether both of what is chosen from are what `maker` gives, alone and of the choice's type."""
    value = choice.inputs[-1]
    same = constant.call.name == "grad.no_grad" and constant.inputs == (value,) and maker.outputs == (value,)
    return same and choice.outputs[0].type == value.type and maker.scopes == constant.scopes == choice.scopes


def _alone(
    value: Value, makers: dict[Value, Node], users: dict[Value, set[Node]], kept: set[Value], gone: set[Node]
) -> Iterator[Node]:
    """What makes a value for the nodes that are gone alone."""
    maker = makers.get(value)
    while maker is not None and users[value] <= gone and value not in kept and len(maker.outputs) == 1:
        yield maker
        gone.add(maker)
        if not maker.inputs:
            return
        value = maker.inputs[0]
        maker = makers.get(value)
