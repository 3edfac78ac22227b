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


def while_loop(node: torch.fx.Node, importer: Any) -> tuple[relax.Expr, ...]:
    """What is carried, once the condition does not hold."""
    test, body, first, more = [_values(importer, arg) for arg in node.args]

    def goes_on(given: Exprs) -> relax.Expr:
        (holds,) = _translated(importer, test, given)
        return holds

    def step(given: Exprs) -> Exprs:
        return _translated(importer, body, given)

    call = _looped(importer, node.name, first, more, goes_on, step)
    return _fields(importer, call)


def cond(node: torch.fx.Node, importer: Any) -> tuple[relax.Expr, ...]:
    """What one of two graphs gives, of the same: a function of one choice."""
    holds, *graphs, given = [_values(importer, arg) for arg in node.args]
    holds = emit(importer, relax.op.reshape(holds, ()))
    values = [value for value in given if isinstance(value, relax.Expr)]

    def branch(graph: Any, params: Exprs) -> relax.SeqExpr:
        mine = iter(params)
        args = [next(mine) if isinstance(value, relax.Expr) else value for value in given]
        importer.block_builder._begin_binding_block()
        made = _translated(importer, graph, args)
        return relax.SeqExpr([importer.block_builder._end_block()], relax.Tuple(made))

    def written(params: Exprs) -> relax.Expr:
        first, *rest = params
        return importer.block_builder.emit(relax.If(first, *[branch(graph, rest) for graph in graphs]))

    called = importer.functions.add_func(_function(importer, node.name, [holds, *values], written), node.name)
    return _fields(importer, importer.block_builder.emit(relax.Call(called, [holds, *values])))


def _fields(importer: Any, call: relax.Var) -> tuple[relax.Expr, ...]:
    return tuple([emit(importer, relax.TupleGetItem(call, n)) for n in range(len(call.struct_info.fields))])


LOOPS: dict[str, Callable[[torch.fx.Node, Any], Any]] = {
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
) -> relax.Var:
    """A call of a function that gives what it is given first, or calls itself with what a step makes of it. `more` is
    the same for all steps."""
    every, carried = [*first, *more], len(first)
    infos, functions = [value.struct_info for value in every], importer.functions
    blank = _function(importer, name, every, lambda params: relax.Tuple(params[:carried]))
    called = functions.add_func(blank, name)

    def written(params: Exprs) -> relax.Expr:
        condition, builder = goes_on(params), importer.block_builder
        builder._begin_binding_block()
        made = [_as(importer, value, info) for value, info in zip(step(params), infos, strict=False)]
        again = builder.emit(relax.Call(called, [*made, *params[carried:]]))
        block = builder._end_block()
        ends = relax.SeqExpr([], relax.Tuple(params[:carried]))
        return builder.emit(relax.If(condition, relax.SeqExpr([block], again), ends))

    functions.update_func(called, _function(importer, name, every, written))
    return importer.block_builder.emit(relax.Call(called, every))


def _function(importer: Any, name: str, values: Exprs, write: Callable[[Exprs], relax.Expr]) -> relax.Function:
    """A function of parameters as the values are, which gives what is written of them."""
    params = [relax.Var(f"{name}_{number}", value.struct_info) for number, value in enumerate(values)]
    outer, builder = importer.block_builder, relax.BlockBuilder()
    importer.block_builder = builder
    try:
        with builder.function(name, params):
            builder.emit_func_output(write(params))
    finally:
        importer.block_builder = outer
    return _with_own_sizes(builder.get()[name].without_attr("global_symbol"))


def _as(importer: Any, value: Any, info: relax.TensorStructInfo) -> relax.Expr:
    """What a step makes, where sizes that are the same are known as such."""
    if not isinstance(value, relax.Expr):
        refuse(f"a step gives {value}, no tensor", fix="carry tensors: torch.tensor(n)")
    if list(value.struct_info.shape or ()) == list(info.shape):
        return value
    return importer.block_builder.match_cast(value, info)


def _with_own_sizes(func: relax.Function) -> relax.Function:
    symbols = relax.analysis.defined_symbolic_vars(func)
    if free := [var.name for var in relax.analysis.free_symbolic_vars(func)]:
        refuse(
            f"a step or branch takes the open sizes {free}, which no tensor of it has",
            fix="give these sizes at the export",
        )
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
    return [importer.size(size) for size in shape]
