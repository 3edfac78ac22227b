"""Gradients of a whole batch, microbatch by microbatch: the forward and backward part of each, one after the other.

Gradients are added up in float32 at least, as each device has them: what axes that split the batch leave to be summed
is summed once, after the last microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tvm import ir, relax

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.dropout import SEED_NAME

from .batch_kinds import Kind, Mean, Mixed, Sum
from .batch_parts import BatchParts, batch_parts
from .gradient import constants_of, gradients_made, loss_of, loss_with, readable, reverse
from .ir import Graph, Node, Value, leaves, map_tree, nodes_before
from .joint import Joint, Writer
from .reader import read_graph
from .recompute import Again

op = relax.op
Seed = Callable[[Writer, Value], relax.Expr]
Recompute = Callable[[Graph], set[Value]]


@dataclass(frozen=True)
class Microbatches:
    """`count` of them: the n-th has every `count`-th row of the batch, from the n-th on. `inputs`: the parameters that
    have rows, which are their first dim. `whole`: the module of the same function of a whole batch, if there is one.
    `stated`, `by_itself`: bindings, as `batch_parts` takes them."""

    count: int
    inputs: tuple[str, ...]
    whole: ir.IRModule | None = None
    stated: tuple[str, ...] = ()
    by_itself: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Accumulated:
    """The loss of a batch and its gradients, as expressions; `joint` has what was written.

    copies   the name of a value of the function -> those of the same in later microbatches, and computed again
    """

    joint: Joint
    loss: relax.Expr
    gradients: dict[str, relax.Expr]
    copies: dict[str, tuple[str, ...]]


def accumulated(
    mod: ir.IRModule,
    function: str,
    trained: list[str],
    batches: Microbatches,
    seed: Seed,
    recompute: Recompute,
    written: Sequence[str] = (),
) -> Accumulated:
    """`function`, which is written for one microbatch, of a whole batch, with the gradients of the parameters
    `trained`. Its results after the loss are new values of the parameters `written`, which the next microbatch takes;
    those of the last one are the batch's. `seed` gives the gradient of a loss by itself; `recompute` says what of a
    graph is computed again.

    Raises:
        MeshTensorError: as `gradient_function`; or the loss is neither a sum nor a mean over rows.
    """
    mod, read = readable(mod, function)
    loss_with(leaves(read.result), len(written), function)
    whole = None if batches.whole is None else readable(batches.whole, function)[0]
    found = batch_parts(
        mod,
        function,
        batches.inputs,
        trained,
        stated=batches.stated,
        by_itself=batches.by_itself,
        larger=whole,
        through_stops=False,
        own_seeds=True,
        written=written,
    )
    kind = _kind_of_loss(found, function)
    graph = read_graph(found.mod, function, read.mesh, {}, experts=False)
    wrt = [value for value in graph.params if value.name in trained]
    writer = Writer(found.mod, graph)
    copies = [graph, *(_copy(graph, writer) for _ in range(1, batches.count))]
    params, environments = _inputs(graph, writer, batches, found)
    totals = _totals(found, graph, function)
    early = set(nodes_before(graph.nodes, set(totals)))
    _complete(totals, copies, environments, writer, early)
    share = _share(kind, batches.count)
    chosen = recompute(graph).difference(value for node in early for value in node.outputs)
    turns = _Turns(mod, function, graph, writer, params, wrt, written, early, chosen)
    for copy, env in zip(copies, environments, strict=True):
        turns.take(copy, env, lambda loss: _times(writer, seed(writer, loss), share))
    total = turns.losses[0]
    for made in turns.losses[1:]:
        total = writer.emit(op.add(total, made), "loss")
    own = graph.params[: len(params)]
    last = dict(zip(leaves(graph.result)[1:], turns.left.values(), strict=True))
    whole = Joint(replace(graph, params=own), writer, params, environments[0] | last, total, turns.known)
    return Accumulated(whole, _times(writer, total, share), turns.gradients, _same(copies, turns.again))


@dataclass(eq=False)
class _Turns:
    """Forward and backward part of each microbatch, one after the other, and what they have made so far.

    wrt, written, early, chosen   parameters to train; parameters with new values, by name; nodes that all microbatches
                                  have done; values that are computed again
    losses      of each microbatch
    gradients   by parameter: the sums
    known       by value: the gradient that the latest microbatch has of it
    left        by parameter: what the latest microbatch made of it
    again       the name of a value -> that of the same, computed again
    """

    mod: ir.IRModule
    function: str
    graph: Graph
    writer: Writer
    params: list[relax.Var]
    wrt: list[Value]
    written: Sequence[str]
    early: set[Node]
    chosen: set[Value]
    start: relax.Expr | None = None
    losses: list[relax.Expr] = field(default_factory=list)
    gradients: dict[str, relax.Expr] = field(default_factory=dict)
    known: dict[Value, relax.Expr] = field(default_factory=dict)
    left: dict[Value, relax.Expr] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)

    def take(self, copy: Graph, env: dict[Value, relax.Expr], start: Callable[[Value], relax.Expr]) -> None:
        """The next microbatch, of the graph `copy`. `start`: the gradient of a loss, which is made for the first."""
        env |= self.left
        for node, first in zip(copy.nodes, self.graph.nodes, strict=True):
            if first not in self.early:
                self.writer.again(node, env)
        loss = loss_of(leaves(copy.result), 0, self.function)
        if self.start is None:
            self.start = start(loss)
        joint = Joint(copy, self.writer, self.params, env, self.writer.tree(copy.result, env))
        taken = Again(joint, set(self._again_in(copy)))
        reverse(joint, {loss: self.start}, self.wrt, taken)
        self.again |= taken.copies
        self.losses.append(env[loss])
        states = [next(value for value in self.graph.params if value.name == name) for name in self.written]
        self.left = {value: env[new] for value, new in zip(states, leaves(copy.result)[1:], strict=True)}
        for value, made in zip(self.wrt, gradients_made(joint, self.wrt, self.mod, self.function), strict=True):
            self.gradients[value.name] = _added(self.writer, self.gradients.get(value.name), made, value)
        self.known |= {value: made for value, made in joint.gradients.items() if value not in self.wrt}

    def _again_in(self, copy: Graph) -> Iterator[Value]:
        for node, first in zip(copy.nodes, self.graph.nodes, strict=True):
            yield from (value for value, own in zip(node.outputs, first.outputs, strict=True) if own in self.chosen)


def _same(copies: list[Graph], again: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The name of a value of the function -> those of the same in later microbatches, and computed again."""
    names = [[value.name for node in copy.nodes for value in node.outputs] for copy in copies]
    return {
        first: (*others, *(again[name] for name in (first, *others) if name in again))
        for first, *others in zip(*names, strict=True)
    }


