"""Gradients of a whole batch, microbatch by microbatch: the forward and backward part of each, one after the other.

Gradients are added up in float32 at least, as each device has them: what axes that split the batch leave to be summed
is summed once, after the last microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import ir, relax

from mesh_tensor.base.dtypes import NARROW

from .gradient import Joint, Writer, constants_of, gradient_of, loss_of, readable, reverse
from .ir import Graph, Node, Value, leaves, map_tree
from .microbatches import MEAN, LossOfRows, loss_of_rows

op = relax.op
Seed = Callable[[Writer, Value], relax.Expr]


@dataclass(frozen=True)
class Microbatches:
    """`count` of them: the n-th has every `count`-th row of the batch, from the n-th on. `inputs`: the parameters that
    have rows, which are their first dim."""

    count: int
    inputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Accumulated:
    """The loss of a batch and its gradients, as expressions; `joint` has what was written.

    copies   the name of a value of the function -> those of the same in later microbatches
    """

    joint: Joint
    loss: relax.Expr
    gradients: dict[str, relax.Expr]
    copies: dict[str, tuple[str, ...]]


def accumulated(mod: ir.IRModule, function: str, trained: list[str], batches: Microbatches, seed: Seed) -> Accumulated:
    """`function`, which is written for one microbatch, of a whole batch, with the gradients of the parameters
    `trained`. `seed` gives the gradient of a loss by itself.

    Raises:
        MeshTensorError: as `gradient_function`; or the loss is neither a sum nor a mean over rows.
    """
    mod, graph = readable(mod, function)
    wrt = [value for value in graph.params if value.name in trained]
    found = loss_of_rows(graph, list(batches.inputs), wrt, batches.count)
    graph, writer = found.graph, Writer(mod, found.graph)
    copies = [graph, *(_copy(graph, writer) for _ in range(1, batches.count))]
    params, environments = _inputs(graph, writer, batches)
    early = _before(graph, set(found.totals))
    _complete(found, copies, environments, writer, early)
    share = 1.0 / batches.count if found.kind == MEAN else 1.0
    start: relax.Expr | None = None
    losses: list[relax.Expr] = []
    gradients: dict[str, relax.Expr] = {}
    known: dict[Value, relax.Expr] = {}
    for copy, env in zip(copies, environments, strict=True):
        for node, first in zip(copy.nodes, graph.nodes, strict=True):
            if first not in early:
                writer.again(node, env)
        loss = loss_of(leaves(copy.result), 0, function)
        if start is None:
            start = _times(writer, seed(writer, loss), share)
        joint = Joint(copy, writer, params, env, writer.tree(copy.result, env))
        reverse(joint, {loss: start}, wrt)
        losses.append(env[loss])
        for value in wrt:
            gradients[value.name] = _added(
                writer, gradients.get(value.name), gradient_of(joint, value, function), value
            )
        known |= {value: made for value, made in joint.gradients.items() if value not in wrt}
    total = losses[0]
    for made in losses[1:]:
        total = writer.emit(op.add(total, made), "loss")
    whole = Joint(graph, writer, params, environments[0], total, known)
    names = [[value.name for node in copy.nodes for value in node.outputs] for copy in copies]
    again = {first: tuple(others) for first, *others in zip(*names, strict=True)}
    return Accumulated(whole, _times(writer, total, share), gradients, again)


def _copy(graph: Graph, writer: Writer) -> Graph:
    """The graph with values of its own for all that is computed."""
    known: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        outputs = tuple(known.setdefault(value, writer.copy(value)) for value in node.outputs)
        nodes.append(replace(node, inputs=tuple(known.get(v, v) for v in node.inputs), outputs=outputs))
    return replace(graph, nodes=nodes, result=map_tree(graph.result, lambda value: known.get(value, value)))


def _inputs(
    graph: Graph, writer: Writer, batches: Microbatches
) -> tuple[list[relax.Var], list[dict[Value, relax.Expr]]]:
    """The parameters, of the whole batch; and per microbatch what its graph's are."""
    params = [_whole(writer, value, batches) for value in graph.params]
    shared = dict(zip(graph.params, params, strict=True)) | constants_of(graph)
    environments: list[dict[Value, relax.Expr]] = [dict(shared) for _ in range(batches.count)]
    for value, variable in zip(graph.params, params, strict=True):
        if value.name not in batches.inputs:
            continue
        rows, *rest = value.type.shape
        taken = writer.emit(op.reshape(variable, (rows, batches.count, *rest)), value.name)
        for number, env in enumerate(environments):
            part = writer.emit(op.strided_slice(taken, [1], [number], [number + 1]), value.name)
            env[value] = writer.emit(op.squeeze(part, [1]), value.name)
    return params, environments


def _whole(writer: Writer, value: Value, batches: Microbatches) -> relax.Var:
    if value.name not in batches.inputs:
        return writer.parameter(value.name, value)
    rows, *rest = value.type.shape
    return relax.Var(value.name, relax.TensorStructInfo((rows * batches.count, *rest), value.type.dtype))


def _before(graph: Graph, wanted: set[Value]) -> set[Node]:
    """The nodes that the values depend on."""
    found: set[Node] = set()
    wanted = set(wanted)
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            found.add(node)
            wanted.update(node.inputs)
    return found


def _complete(
    found: LossOfRows,
    copies: list[Graph],
    environments: list[dict[Value, relax.Expr]],
    writer: Writer,
    early: set[Node],
) -> None:
    """Write the nodes `early` of all microbatches, with the totals over these in place of each one's own."""
    for number, node in enumerate(found.graph.nodes):
        if node not in early:
            continue
        for copy, env in zip(copies, environments, strict=True):
            writer.again(copy.nodes[number], env)
        for position, value in enumerate(node.outputs):
            if value not in found.totals:
                continue
            mine = [copy.nodes[number].outputs[position] for copy in copies]
            total = environments[0][mine[0]]
            for own, env in zip(mine[1:], environments[1:], strict=True):
                total = writer.emit(op.add(total, env[own]), f"total_{value.name}")
            total = _times(writer, total, 1.0 / len(copies) if found.totals[value] == MEAN else 1.0)
            for own, env in zip(mine, environments, strict=True):
                env[own] = total


def _times(writer: Writer, value: relax.Expr, share: float) -> relax.Expr:
    if share == 1.0:
        return value
    return writer.emit(op.multiply(value, relax.const(share, value.struct_info.dtype)))


def _added(writer: Writer, before: relax.Expr | None, gradient: relax.Expr, value: Value) -> relax.Expr:
    """The sum of a parameter's gradients so far."""
    if value.type.dtype in NARROW:
        gradient = writer.emit(op.astype(gradient, "float32"), f"d_{value.name}")
    return gradient if before is None else writer.emit(op.add(before, gradient), f"d_{value.name}")
