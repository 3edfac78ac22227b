"""What reverse passes write: a Joint, and the Writer of its function, with every binding under a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tvm import ir, relax

from mesh_tensor.annotations.annotation import from_attr
from mesh_tensor.annotations.module_annotations import GRADIENTS_ATTR, HINTS_ATTR
from mesh_tensor.annotations.names import SOURCE_NAMES_ATTR, Fresh, reachable, relax_function, source_names
from mesh_tensor.rules.operator.call import plain, tensors_in
from mesh_tensor.rules.operator.manual import ALL_DEVICES, PER_DEVICE, devices_call
from mesh_tensor.rules.operator.rule import LocalCall

from .ir import CHOSEN_ROWS_ATTR, Graph, Node, Tree, Value, chosen_rows
from .manual import Axes


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


class Writer:
    """Writes a flat function: every binding under a name of its own."""

    def __init__(self, mod: ir.IRModule, graph: Graph) -> None:
        self._fresh = Fresh([value.name for value in graph.values()])
        self.functions = relax.BlockBuilder(mod)  # what is called by name, and more that is written
        self._bindings: list[relax.VarBinding] = []
        self._kernels: dict[ir.GlobalVar, relax.Expr] = {}
        self._hints: dict[str, dict] = {}
        self._unused: set[str] = set()
        self._mesh = graph.mesh
        self._own: dict[relax.Var, frozenset[str]] = {}  # along which axes devices have their own
        self._stated = {
            (name.name_hint, value): hints
            for name, func in mod.functions_items()
            if isinstance(func, relax.Function) and HINTS_ATTR in (func.attrs or {})
            for value, hints in from_attr(func.attrs[HINTS_ATTR]).items()
        }

    def parameter(self, name: str, value: Value) -> relax.Var:
        """A parameter of the type of a value."""
        return relax.Var(name, value.info)

    def kept(self, name: str, info: relax.StructInfo) -> relax.Var:
        """A parameter under a name that nothing else has."""
        return relax.Var(self._fresh.name(name), info)

    def copy(self, value: Value) -> Value:
        """Another value of the type, under a name of its own."""
        return Value(self._fresh.name(value.name), value.type)

    def emit(self, expr: relax.Expr, name: str = "d") -> relax.Var:
        """A variable for the expression."""
        return self._bind(self._fresh.name(name), self.functions.normalize(expr))

    def own_axes(self, expr: relax.Expr) -> Axes:
        """The axes along which devices have an expression's value of their own."""
        axes = self._axes(expr)
        return tuple([(axis, self._mesh.size(axis)) for axis in self._mesh.in_order(axes)]) if axes else ()

    def over_devices(self, expr: relax.Expr, axes: Axes, name: str) -> relax.Expr:
        """The sum of what devices along these axes have."""
        if not axes:
            return expr
        shape = (*(size for _, size in axes), *plain(expr.struct_info.shape))
        exposed = self.emit(devices_call(ALL_DEVICES, expr, tuple([axis for axis, _ in axes]), shape), name)
        return self.emit(relax.op.sum(exposed, list(range(len(axes)))), name)

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
        for part, value in zip(tensors_in([var]), node.outputs, strict=True):
            env[value] = self._bind(value.name, self.functions.normalize(part))

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
        result = self.functions.normalize(result)
        output = relax.Var(self._fresh.name("gv"), result.struct_info)
        bindings = turned_products(self._used(result), result)
        block = relax.DataflowBlock([*bindings, relax.VarBinding(output, result)])
        body = relax.Function(joint.params, relax.SeqExpr([block], output), output.struct_info)
        func = self.functions.normalize(body).with_attr("global_symbol", function)
        names = source_names(relax_function(mod, function))
        if names:
            func = func.with_attr(SOURCE_NAMES_ATTR, names)
        if rows := chosen_rows(relax_function(mod, function)):
            func = func.with_attr(CHOSEN_ROWS_ATTR, list(rows))
        if self._hints:
            func = func.with_attr(HINTS_ATTR, self._hints)
        there = {binding.var.name_hint for binding in bindings} | {param.name_hint for param in joint.params}
        found = {v.name: g.name_hint for v, g in joint.gradients.items() if isinstance(g, relax.Var)}
        gradients = {value: gradient for value, gradient in found.items() if gradient in there}
        func = func.with_attr(GRADIENTS_ATTR, gradients)
        return ir.IRModule(
            {ir.GlobalVar(function): func, **self._called(func, function), **self._kernels},
            global_infos=mod.global_infos,
        )

    def _called(self, func: relax.Function, function: str) -> dict[ir.GlobalVar, relax.Function]:
        there = {var: one for var, one in self.functions.get().functions_items() if var.name_hint != function}
        names = reachable(ir.IRModule({**there, ir.GlobalVar(function): func}), function)
        return {var: one for var, one in there.items() if var.name_hint in names}

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
        if axes := self._axes(expr):
            self._own[var] = axes
        self._bindings.append(relax.VarBinding(var, expr))
        return var

    def _axes(self, expr: relax.Expr) -> frozenset[str]:
        if isinstance(expr, relax.Var):
            return self._own.get(expr, frozenset())
        edge = _edge(expr)
        if edge is None and not self._own:
            return frozenset()
        axes = frozenset().union(*(self._own.get(var, frozenset()) for var in relax.analysis.free_vars(expr)))
        if edge is None:
            return axes
        name, mine = edge
        return axes | mine if name == PER_DEVICE else axes - mine

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


