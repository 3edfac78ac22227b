"""The reverse pass: a Relax function with the gradients of its parameters, made by walking its Graph backwards.

What comes out is one flat function (calls are entered): first the function as it was, under the names that its values
had, then the backward part. What depends on nothing but the forward part and the seeds can be cut off as a function of
its own: with `seeded` the gradients of the results are parameters, which is what a stage of a pipeline takes from the
next one, and the gradients of its inputs are what it hands to the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tvm import ir, relax

from mesh_tensor.annotations.annotation import from_attr
from mesh_tensor.annotations.module_annotations import GRADIENTS_ATTR, HINTS_ATTR
from mesh_tensor.annotations.names import (
    SOURCE_NAMES_ATTR,
    Fresh,
    reachable,
    relax_function,
    source_names,
    unique_names,
    variables,
)
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.gradients import Backward, gradients_of, stops_gradients
from mesh_tensor.rules.operator.call import operator_name
from mesh_tensor.rules.operator.rule import LocalCall

from .ir import Graph, Node, Tree, Value, leaves
from .reader import read_graph
from .turned_products import turned_products

SEED = "seed"  # the gradient of the loss by itself: the first value of the backward part


@dataclass(eq=False)
class Joint:
    """A function in the making: forward, then backward.

    env         value -> its variable
    gradients   value -> its gradient's variable, once the reverse pass has been there
    result      what the function returned, as an expression
    """

    graph: Graph
    writer: Writer
    params: list[relax.Var]
    env: dict[Value, relax.Expr]
    result: relax.Expr
    gradients: dict[Value, relax.Expr] = field(default_factory=dict)


def gradient_function(
    mod: ir.IRModule,
    function: str,
    wrt: Sequence[str],
    *,
    loss: int = 0,
    seeded: bool = False,
    optional: Collection[str] = (),
) -> ir.IRModule:
    """The module whose `function` returns (what it returned, the gradients of the parameters `wrt`, as a tuple).

    loss     which of the function's results is differentiated: a number
    seeded   the gradients of all its results of floats are parameters, after the function's own, instead
    optional the parameters whose gradients may be zero

    Raises:
        MeshTensorError: the result is no number, a parameter is not there, holds no floats or has no influence on the
            result; or an operator on the way has no gradient.
    """
    joint = forward_part(mod, function)
    results = leaves(joint.graph.result)
    seeds: dict[Value, relax.Expr] = {}
    if seeded:
        for value in dict.fromkeys(value for value in results if is_float(value)):
            seeds[value] = joint.writer.parameter(f"d_{value.name}", value)
            joint.params.append(seeds[value])
    else:
        value = loss_of(results, loss, function)
        seeds[value] = joint.writer.emit(_one(value), SEED)
    values = _parameters(joint.graph, wrt, function)
    reverse(joint, seeds, values)
    for value in values:
        if value.name in optional and value not in joint.gradients:
            zeros = relax.op.zeros(value.type.shape, value.type.dtype)
            joint.gradients[value] = joint.writer.emit(zeros, f"d_{value.name}_none")
    made = gradients_made(joint, values, mod, function)
    return joint.writer.module(mod, function, joint, relax.Tuple([joint.result, relax.Tuple(made)]))


def taken_backward(mod: ir.IRModule, function: str, wrt: Sequence[str]) -> set[str]:
    """The values of the function that the gradients of its first result are computed from, by name.

    Raises:
        MeshTensorError: as `gradient_function`.
    """
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
    return mod, read_graph(mod, function, Mesh({"none": 1}), {})


def reverse(
    joint: Joint,
    seeds: dict[Value, relax.Expr],
    wrt: Sequence[Value],
    known: Mapping[Value, relax.Expr] | None = None,
) -> None:
    """Add the gradients of `wrt`, and of all values between them and the values whose gradients are `seeds`. `known`:
    the values of the forward part, as they are taken; None: as it made them.

    Raises:
        MeshTensorError: an operator between them has no gradient.
    """
    graph, env, writer = joint.graph, joint.env if known is None else known, joint.writer
    active = depending_on(graph, wrt)
    parts: dict[Value, list[relax.Expr]] = {value: [seed] for value, seed in seeds.items()}
    for node in reversed(graph.nodes):
        if not any(value in active and parts.get(value) for value in node.outputs):
            continue
        found = [_sum(joint, value, parts.pop(value, []), value in active) for value in node.outputs]
        wanted = tuple(value in active for value in node.inputs)
        operands, results = (tuple(env[value] for value in values) for values in (node.inputs, node.outputs))
        if node.is_annotation:
            made = [writer.annotated(node, found[0])]
        else:
            backward = Backward(node.call, operands, results, tuple(found), wanted, writer.emit)
            made = gradients_of(backward, node.where)
        for value, gradient in zip(node.inputs, made, strict=True):
            if gradient is not None:
                parts.setdefault(value, []).append(gradient)
    for value in wrt:
        _sum(joint, value, parts.get(value, []), True)


def is_float(value: Value) -> bool:
    """Whether small changes of the value mean something."""
    return "float" in value.type.dtype


def _sum(joint: Joint, value: Value, parts: list[relax.Expr], active: bool) -> relax.Expr | None:
    """The gradient of a value, of what its uses give; it is known by the value's name then."""
    if not parts or not active:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = joint.writer.emit(relax.op.add(total, part), f"d_{value.name}")
    joint.gradients[value] = total
    return total