def _copy(graph: Graph, writer: Writer) -> Graph:
    """The graph with values of its own for all that is computed."""
    known: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        outputs = tuple(known.setdefault(value, writer.copy(value)) for value in node.outputs)
        nodes.append(replace(node, inputs=tuple(known.get(v, v) for v in node.inputs), outputs=outputs))
    return replace(graph, nodes=nodes, result=map_tree(graph.result, lambda value: known.get(value, value)))


def _kind_of_loss(found: BatchParts, function: str) -> Kind:
    """How the batch's loss, which is the first result, follows from the microbatches'."""
    kind = found.kinds[0]
    if isinstance(kind, (Sum, Mean)):
        return kind
    why = kind.why if isinstance(kind, Mixed) else "it has no sum or mean over the batch's rows"
    return refuse(
        f"microbatches don't make the loss of a batch: {why}",
        where=f"{function!r} of a training step with accumulate=",
        why="the loss has to be a sum or a mean over the rows of the batch, or a quotient of such sums whose divisor "
        "does not depend on parameters",
        fix="write the loss as one, a mean by the operator mean, or leave accumulate out",
    )


def _share(kind: Kind, count: int) -> float:
    """What each of `count` microbatches' values counts in the batch's."""
    return 1.0 / count if isinstance(kind, Mean) else 1.0


