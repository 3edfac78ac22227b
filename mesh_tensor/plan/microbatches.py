"""Whether a loss is a sum, or a mean, over the rows of a batch: then it is that of its microbatches' losses.

A value is the same for all rows, has a dim of rows, or is a sum or a mean over them. An operator is followed by its
sharding rule: what may be split along the rows treats each by itself. Sums and means that depend on nothing that is
trained, as the number of labels that count, may be used in any way: they are completed over all microbatches first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.call_text import info_of

from .atoms import Atoms, NodeRule, find_atoms
from .gradient import depending_on
from .ir import Graph, Node, Value, leaves
from .node_rules import node_rules

SUM, MEAN = "sum", "mean"
_REDUCTIONS = {"sum": SUM, "mean": MEAN}
_FILLED = ("zeros", "ones", "full")


@dataclass(frozen=True)
class Rows:
    """What a value has to do with the rows of a batch.

    kind     "same" for all of them; "rows": has them; "sum", "mean": over all of them
    at       of "rows": the atom that they are
    uniform  of "same": atoms along which all elements are alike
    """

    kind: str
    at: int = -1
    uniform: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class LossOfRows:
    """A graph whose first result is a sum or a mean (`kind`) over rows; `totals`: values that have to be completed
    first, with how."""

    graph: Graph
    kind: str
    totals: Mapping[Value, str]


@dataclass(eq=False)
class _Search:
    graph: Graph
    atoms: Atoms
    trained: set[Value]
    totals: dict[Value, str]
    shares: set[Value]  # each microbatch's part of a value, which is their sum
    of: dict[Value, Rows] = field(default_factory=dict)


class _Again(Exception):
    """Something was found that changes what was said before."""


def loss_of_rows(graph: Graph, batch: list[str], wrt: list[Value], count: int) -> LossOfRows:
    """The graph of a microbatch, one of `count` alike, with what of it has to be completed over all of them.

    batch  the parameters whose first dim is the rows

    Raises:
        MeshTensorError: the loss is neither a sum nor a mean over rows.
    """
    totals: dict[Value, str] = {}
    shares: set[Value] = set()
    while True:
        atoms = find_atoms(graph, node_rules(graph, replicate_unknown=False))
        search = _Search(graph, atoms, depending_on(graph, wrt), totals, shares)
        try:
            _start(search, batch)
            for node in graph.nodes:
                _follow(search, node)
        except _Mixed as found:
            graph = _with_share(graph, found.node, found.position, count, shares)
        except _Again:
            pass
        else:
            break
    kind = search.of[leaves(graph.result)[0]].kind
    if kind not in (SUM, MEAN):
        _refuse("the loss", "does not depend on the batch" if kind == "same" else "has a dim of rows")
    return LossOfRows(graph, kind, totals)


class _Mixed(_Again):
    """An operand is added to a sum over rows, and is none: each microbatch has to add its share."""

    def __init__(self, node: Node, position: int) -> None:
        super().__init__()
        self.node, self.position = node, position


def _start(search: _Search, batch: list[str]) -> None:
    graph, atoms = search.graph, search.atoms
    for value in graph.values():
        if value in graph.params and value.name in batch:
            if len(atoms.positions(value, 0)) != 1:
                _refuse(f"input {value.name!r}", "its first dim is taken apart")
            search.of[value] = Rows("rows", at=0)
        elif value in graph.params or value.data is not None:
            search.of[value] = Rows("same")


def _follow(search: _Search, node: Node) -> None:
    """What the node's results are."""
    if node.kernel is not None and any(search.of[value].kind != "same" for value in node.inputs):
        _refuse(f"{node.where}: R.call_tir of a kernel", "kernels are not followed")
    kinds = [search.of[value] for value in node.inputs]
    waiting = [position for position, rows in enumerate(kinds) if rows.kind in (SUM, MEAN)]
    if waiting:
        made = [_of_sums(search, node, kinds, waiting)] * len(node.outputs)
    elif any(rows.kind == "rows" for rows in kinds):
        made = _of_rows(search, node, kinds)
    else:
        rule = search.atoms.rules[node]
        made = [Rows("same", uniform=_uniform(node, rule, kinds, n)) for n in range(len(node.outputs))]
    for value, rows in zip(node.outputs, made, strict=True):
        search.of[value] = Rows("same") if value in search.totals else Rows(SUM) if value in search.shares else rows