def depending_on(graph: Graph, wrt: Sequence[Value], *, through_stops: bool = False) -> set[Value]:
    """The values of floats that depend on `wrt`, and whose gradients it has.

    through_stops   of all values, also through what stops gradients
    """
    active = set(wrt)
    for node in graph.nodes:
        goes_on = through_stops or not stops_gradients(operator_name(node.call))
        if goes_on and any(value in active for value in node.inputs):
            active.update(value for value in node.outputs if through_stops or is_float(value))
    return active


def loss_of(results: list[Value], number: int, function: str) -> Value:
    """The result that is differentiated."""
    if not -len(results) <= number < len(results):
        refuse(f"{function!r} has {len(results)} results, and no result {number} to differentiate")
    value = results[number]
    if value.type.elements != 1 or not is_float(value):
        refuse(
            f"the result to differentiate is {value}",
            where=f"result {number} of {function!r}",
            why="a gradient is that of one number",
            fix="return a loss, as the mean over the batch; `loss=` says which result it is",
        )
    return value


def _one(value: Value) -> relax.Expr:
    return relax.op.ones(value.type.shape, value.type.dtype)


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


class Writer:
    """Writes a flat function: every binding under a name of its own."""

    def __init__(self, mod: ir.IRModule, graph: Graph) -> None:
        self._fresh = Fresh([value.name for value in graph.values()])
        self._builder = relax.BlockBuilder()
        self._bindings: list[relax.VarBinding] = []
        self._kernels: dict[ir.GlobalVar, relax.Expr] = {}
        self._hints: dict[str, dict] = {}
        self._unused: set[str] = set()
        self._stated = {
            (name.name_hint, value): hints
            for name, func in mod.functions_items()
            if isinstance(func, relax.Function) and HINTS_ATTR in (func.attrs or {})
            for value, hints in from_attr(func.attrs[HINTS_ATTR]).items()
        }

    def parameter(self, name: str, value: Value) -> relax.Var:
        """A parameter of the type of a value."""
        return relax.Var(name, value.info)

    def copy(self, value: Value) -> Value:
        """Another value of the type, under a name of its own."""
        return Value(self._fresh.name(value.name), value.type)

    def emit(self, expr: relax.Expr, name: str = "d") -> relax.Var:
        """A variable for the expression."""
        return self._bind(self._fresh.name(name), self._builder.normalize(expr))

    def again(self, node: Node, env: dict[Value, relax.Expr]) -> None:
        """The node's call, on the variables of `env`, which then has its results."""
        expr = node.call.expr
        if node.is_annotation:
            made = self._like(node, relax.Call(expr.op, [env[node.inputs[0]]], expr.attrs, expr.sinfo_args))
            env[node.outputs[0]] = self._bind(node.outputs[0].name, made)
            self._note(node, node.outputs[0].name)
            return
        made = LocalCall(node.call, tuple(env[value] for value in node.inputs), (), (), ()).again()
        if node.kernel is not None:
            self._kernels[expr.args[0]] = node.kernel
        var = self._bind(
            node.outputs[0].name if len(node.outputs) == 1 else self._fresh.name("results"), self._like(node, made)
        )
        if not isinstance(var.struct_info, relax.TupleStructInfo):
            env[node.outputs[0]] = var
            return
        for path, value in zip(_paths(var.struct_info), node.outputs, strict=True):
            part: relax.Expr = var
            for index in path:
                part = relax.TupleGetItem(part, index)
            env[value] = self._bind(value.name, self._builder.normalize(part))

    def annotated(self, node: Node, gradient: relax.Expr | None) -> relax.Expr | None:
        """A gradient in the layout that is stated for the value it belongs to; heard after that."""
        if gradient is None:
            return None
        expr = node.call.expr
        made = self._like(node, relax.Call(expr.op, [gradient], expr.attrs, expr.sinfo_args))
        var = self._bind(self._fresh.name(f"d_{node.outputs[0].name}"), made)
        self._note(node, var.name_hint, later=1)
        return var

    def tree(self, tree: Tree, env: dict[Value, relax.Expr]) -> relax.Expr:
        """A tree of values as an expression."""
        return env[tree] if isinstance(tree, Value) else relax.Tuple([self.tree(item, env) for item in tree])

    def module(self, mod: ir.IRModule, function: str, joint: Joint, result: relax.Expr) -> ir.IRModule:
        """The module of the function that returns `result`, and of the kernels that it calls."""
        result = self._builder.normalize(result)
        output = relax.Var(self._fresh.name("gv"), result.struct_info)
        bindings = turned_products(self._used(result), result)
        block = relax.DataflowBlock([*bindings, relax.VarBinding(output, result)])
        body = relax.Function(joint.params, relax.SeqExpr([block], output), output.struct_info)
        func = self._builder.normalize(body).with_attr("global_symbol", function)
        names = source_names(relax_function(mod, function))
        if names:
            func = func.with_attr(SOURCE_NAMES_ATTR, names)
        if self._hints:
            func = func.with_attr(HINTS_ATTR, self._hints)
        there = {binding.var.name_hint for binding in bindings} | {param.name_hint for param in joint.params}
        found = {v.name: g.name_hint for v, g in joint.gradients.items() if isinstance(g, relax.Var)}
        gradients = {value: gradient for value, gradient in found.items() if gradient in there}
        func = func.with_attr(GRADIENTS_ATTR, gradients)
        return ir.IRModule({ir.GlobalVar(function): func, **self._kernels}, global_infos=mod.global_infos)

    @contextmanager
    def only_if_used(self) -> Iterator[None]:
        """What is written within is left out, unless something takes it."""
        before = len(self._bindings)
        yield
        self._unused.update(binding.var.name_hint for binding in self._bindings[before:])

    def _used(self, result: relax.Expr) -> list[relax.VarBinding]:
        if not self._unused:
            return self._bindings
        taken = {var.name_hint for var in relax.analysis.free_vars(result)}
        kept = []
        for binding in reversed(self._bindings):
            if binding.var.name_hint in self._unused and binding.var.name_hint not in taken:
                continue
            taken.update(var.name_hint for var in relax.analysis.free_vars(binding.value))
            kept.append(binding)
        return kept[::-1]

    def _bind(self, name: str, expr: relax.Expr) -> relax.Var:
        var = relax.DataflowVar(name, expr.struct_info)
        self._bindings.append(relax.VarBinding(var, expr))
        return var

    def _like(self, node: Node, made: relax.Call) -> relax.Call:
        relax.expr._update_struct_info(made, node.call.expr.struct_info)
        return made

    def _note(self, node: Node, name: str, later: int = 0) -> None:
        """What TVM has no words for in an annotation goes with it, with a priority that is `later`."""
        function, _, value = node.where.partition(".")
        hints = dict(self._stated.get((function, value), {}))
        if later:
            hints = {key: hint for key, hint in hints.items() if key != "partial"}
            hints["priority"] = int(hints.get("priority", 0)) + later
        if hints:
            self._hints[name] = hints


def _paths(info: relax.StructInfo) -> Iterator[tuple[int, ...]]:
    """Where the tensors in a tuple are."""
    for index, inner in enumerate(info.fields):
        if isinstance(inner, relax.TupleStructInfo):
            yield from ((index, *path) for path in _paths(inner))
        else:
            yield (index,)
