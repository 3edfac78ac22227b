"""The reverse pass: a Relax function with the gradients of its parameters, made by walking its Graph backwards.

What comes out is one flat function (calls are entered): first the function as it was, under the names that its values
had, then the backward part. What depends on nothing but the forward part and the seeds can be cut off as a function of
its own: with `seeded` the gradients of the results are parameters, which is what a stage of a pipeline takes from the
next one, and the gradients of its inputs are what it hands to the one before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from tvm import ir, relax, tirx

from mesh_tensor.annotations.experts import experts_backward
from mesh_tensor.annotations.manual import MANUAL, Manual, manual_text
from mesh_tensor.annotations.names import reachable, relax_function, source_names, unique_names, variables
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.rules.gradients import Backward, gradients_of, stops_gradients
from mesh_tensor.rules.operator.manual import ALL_DEVICES, PER_DEVICE, devices_call

from .ir import Graph, Value, leaves
from .joint import Joint, Writer
from .manual import Axes, manual_mesh, varying
from .reader import read_graph
from .rewrites import joined_slices

SEED = "seed"  # the gradient of the loss by itself: the first value of the backward part


def gradient_function(
    mod: ir.IRModule,
    function: str,
    wrt: Sequence[str],
    *,
    loss: int = 0,
    seeded: bool = False,
    optional: Collection[str] = (),
    unseeded: Collection[int] = (),
) -> ir.IRModule:
    """The module whose `function` returns (what it returned, the gradients of the parameters `wrt`, as a tuple).

    loss     which of the function's results is differentiated: a number
    seeded   the gradients of all its results of floats are parameters, after the function's own, instead
    optional the parameters whose gradients may be zero
    unseeded numbers of results of floats that nothing is differentiated by: they have no such parameters

    Raises:
        MeshTensorError: the result is no number, a parameter is not there, holds no floats or has no influence on the
            result; or an operator on the way has no gradient.
    """
    joint = forward_part(mod, function)
    results = leaves(joint.graph.result)
    seeds: dict[Value, relax.Expr] = {}
    if seeded:
        for value in dict.fromkeys(v for n, v in enumerate(results) if is_float(v) and n not in unseeded):
            seeds[value] = joint.writer.parameter(f"d_{value.name}", value)
            joint.params.append(seeds[value])
    else:
        value = loss_of(results, loss, function)
        seeds[value] = joint.writer.emit(relax.op.ones(value.type.shape, value.type.dtype), SEED)
    values = _parameters(joint.graph, wrt, function)
    reverse(joint, seeds, values, _Kept(joint) if seeded else None)
    for value in values:
        if value.name in optional and value not in joint.gradients:
            zeros = relax.op.zeros(value.type.shape, value.type.dtype)
            joint.gradients[value] = joint.writer.emit(zeros, f"d_{value.name}_none")
    made = gradients_made(joint, values, mod, function)
    return joint.writer.module(mod, function, joint, relax.Tuple([joint.result, relax.Tuple(made)]))


class _Kept(Mapping[Value, relax.Expr]):
    """A function's values as a backward part of its own has them: what devices have of their own lies along a dim of
    devices on its way there, since no function takes or gives values of one device."""

    def __init__(self, joint: Joint) -> None:
        self._joint, self._made = joint, dict[Value, relax.Expr]()

    def __getitem__(self, value: Value) -> relax.Expr:
        known, writer = self._joint.env[value], self._joint.writer
        if value.data is not None or not (axes := writer.own_axes(known)):
            return known
        if value not in self._made:
            names = tuple([axis for axis, _ in axes])
            shape = (*(size for _, size in axes), *value.type.shape)
            kept = writer.emit(devices_call(ALL_DEVICES, known, names, shape), f"{value.name}_kept")
            self._made[value] = writer.emit(devices_call(PER_DEVICE, kept, names, value.type.shape), value.name)
        return self._made[value]

    def __iter__(self) -> Iterator[Value]:
        return iter(self._joint.env)

    def __len__(self) -> int:
        return len(self._joint.env)


def taken_backward(mod: ir.IRModule, function: str, wrt: Sequence[str]) -> set[str]:
    """The values of the function that the gradients of its first result are computed from, by name. Refused as by
    `gradient_function`."""
    func = gradient_function(mod, function, wrt)[function]
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    start = next(n for n, binding in enumerate(bindings) if binding.var.name_hint == SEED)
    found: set[str] = set()
    for binding in reversed(bindings[start:]):
        if binding.var.name_hint in found or binding is bindings[-1]:
            found.update(var.name_hint for var in relax.analysis.free_vars(binding.value))
    return found


def forward_part(mod: ir.IRModule, function: str) -> Joint:
    """The function, read and written again as it was; the backward part comes after it."""
    mod, graph = readable(mod, function)
    writer = Writer(mod, graph)
    params = [writer.parameter(value.name, value) for value in graph.params]
    env: dict[Value, relax.Expr] = dict(zip(graph.params, params, strict=True))
    env |= constants_of(graph)
    for node in graph.nodes:
        writer.again(node, env)
    return Joint(graph, writer, params, env, writer.tree(graph.result, env))


def constants_of(graph: Graph) -> dict[Value, relax.Expr]:
    """The constants of a graph."""
    return {value: value.data for value in graph.values() if value.data is not None}


def readable(mod: ir.IRModule, function: str) -> tuple[ir.IRModule, Graph]:
    """A function that gradients can be taken of, as a graph; and its module with a name for each variable."""
    mod = unique_names(mod)
    relax_function(mod, function)
    typed = [
        f"{name}.{var.name_hint}"
        for name, func in reachable(mod, function).items()
        for var in variables(func)
        if isinstance(var.struct_info, relax.distributed.DTensorStructInfo)
    ]
    if typed:
        refuse(
            f"{listing(typed)} are of type R.DTensor",
            where=f"gradient of {function!r}",
            why="gradients' types would have to say how they lie",
            fix="state layouts by annotate_module, or R.dist.annotate_sharding",
        )
    graph = read_graph(mod, function, manual_mesh(reachable(mod, function).values()), {}, experts=False)
    return mod, joined_slices(graph)


def reverse(
    joint: Joint, seeds: dict[Value, relax.Expr], wrt: Sequence[Value], known: Mapping[Value, relax.Expr] | None = None
) -> None:
    """Add the gradients of `wrt`, and of all values between them and the values whose gradients are `seeds`. `known`:
    the values of the forward part, as they are taken; None: as it made them. Refused where an operator between them has
    no gradient."""
    graph, env, writer = joint.graph, joint.env if known is None else known, joint.writer
    active, own = depending_on(graph, wrt), varying(graph)
    parts: dict[Value, list[relax.Expr]] = {value: [seed] for value, seed in seeds.items()}
    for node in reversed(graph.nodes):
        if not any(value in active and parts.get(value) for value in node.outputs):
            continue
        found = [
            _sum(joint, value, parts.pop(value, []), own.get(value, ()), value in active) for value in node.outputs
        ]
        wanted = tuple(value in active for value in node.inputs)
        operands, results = (tuple(env[value] for value in values) for values in (node.inputs, node.outputs))
        if node.is_annotation:
            made = [writer.annotated(node, found[0])]
        else:
            backward = Backward(node.call, operands, results, tuple(found), wanted, writer.emit)
            is_experts = node.call.operator == MANUAL
            made = _experts(backward, writer, node.where) if is_experts else gradients_of(backward, node.where)
        for value, gradient in zip(node.inputs, made, strict=True):
            if gradient is not None:
                parts.setdefault(value, []).append(gradient)
    for value in wrt:
        _sum(joint, value, parts.get(value, []), (), True)


def _experts(b: Backward, writer: Writer, where: str) -> list[relax.Expr | None]:
    """The gradients of what `mt.experts` takes: experts' devices make them, row by row and weight by weight."""
    ndims = [one.ndim for one in b.call.inputs], [one.ndim for one in b.call.outputs]
    stated = Manual.parse(manual_text(b.call.expr), *ndims, where)
    assert stated.experts is not None
    mod, body = unique_names(writer.functions.get()), stated.experts.body
    many = stated.experts.room * math.prod(map(stated.axes.size, stated.experts.axes))
    func = mod[body]
    rows, _, *weights = func.params
    if isinstance(symbol := rows.struct_info.shape.values[0], tirx.Var):
        sized = func.bind_symbolic_vars({symbol: many})
        mod = ir.IRModule({var: sized if var.name_hint == body else one for var, one in mod.functions_items()})
    summed = [n for n, is_wanted in enumerate(b.wanted[2:]) if is_wanted]
    names = [rows.name_hint, *(weights[n].name_hint for n in summed)]
    made = gradient_function(mod, body, names, seeded=True, optional=names)[body]
    backward = writer.functions.add_func(made.without_attr("global_symbol"), f"{body}_backward")
    call = experts_backward(writer.functions, backward, stated, b.operands, b.d, summed)
    results = b.emit(call)
    d_rows, *d_weights = [b.emit(relax.TupleGetItem(results, n)) for n in range(len(names))]
    found = dict(zip(summed, d_weights, strict=True))
    return [d_rows if b.wanted[0] else None, None, *(found.get(n) for n in range(len(weights)))]


