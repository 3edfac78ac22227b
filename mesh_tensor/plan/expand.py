"""Operators taken apart, where a dim is split that they need whole: a softmax into a max, ..., a variance into two
means, a norm into what it makes of such. What is known of a value, its mean among that, is computed once: a norm's
gradient takes what the norm did. Attention: see `attention`."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

from tvm import relax

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.cost import count_flops
from mesh_tensor.rules.operator.vjp import VJP, vjp_of

from .atoms import Atoms
from .attention import AttentionParts
from .expansion import Expansion, Known, Make, mean_of, of_node, wide
from .ir import Graph, Node
from .propagate import Layouts

op = relax.op


def expand(graph: Graph, atoms: Atoms, layouts: Layouts) -> Graph | None:
    """The graph with such operators taken apart whose dim some axis splits, where that takes less than to gather the
    dim; None where there is none."""
    nodes: list[Node] = []
    known: Known = {}
    count = len(graph.nodes)
    attention = AttentionParts(graph, atoms, layouts)
    for node in graph.nodes:
        if made := attention.apart(node, known):
            nodes += made
            count -= 1
            continue
        make = _apart(node)
        if make is not None and _pays(node, graph, atoms, layouts, known):
            nodes += Expansion(node, known).nodes(make)
            count -= 1
            continue
        nodes.append(node)
        if (key := mean_of(node.call, node.inputs, node.scopes)) is not None:
            known.setdefault(key, node.outputs[0])
    return None if count == len(graph.nodes) else replace(graph, nodes=nodes)


def _dims(call: OpCall) -> tuple[int, ...]:
    """The dims that an operator needs whole."""
    return call.axes(call.attr("axes" if call.name in _NORMS else "axis"))


def _key(what: str, node: Node) -> Hashable:
    """What is known of a node's first operand, along its dims, where it stands."""
    (x, *_) = node.inputs
    return what, wide(x.type.dtype), x, _dims(of_node(node)), node.scopes


def _pays(node: Node, graph: Graph, atoms: Atoms, layouts: Layouts, known: Known) -> bool:
    """Whether two sums along the dim, or one where its mean is there, take less than to gather it, and to do the work
    of all its devices on each. The result is split as the operand is then, unless another layout is stated for it."""
    x, result = node.inputs[0], node.outputs[0]
    positions = [one for dim in _dims(of_node(node)) for one in atoms.positions(x, dim)]
    split, shape = layouts.of[x], atoms.shape(x)
    axes = [axis for position in positions for axis in split.axes_of(position)]
    if not axes or not is_float(x.type.dtype):
        return False
    whole = total = split
    for axis in axes:
        whole, total = whole.with_replicate(axis), total.with_partial(axis, "sum")
    change = graph.prices.change
    again = graph.prices.work(node, count_flops(node.call))
    again -= again // math.prod(split.mesh.size(axis) for axis in axes)
    alike = sum(value.type == x.type for value in node.inputs)
    gathered = alike * change(shape, x.type.dtype, split, whole)
    row = tuple(1 if position in positions else size for position, size in enumerate(shape))
    has_mean = _key("mean", node) in known and node.call.name in _OF_MEANS
    sums = (1 if has_mean else 2) * change(row, wide(x.type.dtype), total, whole)
    if result in graph.annotations and result.type == x.type:
        sums += change(shape, x.type.dtype, split, layouts.of[result])
    return sums < gathered + again


def _powers(made: Expansion, x: relax.Var) -> tuple[relax.Var, relax.Var, relax.Var]:
    """x less its maximum, what exp makes of that, and the sum of it."""
    (axis,) = _dims(made.node.call)
    below = made(op.subtract(x, made(op.max(x, axis, True))))
    powers = made(op.exp(below))
    return below, powers, made(op.sum(powers, axis, True))


def _softmax(made: Expansion) -> list[relax.Var]:
    _, powers, total = _powers(made, *made.wide())
    return [made(op.divide(powers, total))]


def _log_softmax(made: Expansion) -> list[relax.Var]:
    below, _, total = _powers(made, *made.wide())
    return [made(op.subtract(below, made(op.log(total))))]


def _variance(made: Expansion) -> list[relax.Var]:
    call, (x,) = made.node.call, made.wide()
    axes = list(_dims(call))
    apart = made(op.subtract(x, made(op.mean(x, axes, True))))
    return [made(op.mean(made(op.multiply(apart, apart)), axes, bool(call.attr("keepdims"))))]


def _deviation(made: Expansion) -> list[relax.Var]:
    (variance,) = _variance(made)
    return [made(op.sqrt(variance))]


def _normal(made: Expansion, x: relax.Var) -> tuple[relax.Var, relax.Var]:
    """What a norm makes of x before it is scaled; and what it multiplies with: one over a deviation."""
    call = of_node(made.node)
    axes, epsilon = list(_dims(call)), relax.const(call.attr("epsilon"), x.struct_info.dtype)
    if call.name == "nn.layer_norm":
        x = made(op.subtract(x, made.once(_key("mean", made.node), lambda: made(op.mean(x, axes, True)))))

    def rate() -> relax.Var:
        squares = made(op.mean(made(op.multiply(x, x)), axes, True))
        return made(op.rsqrt(made(op.add(squares, epsilon))))

    found = made.once(_key(f"{call.name} {call.attr('epsilon')}", made.node), rate)
    return made(op.multiply(x, found)), found


def _norm(made: Expansion) -> list[relax.Var]:
    x, gamma, *beta = made.wide()
    scaled = made(op.multiply(_normal(made, x)[0], gamma))
    return [made(op.add(scaled, *beta)) if beta else scaled]


def _norm_gradient(made: Expansion) -> list[relax.Var]:
    """Of x, of what it is multiplied with, of what is added."""
    call, (x, gamma, *_, seed) = of_node(made.node), made.wide()
    axes = list(_dims(call))
    normal, rate = _normal(made, x)

    def of_x() -> relax.Var:
        d = made(op.multiply(seed, gamma))
        along = made(op.multiply(normal, made(op.mean(made(op.multiply(d, normal)), axes, True))))
        left = made(op.subtract(d, along))
        if call.name == "nn.layer_norm":
            left = made(op.subtract(left, made(op.mean(d, axes, True))))
        return made(op.multiply(left, rate))

    def summed(d: relax.Var) -> relax.Var:
        rows = list(range(len(d.struct_info.shape) - len(axes)))
        return made(op.sum(d, rows)) if rows else d

    of = {0: of_x, 1: lambda: summed(made(op.multiply(seed, normal))), 2: lambda: summed(seed)}
    return [of[number]() for number in vjp_of(made.node.call).wrt]


_ALONG: dict[str, Make] = {
    "nn.softmax": _softmax,
    "nn.log_softmax": _log_softmax,
    "std": _deviation,
    "variance": _variance,
}
_OF_MEANS = ("std", "variance", "nn.layer_norm")
_NORMS = ("nn.layer_norm", "nn.rms_norm")


def _apart(node: Node) -> Make | None:
    """How an operator is taken apart, if it is one of those: norms over the last dims, in their order."""
    if node.call.operator in _ALONG:
        return _ALONG[node.call.operator]
    is_gradient = node.call.operator == VJP
    call = of_node(node)
    if call.name not in _NORMS:
        return None
    ndim, axes = call.inputs[0].ndim, _dims(call)
    plain = axes == tuple(range(ndim - len(axes), ndim)) and call.attr("scale", True) and call.attr("center", True)
    whole = not is_gradient or len(node.inputs) == len(call.inputs) + 1
    return (_norm_gradient if is_gradient else _norm) if plain and whole else None
