"""What is taken apart: operators, where a dim is split that they need whole (a softmax, into a max, ...); axes, so
that one splits two factors; and dims that are apart elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from tvm import relax

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.sub_axes import Refinement
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.cost import count_flops
from mesh_tensor.rules.operator.shape import merge_call

from .atoms import Atoms
from .ir import Graph, Node, Value
from .propagate import Layouts
from .reader import Annotations

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
    variable = x.variable()
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


_MOST = 3  # plans that are tried


def refinements(graph: Graph, atoms: Atoms) -> list[Refinement]:
    """The meshes in which such an axis is two, those first that are asked for first."""
    found: dict[Refinement, None] = {}
    for value, annotation in graph.annotations.items():
        shape = atoms.shape(value)
        for axis, dim in annotation.sharding.as_dict().items():
            size, first = graph.mesh.size(axis), shape[atoms.positions(value, dim)[0]]
            major = math.gcd(size, first)
            if len(atoms.of[value][dim]) > 1 and 1 < major < size:
                names = [f"{axis}:(1){major}"]
                found[Refinement.by_names(graph.mesh, names)] = None
    return list(found)[:_MOST]


def refined_annotations(annotations: Annotations, refinement: Refinement) -> dict[tuple[str, str], Annotation]:
    """What is stated, of the parts of axes."""
    return {key: refined_annotation(stated, refinement) for key, stated in annotations.items()}


def refined_annotation(stated: Annotation, refinement: Refinement) -> Annotation:
    """What is stated of a value, of the parts of axes."""
    later: Mapping[str, int] = refinement.expanded(dict(stated.later))
    replicated = tuple(part for axis in stated.replicated for part in refinement.axes(axis))
    sharding = refinement.refine(stated.sharding)
    return replace(stated, sharding=sharding, later=tuple(later.items()), replicated=replicated)


def with_merged_dims(graph: Graph, atoms: Atoms) -> Graph | None:
    """The graph in which operators read windows of dims that are one atom; None where they all do."""
    found: dict[Node, dict[int, list[int]]] = {}
    for node in graph.nodes:
        for operand, dim in atoms.rules[node].rule.windows if node.kernel is None else ():
            if len(atoms.of[node.inputs[operand]][dim]) > 1:
                found.setdefault(node, {}).setdefault(operand, []).append(dim)
    if not found:
        return None
    nodes = []
    for node in graph.nodes:
        inputs = list(node.inputs)
        for operand, dims in found.get(node, {}).items():
            nodes.append(_merge(node, inputs[operand], dims))
            (inputs[operand],) = nodes[-1].outputs
        nodes.append(replace(node, inputs=tuple(inputs)) if node in found else node)
    return replace(graph, nodes=nodes)


def _merge(node: Node, value: Value, dims: list[int]) -> Node:
    var = relax.Var(value.name, relax.TensorStructInfo(value.type.shape, value.type.dtype))
    call = op_call(relax.BlockBuilder().normalize(merge_call(var, dims)))
    return Node(call, (value,), (Value(f"{value.name}_whole_dims", value.type),), node.scopes, node.where)