def is_float(value: Value) -> bool:
    """Whether small changes of the value mean something."""
    return "float" in value.type.dtype


def _sum(joint: Joint, value: Value, parts: list[relax.Expr], own: Axes, active: bool) -> relax.Expr | None:
    """The gradient of a value, of what its uses give; it is known by the value's name then. What devices give each for
    a value that they have in common is added up; `own`: the axes along which they have one of their own."""
    if not parts or not active:
        return None
    writer, name = joint.writer, f"d_{value.name}"
    by_axes: dict[Axes, relax.Expr] = {}
    for part in parts:
        over = tuple([axis for axis in writer.own_axes(part) if axis not in own])
        by_axes[over] = writer.emit(relax.op.add(by_axes[over], part), name) if over in by_axes else part
    total, *rest = [writer.over_devices(part, over, name) for over, part in by_axes.items()]
    for part in rest:
        total = writer.emit(relax.op.add(total, part), name)
    joint.gradients[value] = total
    return total


def depending_on(graph: Graph, wrt: Sequence[Value], *, through_stops: bool = False) -> set[Value]:
    """The values of floats that depend on `wrt`, and whose gradients it has.

    through_stops   of all values, also through what stops gradients
    """
    active = set(wrt)
    for node in graph.nodes:
        goes_on = through_stops or not stops_gradients(node.call.operator)
        if goes_on and any(value in active for value in node.inputs):
            active.update(value for value in node.outputs if through_stops or is_float(value))
    return active


