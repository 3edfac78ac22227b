"""Rows that are sorted by group, computed with row by row, and put back: computed with where they stand.

    order = argsort(ids)
    rows = take(x, order // 2)                       rows = every row of x twice
    y = mesh.grouped_matmul(rows, w, ends)           y = mesh.looked_up_matmul(rows, w, ids)
    z = take(f(y), argsort(order))                   z = f(y)

Devices that have some of the rows compute with these; sorted, they would need all of them. Each sorts its own to
multiply them (see the target).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from tvm import relax

from mesh_tensor.rules.operator import OpRule
from mesh_tensor.rules.operator.linear_algebra import GROUPED, looked_up_call
from mesh_tensor.rules.operator.rule import atoms_of, has_rule, rule_of

from .batch_kinds import placed_factors
from .expansion import Expansion, Make
from .ir import Graph, Node, Value, leaves, nodes_before
from .orders import HISTOGRAM, SORT, Orders, sorts_groups

op = relax.op


def rows_in_place(graph: Graph) -> Graph:
    """The graph in which such rows stay where they stood before they were sorted, where all that is made of them is
    made row by row until they are put back; what only sorted them is not made."""
    if graph.loops or graph.manual or not any(map(sorts_groups, graph.nodes)):
        return graph
    made = _Sorted(graph).made
    if not made:
        return graph
    wanted = {*graph.kept(), *graph.state.values()}
    return replace(graph, nodes=nodes_before(list(_rewritten(graph, made, wanted)), wanted))


def _rewritten(graph: Graph, made: Mapping[Node, Make | None], wanted: Collection[Value]) -> Iterator[Node]:
    """The nodes; those that give what they take, sorted or put back, only where that has to have its name."""
    same = dict[Value, Value]()
    for before in graph.nodes:
        node = _taking(before, same)
        if before not in made:
            yield node
        elif (make := made[before]) is not None:
            yield from _written(node, make, same)
        else:
            if len(node.outputs) > 1:  # a sort, of which somebody may take the order
                sorted_, *rest = node.outputs
                yield replace(node, outputs=(Value(f"{sorted_.name}_sorted", sorted_.type), *rest))
            if node.outputs[0] in wanted:
                yield from _written(node, lambda made: made.given[:1], same)
            else:
                same[node.outputs[0]] = node.inputs[0]


def _taking(node: Node, same: Mapping[Value, Value]) -> Node:
    return replace(node, inputs=tuple([same.get(value, value) for value in node.inputs]))


def _written(node: Node, make: Make, same: Mapping[Value, Value]) -> list[Node]:
    """The nodes in the place of one, which give what that gave first."""
    return [_taking(one, same) for one in Expansion(replace(node, outputs=node.outputs[:1])).nodes(make)]


class _Sorted:
    """`made`: by node, what writes what is in its place, of the orders that can be left out."""

    def __init__(self, graph: Graph) -> None:
        self._orders = Orders(graph)
        self._sorts = {value: node for node in graph.nodes if sorts_groups(node) for value in node.outputs}
        self._rows: dict[Value, Value] = {}  # of values whose rows are in an order: that order
        self._kept: set[Value] = set()  # orders in which something is needed
        found = {node: how for node in graph.nodes if (how := self._how(node)) is not None}
        results = {*leaves(graph.result), *graph.state.values()}
        self._kept.update(order for value, order in self._rows.items() if value in results)
        self.made = {node: write for node, (order, write) in found.items() if order not in self._kept}

    def _how(self, node: Node) -> tuple[Value, Make | None] | None:
        """Of a node that leads into an order, or out of it, or goes by it: the order, and what writes the same for rows
        in place; None for what these are already."""
        if (taken := self._taken(node)) is not None:
            order, write = taken
            self._rows[node.outputs[0]] = order
            return order, write
        orders = {self._rows[value] for value in node.inputs if value in self._rows}
        if len(orders) != 1:
            self._kept |= orders
            return None
        (order,) = orders
        sorted_ = [number for number, value in enumerate(node.inputs) if value in self._rows]
        if sorted_ == [0] and self._orders.put_back(node) is order:
            return order, None
        if (by := self._added_to(node, order, sorted_)) is not None:
            return order, partial(_summed, by)
        if sorted_ == [0] and (ids := self._group_ids(node, order)) is not None:
            self._rows[node.outputs[0]] = order
            return order, partial(_looked_up, ids)
        if _is_row_wise(node, sorted_):
            self._rows |= dict.fromkeys(node.outputs, order)
        elif node.call.operator != HISTOGRAM:  # of elements in any order
            self._kept.add(order)
        return None

    def _taken(self, node: Node) -> tuple[Value, Make | None] | None:
        """What is taken in an order, of rows that stand in none."""
        if node.call.operator == SORT and node.inputs[0] not in self._rows:
            return (node.outputs[1], None) if node.inputs[0].type.ndim == 1 else None
        taken = self._orders.taken(node)
        if taken is None or node.inputs[0] in self._rows:
            return None
        order, by = taken
        if node.inputs[0].type.shape[0] * by != order.type.elements:
            return None
        return order, None if by == 1 else partial(_repeated, by)

    def _added_to(self, node: Node, order: Value, sorted_: list[int]) -> int | None:
        """If a node adds rows to those that they were taken of, as many each: how many."""
        if sorted_ != [2] or (found := self._orders.scattered(node, "add")) is None or found[0] is not order:
            return None
        data, rows = node.inputs[0].type.shape, node.inputs[2].type.shape
        return found[1] if (data[0] * found[1], *data[1:]) == rows == (order.type.elements, *rows[1:]) else None

    def _group_ids(self, node: Node, order: Value) -> Value | None:
        """Of a node that multiplies groups of rows, which matrix each row meets."""
        sort = self._sorts.get(order)
        if node.call.operator != GROUPED or len(node.inputs) != 3 or sort is None or sort.scopes != node.scopes:
            return None
        (ids,), groups = sort.inputs, node.inputs[1].type.shape[0]
        return ids if self._orders.are_ends(node.inputs[2], ids, groups) else None


def _is_row_wise(node: Node, sorted_: list[int]) -> bool:
    """Whether each row of the results is made of the same rows of these operands, wherever it stands."""
    if node.kernel is not None or node.is_annotation or not has_rule(node.call.operator):
        return False
    rule = rule_of(node.call)
    found = {atoms_of(rule.inputs[number][0]) if rule.inputs[number] else () for number in sorted_}
    found |= {atoms_of(dims[0]) if dims else () for dims in rule.outputs}
    (rows,) = found if len(found) == 1 else ((),)
    firsts = {(0, number) for number in sorted_} | {(1, number) for number in range(len(rule.outputs))}
    return bool(rows) and set(rows).isdisjoint(_others(rule, firsts))


def _others(rule: OpRule, firsts: set[tuple[int, int]]) -> Iterator[str]:
    """The factors of all dims but the first ones of these tensors, and those along which places count."""
    for side, tensors in enumerate((rule.inputs, rule.outputs)):
        for number, dims in enumerate(tensors):
            for dim in dims[1:] if (side, number) in firsts else dims:
                yield from atoms_of(dim)
    yield from (*placed_factors(rule), *rule.reduced, *rule.alike, *rule.alike.values())


def _repeated(by: int, made: Expansion) -> list[relax.Var]:
    """So many rows for each."""
    x, (rows, *rest) = made.given[0], made.node.inputs[0].type.shape
    many = made(op.broadcast_to(made(op.expand_dims(x, [1])), relax.ShapeExpr([rows, by, *rest])))
    return [made(op.reshape(many, [rows * by, *rest]))]


def _summed(by: int, made: Expansion) -> list[relax.Var]:
    """So many rows as one, added to what is there."""
    (data, _, rows), shape = made.given, made.node.inputs[0].type.shape
    each = made(op.reshape(rows, [shape[0], by, *shape[1:]]))
    return [made(op.add(data, made(op.sum(each, [1]))))]


def _looked_up(ids: Value, made: Expansion) -> list[relax.Var]:
    """Each row by the matrix that its id says."""
    x, weight, _ = made.given
    return [made(looked_up_call(x, weight, made.variable(ids), made.node.outputs[0].type.dtype))]
