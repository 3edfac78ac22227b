"""Attention taken apart. Where a mask looks at positions of queries that are split, it becomes an operand. Where keys
are split, and less is sent so than to gather them, every device attends to its own: the largest score of a row, the sum
of what exp makes of its scores, and of the values that are weighed with it, are combined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from tvm import relax

from mesh_tensor.base.dtypes import TensorType, is_float
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.call import OpCall, op_call
from mesh_tensor.rules.operator.cost import class_of, count_flops
from mesh_tensor.rules.operator.vjp import VJP, vjp_call, vjp_of

from .atoms import Atoms
from .decide import Decider
from .expansion import Expansion, Known, Make, of_node, wide
from .ir import Graph, Node, Value
from .propagate import Layouts

op = relax.op
_ATTENTION = ("nn.attention", "nn.attention_bias")
_QUERIES, _KEYS, _VALUES, _BIAS = range(4)


class AttentionParts:
    """How attention and its gradients are taken apart, for the layouts of a graph's values."""

    def __init__(self, graph: Graph, atoms: Atoms, layouts: Layouts) -> None:
        self._graph, self._atoms, self._layouts = graph, atoms, layouts
        self._made = graph.makers()
        self._moved: set[tuple] = set()  # attention that is left as it is: its gradient has the same operands there
        self._decider = Decider(graph.mesh, atoms, layouts, prices=graph.prices)

    def apart(self, node: Node, known: Known) -> list[Node] | None:
        """The nodes that it becomes, if it is attention, and they take less."""
        call = of_node(node)
        if call.name not in _ATTENTION or not is_float(node.inputs[0].type.dtype) or not _has_known_mask(call):
            return None
        is_gradient = node.call.operator == VJP
        operands = _operands(node)
        if axes := self._over_keys(operands):
            tried = dict(known)
            nodes = Expansion(node, tried).nodes(_parts_gradient if is_gradient else _parts)
            if self._in_parts(node, operands, axes, nodes, known) < self._gathered(node, operands, axes):
                known.update(tried)
                return nodes
            self._moved.add(_key(node, "moved"))
        masked = call.name == "nn.attention" and call.attr("causal_mask") is not None
        if masked and self._split(operands[_QUERIES], 1):
            make: Make = _masked_gradient if is_gradient else _masked
            return Expansion(node, known).nodes(make)
        return None

    def _split(self, value: Value, dim: int) -> list[str]:
        """The axes that split a dim."""
        layout = self._layouts.of[value]
        return [axis for position in self._atoms.positions(value, dim) for axis in layout.axes_of(position)]

    def _over_keys(self, operands: dict[int, Value]) -> list[str]:
        """The axes that split the positions of keys or values."""
        found = [axis for n in (_KEYS, _VALUES) if n in operands for axis in self._split(operands[n], 1)]
        return [axis for axis in dict.fromkeys(found) if self._graph.mesh.size(axis) > 1]

    def _change(self, value: Value, src: Sharding, dst: Sharding) -> int:
        return self._graph.prices.change(self._atoms.shape(value), value.type.dtype, src, dst)

    def _gathered(self, node: Node, operands: dict[int, Value], axes: Sequence[str]) -> int:
        """What the node takes as it is: of keys that heads share, what is there before they are repeated is sent."""
        layouts, decision = self._layouts.of, self._decider.decide(node)
        repeated = {id(operands[n]): self._repeated(operands[n]) for n in (_KEYS, _VALUES) if n in operands}
        split = decision.split
        cost = 0
        moved = operands.values() if _key(node, "moved") in self._moved else ()
        for value, needed in zip(node.inputs, decision.needed, strict=True):
            if self._split(operands[_QUERIES], 1):  # queries stay where they are
                needed = layouts[value].with_replicate(*axes) if id(value) in repeated else needed
                needed = layouts[value] if value is operands[_QUERIES] else needed
                split = split | dict.fromkeys(self._split(operands[_QUERIES], 1), "q")
            if value in moved:
                continue
            whole = not set(axes) & set(needed.as_dict())
            cost += self._change(value, layouts[value], needed) // (repeated.get(id(value), 1) if whole else 1)
        for value, produced in zip(node.outputs, decision.produced, strict=True):
            cost += self._change(value, produced, layouts[value]) if split is decision.split else 0
        parts = math.prod(self._graph.mesh.size(axis) for axis in split)
        return cost + self._graph.prices.work(node, count_flops(node.call)) // parts

    def _repeated(self, value: Value) -> int:
        """How often a value has each element of what it is made of by views."""
        least, node = value.type.elements, self._made.get(value)
        while node is not None and len(node.inputs) == 1 and class_of(node.call.name) == "view":
            least = min(least, node.inputs[0].type.elements)
            node = self._made.get(node.inputs[0])
        return max(1, value.type.elements // max(1, least))

    def _in_parts(
        self, node: Node, operands: dict[int, Value], axes: Sequence[str], nodes: Sequence[Node], known: Known
    ) -> int:
        """What the nodes take: what belongs to queries is there on all devices, and is summed over them."""
        layouts, queries = self._layouts.of, operands[_QUERIES]
        of_keys = {operands[n].type for n in (_KEYS, _VALUES) if n in operands}
        cost = sum(
            self._change(value, layouts[value], layouts[value].with_replicate(*axes))
            for value in node.inputs
            if value not in operands.values() or value is queries
        )
        wrt: Sequence[int] = (_QUERIES,)
        rows = 1  # sums are sent with what is weighed
        if node.call.operator == VJP:
            wrt, rows = vjp_of(node.call).wrt, 1 if _key(node, "sums") in known else 3
        cost += rows * self._row(queries, axes)
        for number, value in zip(wrt, node.outputs, strict=True):
            whole = layouts[value].with_replicate(*axes)
            if number == _QUERIES:
                cost += self._change(value, _partial(whole, axes), layouts[value])
            elif value.type in of_keys:
                made = layouts[operands[number]] if number in operands else layouts[value]
                cost += self._change(value, made, layouts[value])
        split = {*axes, *layouts[queries].as_dict()}
        parts = math.prod(self._graph.mesh.size(axis) for axis in split)
        return cost + sum(self._graph.prices.work(each, count_flops(each.call)) for each in nodes) // parts

    def _row(self, queries: Value, axes: Sequence[str]) -> int:
        """What it takes to combine a number for each query and head."""
        shape, whole = self._atoms.shape(queries), self._layouts.of[queries].with_replicate(*axes)
        features = self._atoms.positions(queries, 3)
        shape = tuple(1 if position in features else size for position, size in enumerate(shape))
        return self._graph.prices.change(shape, wide(queries.type.dtype), _partial(whole, axes), whole)


def _partial(layout: Sharding, axes: Sequence[str]) -> Sharding:
    for axis in axes:
        layout = layout.with_partial(axis, "sum")
    return layout


def _operands(node: Node) -> dict[int, Value]:
    """By their numbers, the operands of attention that a node has: that of which it is the gradient may lack some."""
    given = vjp_of(node.call).given if node.call.operator == VJP else range(len(node.inputs))
    return dict(zip(given, node.inputs, strict=False))


def _has_known_mask(call: OpCall) -> bool:
    """Whether its mask is one that attention is run with: others are refused where it would be."""
    kind, (queries, keys) = call.attr("causal_mask"), (tensor.shape[1] for tensor in call.inputs[:2])
    return queries <= keys if kind == "BottomRight" else kind in (None, "TopLeft") and call.attr("window_size") is None


def _key(node: Node, what: str) -> tuple:
    """What is known of the scores of a node."""
    operands, call = _operands(node), of_node(node)
    masked = (call.attr("causal_mask"), call.attr("window_size"))
    return what, operands[_QUERIES], operands[_KEYS], operands.get(_BIAS), call.attr("scale"), masked, node.scopes


def _heads(call: OpCall) -> _Heads:
    queries, keys = (call.inputs[n].shape[2] for n in (_QUERIES, _KEYS))
    return _Heads(keys, queries // max(1, keys))


@dataclass(frozen=True)
class _Heads:
    """Heads of queries as (heads of keys, how many share one), where they are more: `h` has their labels."""

    keys: int
    shared: int

    @property
    def h(self) -> str:
        return "h" if self.shared == 1 else "hg"

    def apart(self, made: Expansion, x: relax.Var, dim: int) -> relax.Var:
        """A tensor whose heads are dim `dim`."""
        if self.shared == 1:
            return x
        shape = list(map(int, x.struct_info.shape))
        heads = [1, 1] if shape[dim] == 1 else [self.keys, self.shared]
        return made(op.reshape(x, [*shape[:dim], *heads, *shape[dim + 1 :]]))

    def together(self, made: Expansion, x: relax.Var, shape: Sequence[int]) -> relax.Var:
        """The tensor with its heads in one dim."""
        return x if self.shared == 1 else made(op.reshape(x, list(shape)))


def _scored(made: Expansion) -> tuple[dict[int, relax.Var], relax.Var]:
    """What is given, and exp of every score less the largest of its row, (batch, heads, queries, keys): 0 in rows
    that see nothing."""
    call = of_node(made.node)
    given, dtype = dict(zip(_operands(made.node), made.wide(), strict=False)), wide(call.inputs[0].dtype)
    heads = _heads(call)
    given[_QUERIES] = made(op.multiply(heads.apart(made, given[_QUERIES], 2), _scale(call)))
    scores = made(op.einsum((given[_QUERIES], given[_KEYS]), f"bq{heads.h}d,bkhd->b{heads.h}qk"))
    masks = [given[_BIAS]] if _BIAS in given else []
    masks += [made.cast(_seen(made, call), dtype)] if call.attr("causal_mask") is not None else []
    for mask in masks:
        scores = made(op.add(scores, heads.apart(made, mask, 1)))
    lowest = relax.const(numpy.finfo(dtype).min, dtype)
    largest = made.once(_key(made.node, "largest"), lambda: made(op.maximum(made(op.max(scores, -1, True)), lowest)))
    return given, made(op.exp(made(op.subtract(scores, largest))))


def _no_less_than_one(made: Expansion, sums: relax.Var) -> relax.Var:
    """Sums of powers, of which the largest is 1: only those of rows that see nothing are less."""
    return made(op.maximum(sums, relax.const(1.0, sums.struct_info.dtype)))


def _parts(made: Expansion) -> list[relax.Var]:
    """Sums and weighed values are summed as one."""
    call = of_node(made.node)
    heads, features = _heads(call), call.inputs[_VALUES].shape[3]
    given, powers = _scored(made)
    weighed = made(op.einsum((powers, given[_VALUES]), f"b{heads.h}qk,bkhe->b{heads.h}qe"))
    both = made(op.concat([weighed, made(op.sum(powers, -1, True))], -1))
    weighed = made(op.strided_slice(both, [-1], [0], [features]))
    sums = made.once(
        _key(made.node, "sums"),
        lambda: _no_less_than_one(made, made(op.strided_slice(both, [-1], [features], [features + 1]))),
    )
    queries_first = (0, 3, 1, 2, 4) if heads.shared > 1 else (0, 2, 1, 3)
    result = made(op.permute_dims(made(op.divide(weighed, sums)), queries_first))
    return [heads.together(made, result, call.outputs[0].shape)]


def _parts_gradient(made: Expansion) -> list[relax.Var]:
    """Of queries, summed over keys; of keys, of values, of what is added to scores, where these are."""
    node = made.node
    call, stated = of_node(node), vjp_of(node.call)
    heads, shapes = _heads(call), [tensor.shape for tensor in call.inputs]
    given, powers = _scored(made)
    sums = made.once(_key(node, "sums"), lambda: _no_less_than_one(made, made(op.sum(powers, -1, True))))
    weights, seed = made(op.divide(powers, sums)), heads.apart(made, made.wide()[-1], 2)
    scores, h = f"b{heads.h}qk", heads.h
    found: dict[int, relax.Var] = {}
    if _VALUES in stated.wrt:
        found[_VALUES] = made(op.einsum((weights, seed), f"{scores},bq{h}e->bkhe"))
    if set(stated.wrt) != {_VALUES}:
        towards = made(op.einsum((seed, given[_VALUES]), f"bq{h}e,bkhe->{scores}"))
        along = made(op.sum(made(op.multiply(weights, towards)), -1, True))
        of_scores = made(op.multiply(weights, made(op.subtract(towards, along))))
    if _QUERIES in stated.wrt:
        of_queries = made(op.einsum((of_scores, given[_KEYS]), f"{scores},bkhd->bq{h}d"))
        scaled = made(op.multiply(of_queries, _scale(call)))
        found[_QUERIES] = heads.together(made, scaled, shapes[_QUERIES])
    if _KEYS in stated.wrt:  # queries are scaled
        found[_KEYS] = made(op.einsum((of_scores, given[_QUERIES]), f"{scores},bq{h}d->bkhd"))
    if _BIAS in stated.wrt:
        whole = heads.together(
            made, of_scores, (*shapes[_QUERIES][:1], shapes[_QUERIES][2], shapes[_QUERIES][1], shapes[_KEYS][1])
        )
        dims = [dim for dim, size in enumerate(shapes[_BIAS]) if size != whole.struct_info.shape[dim]]
        found[_BIAS] = made(op.sum(whole, dims, True)) if dims else whole
    return [found[number] for number in stated.wrt]


def _scale(call: OpCall) -> relax.Constant:
    """What products of queries and keys are multiplied with."""
    stated = call.attr("scale")
    return relax.const(1 / math.sqrt(call.inputs[0].shape[3]) if stated is None else stated, wide(call.inputs[0].dtype))


def _masked(made: Expansion) -> list[relax.Var]:
    call = made.node.call
    return [made(op.nn.attention(*made.given, _seen(made, call), call.attr("scale")))]


def _masked_gradient(made: Expansion) -> list[relax.Var]:
    stated, mask = vjp_of(made.node.call), _seen(made, of_node(made.node))
    bias = op.nn.attention(*_stand_ins(stated.operands), mask, stated.forward.attr("scale"))
    *given, seed = made.given
    operands = {**dict(zip(stated.given, given, strict=True)), 3: mask}
    expr = vjp_call(op_call(relax.BlockBuilder().normalize(bias)), operands, {0: seed}, stated.wrt)
    return made.all(expr)


def _seen(made: Expansion, call: OpCall) -> relax.Var:
    """What a mask adds to the product of a query and a key, by their positions in the whole sequence."""
    (queries, keys), window = (tensor.shape[1] for tensor in call.inputs[:2]), call.attr("window_size")
    start = keys - queries if call.attr("causal_mask") == "BottomRight" else 0
    dtype = call.inputs[0].dtype

    def mask() -> relax.Var:
        rows = made(op.reshape(made(op.arange(start, start + queries, 1, "int64")), (1, 1, queries, 1)))
        columns = made(op.reshape(made(op.arange(0, keys, 1, "int64")), (1, 1, 1, keys)))
        seen = made(op.less_equal(columns, rows))
        if window is not None:
            first = made(op.subtract(rows, relax.const(window, "int64")))
            seen = made(op.logical_and(seen, made(op.greater(columns, first))))
        zero, lowest = (relax.const(numpy.array([value]), dtype) for value in (0.0, -math.inf))
        return made(op.where(seen, zero, lowest))

    return made.once(("mask", queries, keys, start, window, dtype, made.node.scopes), mask)


def _stand_ins(types: Sequence[TensorType]) -> list[relax.Var]:
    return [relax.Var(f"x{n}", relax.TensorStructInfo(each.shape, each.dtype)) for n, each in enumerate(types)]