def _edge(expr: relax.Expr) -> tuple[str, frozenset[str]] | None:
    """What leads into what devices have of their own or out of it, and its axes, if an expression is that."""
    if not isinstance(expr, relax.Call) or not expr.args or not isinstance(expr.args[0], relax.ExternFunc):
        return None
    name = str(expr.args[0].global_symbol)
    return (name, frozenset(str(expr.args[-1].value).split(","))) if name in (PER_DEVICE, ALL_DEVICES) else None


_EINSUM, _TRANSPOSE = "relax.einsum", "relax.permute_dims"


def turned_products(bindings: Sequence[relax.VarBinding], results: relax.Expr) -> list[relax.VarBinding]:
    """The bindings, in which a permute_dims of an einsum that nothing else takes is that einsum in another order, where
    the einsum stands: what it takes may be needed no more by the time of the permute_dims."""
    uses = Counter(var for binding in bindings for var in relax.analysis.free_vars(binding.value))
    uses.update(relax.analysis.free_vars(results))
    made = {binding.var: binding for binding in bindings}
    turned: dict[relax.Var, relax.VarBinding] = {}  # by the einsum's variable
    for binding in bindings:
        source = made.get(binding.value.args[0]) if _is_call(binding.value, _TRANSPOSE) else None
        if source is not None and _is_call(source.value, _EINSUM) and uses[source.var] == 1:
            turned[source.var] = relax.VarBinding(binding.var, _turned(source.value, binding.value))
    gone = {binding.var for binding in turned.values()}
    return [turned.get(binding.var, binding) for binding in bindings if binding.var not in gone]


def _turned(product: relax.Call, transpose: relax.Call) -> relax.Call:
    """The einsum whose result has its dims in the order that a transpose gives them."""
    left, _, right = str(product.attrs.subscripts).replace(" ", "").partition("->")
    axes = transpose.attrs.axes
    order = [int(axis) % len(right) for axis in axes] if axes else range(len(right))[::-1]
    subscripts = f"{left}->{''.join(right[dim] for dim in order)}"
    made = relax.op.einsum(product.args[0], subscripts)
    relax.expr._update_struct_info(made, transpose.struct_info)
    return made


def _is_call(expr: relax.Expr, name: str) -> bool:
    return isinstance(expr, relax.Call) and isinstance(expr.op, ir.Op) and expr.op.name == name