def _inputs(
    graph: Graph, writer: Writer, batches: Microbatches, found: BatchParts
) -> tuple[list[relax.Var], list[dict[Value, relax.Expr]]]:
    """The function's own parameters, of the whole batch; and per microbatch what its graph's are, but for totals."""
    own = graph.params[: len(graph.params) - len(found.totals) - len(found.shares)]
    params = [_whole(writer, value, batches) for value in own]
    shared = dict(zip(own, params, strict=True)) | constants_of(graph)
    by_name = {value.name: value for value in graph.params}
    shared |= {by_name[name]: relax.const(1.0 / batches.count, dtype) for name, dtype in found.shares.items()}
    environments: list[dict[Value, relax.Expr]] = [dict(shared) for _ in range(batches.count)]
    for value, variable in zip(own, params, strict=True):
        if value.name == SEED_NAME:
            _seeds(writer, value, environments)
        if value.name not in batches.inputs:
            continue
        rows, *rest = value.type.shape
        taken = writer.emit(op.reshape(variable, (rows, batches.count, *rest)), value.name)
        for number, env in enumerate(environments):
            part = writer.emit(op.strided_slice(taken, [1], [number], [number + 1]), value.name)
            env[value] = writer.emit(op.squeeze(part, [1]), value.name)
    return params, environments


def _seeds(writer: Writer, value: Value, environments: list[dict[Value, relax.Expr]]) -> None:
    """What each microbatch drops differs."""
    first = writer.emit(op.multiply(environments[0][value], relax.const(len(environments), "int64")), value.name)
    for number, env in enumerate(environments):
        env[value] = writer.emit(op.add(first, relax.const(number, "int64")), value.name)


def _whole(writer: Writer, value: Value, batches: Microbatches) -> relax.Var:
    if value.name not in batches.inputs:
        return writer.parameter(value.name, value)
    rows, *rest = value.type.shape
    return relax.Var(value.name, relax.TensorStructInfo((rows * batches.count, *rest), value.type.dtype))


def _totals(found: BatchParts, graph: Graph, function: str) -> dict[Value, tuple[Value, Kind]]:
    """The values whose totals over the batch are parameters -> these, and how they are made."""
    params = {value.name: value for value in graph.params}
    made = {node.where: node.outputs[0] for node in graph.nodes}
    return {made[f"{function}.{total.value}"]: (params[total.name], total.kind) for total in found.totals}


def _complete(
    totals: Mapping[Value, tuple[Value, Kind]],
    copies: list[Graph],
    environments: list[dict[Value, relax.Expr]],
    writer: Writer,
    early: set[Node],
) -> None:
    """Write the nodes `early` of all microbatches, and the totals over these, which are parameters of the graph."""
    for number, node in enumerate(copies[0].nodes):
        if node not in early:
            continue
        for copy, env in zip(copies, environments, strict=True):
            writer.again(copy.nodes[number], env)
        if node.outputs[0] not in totals:
            continue
        parameter, kind = totals[node.outputs[0]]
        first, *others = (env[copy.nodes[number].outputs[0]] for copy, env in zip(copies, environments, strict=True))
        for other in others:
            first = writer.emit(op.add(first, other), parameter.name)
        total = _times(writer, first, _share(kind, len(copies)))
        for env in environments:
            env[parameter] = total


def _times(writer: Writer, value: relax.Expr, share: float) -> relax.Expr:
    return value if share == 1.0 else writer.emit(op.multiply(value, relax.const(share, value.struct_info.dtype)))


def _added(writer: Writer, before: relax.Expr | None, gradient: relax.Expr, value: Value) -> relax.Expr:
    """The sum of a parameter's gradients so far."""
    if value.type.dtype in NARROW:
        gradient = writer.emit(op.astype(gradient, "float32"), f"d_{value.name}")
    return gradient if before is None else writer.emit(op.add(before, gradient), f"d_{value.name}")
