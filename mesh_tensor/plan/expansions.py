"""Operators that are taken apart where a dim is split that they need whole: a softmax, into a maximum, a sum and what
is between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tvm import relax

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.cost import count_flops

from .atoms import Atoms
from .ir import Graph, Node, Value
from .propagate import Layouts

op = relax.op
Emit = Callable[[relax.Expr], relax.Var]


def expand(graph: Graph, atoms: Atoms, layouts: Layouts) -> Graph | None:
    """The graph with such operators taken apart whose dim some axis splits, where that takes less than to gather the
    dim; None where there is none."""
    found = {node for node in graph.nodes if node.call.name in _EXPANSIONS and _pays(node, graph, atoms, layouts)}
    if not found:
        return None
    nodes = [made for node in graph.nodes for made in (_expanded(node) if node in found else [node])]
    return replace(graph, nodes=nodes)


def _pays(node: Node, graph: Graph, atoms: Atoms, layouts: Layouts) -> bool:
    """Whether two sums along the dim take less than to gather it, and to do the work of all its devices on each. The
    result is split as the operand is then, unless another layout is stated for it."""
    (x,), (result,) = node.inputs, node.outputs
    positions = atoms.positions(x, node.call.axis(node.call.attr("axis")))
    split, shape = layouts.of[x], atoms.shape(x)
    axes = [axis for position in positions for axis in split.axes_of(position)]
    if not axes:
        return False
    whole = total = split
    for axis in axes:
        whole, total = whole.with_replicate(axis), total.with_partial(axis, "sum")
    change = graph.prices.change
    again = graph.prices.work(node, count_flops(node.call))
    again -= again // math.prod(split.mesh.size(axis) for axis in axes)
    gathered = change(shape, x.type.dtype, split, whole)
    row = tuple(1 if position in positions else size for position, size in enumerate(shape))
    sums = 2 * change(row, _wide(x.type.dtype), total, whole)
    if result in graph.annotations:
        sums += change(shape, x.type.dtype, split, layouts.of[result])
    return sums < gathered + again


def _wide(dtype: str) -> str:
    """The dtype in which rows are summed."""
    return "float32" if dtype in NARROW else dtype


def _expanded(node: Node) -> list[Node]:
    """The nodes from the node's operand to its result."""
    (x,), (result,) = node.inputs, node.outputs
    builder = relax.BlockBuilder()
    made: list[Node] = []
    variable = relax.Var(x.name, relax.TensorStructInfo(x.type.shape, x.type.dtype))
    values = {variable: x}

    def emit(expr: relax.Expr) -> relax.Var:
        call = op_call(builder.normalize(expr))
        (out,) = call.outputs
        var = relax.Var(f"{result.name}_part", call.expr.struct_info)
        values[var] = Value(f"{result.name}_{len(made)}", out)
        inputs = tuple(values[arg] for arg in call.expr.args)
        made.append(Node(call, inputs, (values[var],), node.scopes, node.where))
        return var

    wide = emit(op.astype(variable, _wide(x.type.dtype))) if x.type.dtype in NARROW else variable
    out = _EXPANSIONS[node.call.name](wide, node.call.axis(node.call.attr("axis")), emit)
    if wide is not variable:
        emit(op.astype(out, x.type.dtype))
    made[-1] = replace(made[-1], outputs=(result,))
    return made


def _powers(x: relax.Var, axis: int, emit: Emit) -> tuple[relax.Var, relax.Var, relax.Var]:
    """x less its maximum, what exp makes of that, and the sum of it."""
    below = emit(op.subtract(x, emit(op.max(x, axis, True))))
    powers = emit(op.exp(below))
    return below, powers, emit(op.sum(powers, axis, True))


def _softmax(x: relax.Var, axis: int, emit: Emit) -> relax.Var:
    _, powers, total = _powers(x, axis, emit)
    return emit(op.divide(powers, total))


def _log_softmax(x: relax.Var, axis: int, emit: Emit) -> relax.Var:
    below, _, total = _powers(x, axis, emit)
    return emit(op.subtract(below, emit(op.log(total))))


_EXPANSIONS: dict[str, Callable[[relax.Var, int, Emit], relax.Var]] = {
    "nn.softmax": _softmax,
    "nn.log_softmax": _log_softmax,
}
