"""torch's loops as Relax has them: functions that end by calling themselves; and its choices of branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tvm import relax, tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.targets.dtypes import dtype_name

from .torch_args import emit, tensor_of

Exprs = list[relax.Expr]
_aten = torch.ops.aten


def scan(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The last state, and what steps give besides, stacked. The function's parameters: the count, states, what the rows
    are put into, what rows are taken of, and what all steps have."""
    return _scanned(node, importer, *[_values(importer, arg) for arg in node.args])


def mapped(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """What a graph makes of every row, stacked: a scan without states."""
    body, elements, more = [_values(importer, arg) for arg in node.args]
    return _scanned(node, importer, body, [], elements, more)


def _scanned(node: torch.fx.Node, importer: Any, body: Any, first: Exprs, elements: Exprs, more: Exprs) -> relax.Expr:
    steps = elements[0].struct_info.shape[0] if elements else None
    if node.kwargs or steps is None:
        refuse(f"a {node.target} without rows", fix="give it something to take rows of")
    (output,) = body.graph.find_nodes(op="output")
    rows = [row.meta["val"] if isinstance(row, torch.fx.Node) else None for row in output.args[0][len(first) :]]
    made = {number: row for number, row in enumerate(rows) if row is not None}
    blank = [
        emit(importer, relax.op.zeros([steps, *_sizes(importer, row.shape)], dtype_name(row.dtype)))
        for row in made.values()
    ]
    states, stacks, taken = len(first), len(made), len(elements)
    count = relax.const(0, "int64")

    def begins(given: Exprs) -> relax.Expr:
        known = isinstance(steps, tirx.IntImm)
        last = relax.const(int(steps), "int64") if known else tensor_of(importer, steps, "int64")
        return emit(importer, relax.op.less(given[0], last))

    def step(given: Exprs) -> Exprs:
        at, state, puts = given[0], given[1 : 1 + states], given[1 + states : 1 + states + stacks]
        tables, rest = given[1 + states + stacks :][:taken], given[1 + states + stacks + taken :]
        parts = [emit(importer, relax.op.take(table, at, axis=0)) for table in tables]
        new = _translated(importer, body, [*state, *parts, *rest])
        place = emit(importer, relax.op.reshape(at, (1,)))
        put = [
            emit(importer, relax.op.scatter_nd(table, place, new[states + n]))
            for table, n in zip(puts, made, strict=True)
        ]
        return [emit(importer, relax.op.add(at, relax.const(1, "int64"))), *new[:states], *put]

    call = _looped(importer, node.name, [count, *first, *blank], [*elements, *more], begins, step)
    fields = [emit(importer, relax.TupleGetItem(call, number)) for number in range(1, 1 + states + stacks)]
    stacked = iter(fields[states:])
    return (*fields[:states], *(None if row is None else next(stacked) for row in rows))  # type: ignore[return-value]


def while_loop(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """What is carried, once the condition does not hold."""
    test, body, first, more = [_values(importer, arg) for arg in node.args]

    def goes_on(given: Exprs) -> relax.Expr:
        (holds,) = _translated(importer, test, given)
        return holds

    def step(given: Exprs) -> Exprs:
        return _translated(importer, body, given)

    call = _looped(importer, node.name, first, more, goes_on, step, endless=not _counts(test, body))
    return tuple(emit(importer, relax.TupleGetItem(call, number)) for number in range(len(first)))  # type: ignore


def cond(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """What one of two graphs gives: both are computed, and one is taken. Gradients go through that one alone: what the
    other one is given counts as a constant, so that an infinite derivative there is not met. Loops of the other one
    that may not end there have no steps."""
    holds, then, other, given = [_values(importer, arg) for arg in node.args]
    holds = emit(importer, relax.op.reshape(holds, ()))
    fails = emit(importer, relax.op.logical_not(holds))

    def made(graph: Any, taken: relax.Expr, not_taken: relax.Expr) -> Exprs:
        with _within_branch(importer, taken):
            return _translated(importer, graph, [_constant_if(importer, not_taken, value) for value in given])

    pairs = zip(made(then, holds, fails), made(other, fails, holds), strict=True)
    return tuple(emit(importer, relax.op.where(holds, a, b)) for a, b in pairs)  # type: ignore[return-value]


@contextmanager
def _within_branch(importer: Any, taken: relax.Expr) -> Iterator[None]:
    """What is translated is of a branch, of which it is known whether it is taken."""
    outer = importer.taken
    importer.taken = taken if outer is None else emit(importer, relax.op.logical_and(outer, taken))
    try:
        yield
    finally:
        importer.taken = outer


def _counts(test: torch.fx.GraphModule, body: torch.fx.GraphModule) -> bool:
    """Whether a loop ends, whatever it is given: a whole number grows by 1, up to a constant."""
    ends: list[Any] = [graph.graph.output_node().args[0] for graph in (test, body)]
    holds, new = ends
    (holds,) = holds if isinstance(holds, (tuple, list)) else (holds,)
    if getattr(holds, "target", None) is not _aten.lt.Scalar or not isinstance(holds.args[1], int):
        return False
    places = [graph.graph.find_nodes(op="placeholder") for graph in (test, body)]
    for before, after, value in zip(*places, new, strict=False):
        if before is holds.args[0]:
            by_one = getattr(value, "target", None) is _aten.add.Tensor and value.args == (after, 1)
            return by_one and not before.meta["val"].is_floating_point()
    return False


def _constant_if(importer: Any, condition: relax.Expr, value: Any) -> Any:
    """The same value, which has no gradient where the condition holds."""
    if not isinstance(value, relax.Expr) or "float" not in value.struct_info.dtype:
        return value
    return emit(importer, relax.op.where(condition, emit(importer, relax.op.grad.no_grad(value)), value))


LOOPS: dict[str, Callable[[torch.fx.Node, Any], relax.Expr]] = {
    "cond": cond,
    "map_impl": mapped,
    "scan": scan,
    "while_loop": while_loop,
}


def graphs_within(nodes: Sequence[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """The nodes, and those of the graphs that loops among them run."""
    for node in nodes:
        yield node
        if node.op == "get_attr":
            inner = getattr(node.graph.owning_module, str(node.target), None)
            if isinstance(inner, torch.fx.GraphModule):
                yield from graphs_within(list(inner.graph.nodes))


def _looped(
    importer: Any,
    name: str,
    first: Exprs,
    more: Exprs,
    goes_on: Callable[[Exprs], relax.Expr],
    step: Callable[[Exprs], Exprs],
    endless: bool = False,
) -> relax.Var:
    """A call of a function that gives what it is given first, or calls itself with what a step makes of it. `more` is
    the same for all steps. `endless`: no step may be the last one in a branch that is not taken."""
    taken, own = importer.taken, len(first) + len(more)
    every = [*first, *more, *([] if taken is None else [taken])]
    infos = [value.struct_info for value in every]
    outer, functions = importer.block_builder, importer.functions

    def function(write: Callable[[Exprs], relax.Expr]) -> relax.Function:
        params = [relax.Var(f"{name}_{number}", info) for number, info in enumerate(infos)]
        builder = importer.block_builder = relax.BlockBuilder()
        importer.taken = None if taken is None else params[-1]
        try:
            with builder.function(name, params):
                builder.emit_func_output(write(params))
        finally:
            importer.block_builder, importer.taken = outer, taken
        return _with_own_sizes(builder.get()[name].without_attr("global_symbol"))

    carried = len(first)
    called = functions.add_func(function(lambda params: relax.Tuple(params[:carried])), name)

    def written(params: Exprs) -> relax.Expr:
        condition, builder = goes_on(params[:own]), importer.block_builder
        if importer.taken is not None and endless:
            condition = emit(importer, relax.op.logical_and(condition, importer.taken))
        builder._begin_binding_block()
        made = [_as(importer, value, info) for value, info in zip(step(params[:own]), infos, strict=False)]
        again = builder.emit(relax.Call(called, [*made, *params[carried:]]))
        block = builder._end_block()
        ends = relax.SeqExpr([], relax.Tuple(params[:carried]))
        return builder.emit(relax.If(condition, relax.SeqExpr([block], again), ends))

    functions.update_func(called, function(written))
    return outer.emit(relax.Call(called, every))


def _as(importer: Any, value: Any, info: relax.TensorStructInfo) -> relax.Expr:
    """What a step makes, where sizes that are the same are known as such."""
    if not isinstance(value, relax.Expr):
        refuse(f"a step gives {value}, no tensor", fix="carry tensors: torch.tensor(n)")
    if list(value.struct_info.shape or ()) == list(info.shape):
        return value
    return importer.block_builder.match_cast(value, info)


def _with_own_sizes(func: relax.Function) -> relax.Function:
    """The function with open sizes of its own."""
    symbols = relax.analysis.defined_symbolic_vars(func)
    if free := [var.name for var in relax.analysis.free_symbolic_vars(func)]:
        refuse(f"a step takes the open sizes {free}, which no tensor of it has", fix="give these sizes at the export")
    return func.bind_symbolic_vars({var: tirx.Var(var.name, var.dtype) for var in symbols}) if symbols else func


def _translated(importer: Any, body: torch.fx.GraphModule, given: Exprs) -> Exprs:
    """What a graph makes of these, in order."""
    with _environment(importer):
        places = body.graph.find_nodes(op="placeholder")
        importer.env.update(zip(places, given, strict=True))
        made = importer._translate_fx_graph(body, body.graph.nodes, {})
    return list(made) if isinstance(made, (tuple, list)) else list(made.fields) if _is_tuple(made) else [made]


def _is_tuple(made: Any) -> bool:
    return isinstance(made, relax.Tuple)


@contextmanager
def _environment(importer: Any) -> Iterator[None]:
    """Nodes of a graph mean what they do there."""
    kept, importer.env = importer.env, {}
    try:
        yield
    finally:
        importer.env = kept


def _values(importer: Any, arg: Any) -> Any:
    """What a node stands for; of several, of each."""
    if isinstance(arg, torch.fx.Node):
        return importer.env[arg]
    return [_values(importer, one) for one in arg]


def _sizes(importer: Any, shape: Sequence[Any]) -> list[Any]:
    """A shape in Relax."""
    return [importer.size(size) for size in shape]