def _of_sums(search: _Search, node: Node, kinds: list[Rows], waiting: list[int]) -> Rows:
    """Of an operator on sums or means: as they are where it is linear in them."""
    found = {kinds[position].kind for position in waiting}
    others = {rows.kind for position, rows in enumerate(kinds) if position not in waiting}
    linear = frozenset(waiting) in search.atoms.rules[node].rule.linear or node.is_annotation
    if linear and len(found) == 1 and "rows" not in others:
        return Rows(kinds[waiting[0]].kind)
    if node.call.name in ("add", "subtract") and "rows" not in others:
        if SUM not in found:
            return Rows(MEAN)
        position = next(position for position, rows in enumerate(kinds) if rows.kind != SUM)
        raise _Mixed(node, position)
    free = [p for p in waiting if node.inputs[p] not in search.trained]
    if not free:
        _refuse(_words(node), f"it is not linear in a {' and a '.join(sorted(found))} over rows")
    search.totals[node.inputs[free[0]]] = kinds[free[0]].kind
    raise _Again


def _of_rows(search: _Search, node: Node, kinds: list[Rows]) -> list[Rows]:
    """Of an operator on what has rows: it treats each by itself, or takes their sum or mean."""
    rule = search.atoms.rules[node]
    factors = {rule.inputs[n][rows.at] for n, rows in enumerate(kinds) if rows.kind == "rows"}
    (factor,) = factors if len(factors) == 1 else (None,)
    if factor is None or factor in rule.rule.unsplit | rule.rule.positional | set(rule.blocks):
        _refuse(_words(node), "it needs the rows all together")
    for operand, (factors_of, rows) in enumerate(zip(rule.inputs, kinds, strict=True)):
        has = [position for position, name in enumerate(factors_of) if name == factor]
        if has != ([rows.at] if rows.kind == "rows" else [p for p in has if p in rows.uniform]):
            _refuse(_words(node), f"operand {node.inputs[operand].name!r} has a value for each row of the whole batch")
    made = []
    for names in rule.outputs:
        if names.count(factor) == 1 and factor not in rule.reduced:
            made.append(Rows("rows", at=names.index(factor)))
        elif factor in rule.reduced and node.call.name in _REDUCTIONS:
            made.append(Rows(_REDUCTIONS[node.call.name]))
        else:
            _refuse(_words(node), "it combines rows, and is neither R.sum nor R.mean")
    return made


def _uniform(node: Node, rule: NodeRule, kinds: list[Rows], number: int) -> frozenset[int]:
    """The atoms of a result, of operands that are the same for all rows, along which its elements are alike."""
    names = rule.outputs[number]
    if node.call.name in _FILLED:
        return frozenset(range(len(names)))
    alike = set()
    for position, name in enumerate(names):
        uses = [
            place in rows.uniform
            for factors, rows in zip(rule.inputs, kinds, strict=True)
            for place, other in enumerate(factors)
            if other == name
        ]
        if name is not None and name not in rule.rule.positional and all(uses or [node.call.name == "broadcast_to"]):
            alike.add(position)
    return frozenset(alike)


def _with_share(graph: Graph, node: Node, position: int, count: int, shares: set[Value]) -> Graph:
    """The graph with an operand of a node divided by `count`, which is one of the `shares`."""
    value = node.inputs[position]
    variable = relax.Var(value.name, info_of(value.type))
    divided = relax.op.multiply(variable, relax.const(1.0 / count, value.type.dtype))
    call = op_call(relax.BlockBuilder().normalize(divided))
    factor = Value(f"{value.name}_share", call.inputs[1], call.expr.args[1])
    part = Value(f"{value.name}_part", value.type)
    shares.add(part)
    made = Node(call, (value, factor), (part,), node.scopes, node.where)
    inputs = tuple(part if n == position else v for n, v in enumerate(node.inputs))
    nodes = [new for old in graph.nodes for new in ([made, replace(old, inputs=inputs)] if old is node else [old])]
    return replace(graph, nodes=nodes)


def _words(node: Node) -> str:
    return f"{node.where}: R.{node.call.name}"


def _refuse(what: str, why: str) -> None:
    refuse(
        f"{what} can't be taken in microbatches: {why}",
        where="a training step with accumulate=",
        why="the loss has to be a sum or a mean over the rows of the batch, or a quotient of such sums whose divisor "
        "does not depend on parameters",
        fix="write the loss as one, or leave accumulate out",
    )