def loss_with(results: list[Value], others: int, function: str) -> Value:
    """The first result, which is differentiated; so many others come after it."""
    loss = loss_of(results, 0, function)
    if len(results) != 1 + others:
        refuse(f"{function!r} has {len(results)} results", fix="return the loss alone")
    return loss


def loss_of(results: list[Value], number: int, function: str) -> Value:
    """The result that is differentiated."""
    if not (isinstance(number, int) and -len(results) <= number < len(results)):
        refuse(
            f"{function!r} has {len(results)} results, and no result {number!r} to differentiate",
            fix="say by `loss=` which one it is, counted from 0",
        )
    value = results[number]
    if value.type.elements != 1 or not is_float(value):
        refuse(
            f"the result to differentiate is {value}",
            where=f"result {number} of {function!r}",
            why="a gradient is that of one number",
            fix="return a loss, as the mean over the batch; `loss=` says which result it is",
        )
    return value


def _parameters(graph: Graph, names: Sequence[str], function: str) -> list[Value]:
    by_name = {value.name: value for value in graph.params}
    problems = [f"there is no parameter {name!r}" for name in names if name not in by_name]
    problems += [f"parameter {by_name[n]} holds no floats" for n in names if n in by_name and not is_float(by_name[n])]
    if problems:
        refuse(problems, where=f"gradient of {function!r}", fix=f"its parameters are {listing(list(by_name))}")
    return [by_name[name] for name in names]


def gradients_made(joint: Joint, values: Sequence[Value], mod: ir.IRModule, function: str) -> list[relax.Expr]:
    """The gradients of parameters, which there have to be."""
    missing = [value.name for value in values if value not in joint.gradients]
    if missing:
        known = {ours: theirs for theirs, ours in reversed(source_names(relax_function(mod, function)).items())}
        refuse(
            [f"the result does not depend on parameter {known.get(name, name)!r}" for name in missing],
            where=f"gradient of {function!r}",
            why="its gradient would be zero, which is more likely a mistake",
            fix="leave it out of `wrt` (for torch: requires_grad_(False))",
        )
    return [joint.gradients[value] for value in values]
