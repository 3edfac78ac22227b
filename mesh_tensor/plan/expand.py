"""Operators taken apart, where a dim is split that they need whole: a softmax into a max, ..., a variance into two
means, a norm into what it makes of such. What is known of a value, its mean among that, is computed once: a norm's
gradient takes what the norm did. Attention whose mask looks at positions that are split gets the mask as an operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy
from tvm import relax

from mesh_tensor.base.dtypes import NARROW, TensorType, is_float
from mesh_tensor.rules.operator.call import OpCall, op_call, tensor_type, tensors_in
from mesh_tensor.rules.operator.cost import count_flops
from mesh_tensor.rules.operator.vjp import VJP, vjp_call, vjp_of

from .atoms import Atoms
from .ir import Graph, Node, Scope, Value
from .propagate import Layouts

op = relax.op
Known = dict[Hashable, Value]  # by what they are of, and where they stand


def expand(graph: Graph, atoms: Atoms, layouts: Layouts) -> Graph | None:
    """The graph with such operators taken apart whose dim some axis splits, where that takes less than to gather the
    dim; None where there is none."""
    nodes: list[Node] = []
    known: Known = {}
    count = len(graph.nodes)
    for node in graph.nodes:
        make = _apart(node)
        if make is not None and _pays(node, graph, atoms, layouts, known):
            nodes += _Expansion(node, known).nodes(make)
            count -= 1
            continue
        nodes.append(node)
        if (key := _mean_of(node.call, node.inputs, node.scopes)) is not None:
            known.setdefault(key, node.outputs[0])
    return None if count == len(graph.nodes) else replace(graph, nodes=nodes)


def _mean_of(call: OpCall, inputs: Sequence[Value], scopes: tuple[Scope, ...]) -> Hashable | None:
    """What a mean is of that keeps its dims, and where it stands; None of anything else."""
    is_mean = call.name == "mean" and bool(call.attr("keepdims"))
    return ("mean", call.outputs[0].dtype, inputs[0], call.axes(call.attr("axis")), scopes) if is_mean else None


def _of(node: Node) -> OpCall:
    """The call, or that of which it is the gradient."""
    return vjp_of(node.call).forward if node.call.operator == VJP else node.call


def _dims(call: OpCall) -> tuple[int, ...]:
    """The dims that an operator needs whole."""
    return (1,) if call.name == _ATTENTION else call.axes(call.attr("axes" if call.name in _NORMS else "axis"))


def _key(what: str, node: Node) -> Hashable:
    """What is known of a node's first operand, along its dims, where it stands."""
    (x, *_) = node.inputs
    return what, _wide(x.type.dtype), x, _dims(_of(node)), node.scopes


def _pays(node: Node, graph: Graph, atoms: Atoms, layouts: Layouts, known: Known) -> bool:
    """Whether two sums along the dim, or one where its mean is there, take less than to gather it, and to do the work
    of all its devices on each. The result is split as the operand is then, unless another layout is stated for it."""
    x, result = node.inputs[0], node.outputs[0]
    positions = [one for dim in _dims(_of(node)) for one in atoms.positions(x, dim)]
    split, shape = layouts.of[x], atoms.shape(x)
    axes = [axis for position in positions for axis in split.axes_of(position)]
    if not axes or not is_float(x.type.dtype):
        return False
    if _of(node).name == _ATTENTION:
        return True  # nothing is sent for a mask
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
    sums = (1 if has_mean else 2) * change(row, _wide(x.type.dtype), total, whole)
    if result in graph.annotations and result.type == x.type:
        sums += change(shape, x.type.dtype, split, layouts.of[result])
    return sums < gathered + again


def _wide(dtype: str) -> str:
    """The dtype in which rows are summed."""
    return "float32" if dtype in NARROW else dtype


@dataclass(eq=False)
class _Expansion:
    """The nodes that a node becomes, in the making. `known`: what was made before it, of which it takes what it needs;
    what it makes of that kind is added."""

    node: Node
    known: Known

    def __post_init__(self) -> None:
        self._builder, self._made = relax.BlockBuilder(), list[Node]()
        self.given = [value.variable() for value in self.node.inputs]
        self._values = dict(zip(self.given, self.node.inputs, strict=True))

    def nodes(self, make: _Make) -> list[Node]:
        """All of them, in order."""
        results = make(self)
        named: dict[Value, Value] = {}
        for var, result in zip(results, self.node.outputs, strict=True):
            named[self._values[self.cast(var, result.type.dtype)]] = result
        return [replace(one, outputs=tuple([named.get(v, v) for v in one.outputs])) for one in self._made]

    def wide(self) -> list[relax.Var]:
        """The node's operands, in the dtype in which rows are summed."""
        return [self.cast(x, _wide(x.struct_info.dtype)) for x in self.given]

    def cast(self, x: relax.Var, dtype: str) -> relax.Var:
        """In that dtype."""
        return x if x.struct_info.dtype == dtype else self(op.astype(x, dtype))

    def __call__(self, expr: relax.Expr) -> relax.Var:
        """What an expression of what was made gives."""
        call = op_call(self._builder.normalize(expr))
        inputs = tuple([self._value(arg) for arg in tensors_in(call.expr.args)])
        key = _mean_of(call, inputs, self.node.scopes)
        if key in self.known:
            return self._variable(self.known[key])
        return self._added(call, inputs)[0]

    def all(self, expr: relax.Expr) -> list[relax.Var]:
        """The same, of an expression that gives several."""
        call = op_call(self._builder.normalize(expr))
        return self._added(call, tuple([self._value(arg) for arg in tensors_in(call.expr.args)]))

    def _added(self, call: OpCall, inputs: tuple[Value, ...]) -> list[relax.Var]:
        name = f"{self.node.outputs[0].name}_{len(self._made)}"
        values = tuple([Value(f"{name}_{n}" if n else name, out) for n, out in enumerate(call.outputs)])
        self._made.append(Node(call, inputs, values, self.node.scopes, self.node.where))
        return [self._variable(value) for value in values]

    def once(self, key: Hashable, make: Callable[[], relax.Var]) -> relax.Var:
        """What is known under this key, or becomes known now."""
        if key not in self.known:
            self.known[key] = self._values[make()]
        return self._variable(self.known[key])

    def _variable(self, value: Value) -> relax.Var:
        made = value.variable()
        self._values[made] = value
        return made

    def _value(self, arg: relax.Expr) -> Value:
        if isinstance(arg, relax.Constant):
            return Value("const", tensor_type(arg.struct_info, "a constant"), arg)
        return self._values[arg]


def _powers(made: _Expansion, x: relax.Var) -> tuple[relax.Var, relax.Var, relax.Var]:
    """x less its maximum, what exp makes of that, and the sum of it."""
    (axis,) = _dims(made.node.call)
    below = made(op.subtract(x, made(op.max(x, axis, True))))
    powers = made(op.exp(below))
    return below, powers, made(op.sum(powers, axis, True))


def _softmax(made: _Expansion) -> list[relax.Var]:
    _, powers, total = _powers(made, *made.wide())
    return [made(op.divide(powers, total))]


def _log_softmax(made: _Expansion) -> list[relax.Var]:
    below, _, total = _powers(made, *made.wide())
    return [made(op.subtract(below, made(op.log(total))))]


def _variance(made: _Expansion) -> list[relax.Var]:
    call, (x,) = made.node.call, made.wide()
    axes = list(_dims(call))
    apart = made(op.subtract(x, made(op.mean(x, axes, True))))
    return [made(op.mean(made(op.multiply(apart, apart)), axes, bool(call.attr("keepdims"))))]


def _deviation(made: _Expansion) -> list[relax.Var]:
    (variance,) = _variance(made)
    return [made(op.sqrt(variance))]


def _normal(made: _Expansion, x: relax.Var) -> tuple[relax.Var, relax.Var]:
    """What a norm makes of x before it is scaled; and what it multiplies with: one over a deviation."""
    call = _of(made.node)
    axes, epsilon = list(_dims(call)), relax.const(call.attr("epsilon"), x.struct_info.dtype)
    if call.name == "nn.layer_norm":
        x = made(op.subtract(x, made.once(_key("mean", made.node), lambda: made(op.mean(x, axes, True)))))

    def rate() -> relax.Var:
        squares = made(op.mean(made(op.multiply(x, x)), axes, True))
        return made(op.rsqrt(made(op.add(squares, epsilon))))

    found = made.once(_key(f"{call.name} {call.attr('epsilon')}", made.node), rate)
    return made(op.multiply(x, found)), found


def _norm(made: _Expansion) -> list[relax.Var]:
    x, gamma, *beta = made.wide()
    scaled = made(op.multiply(_normal(made, x)[0], gamma))
    return [made(op.add(scaled, *beta)) if beta else scaled]


def _norm_gradient(made: _Expansion) -> list[relax.Var]:
    """Of x, of what it is multiplied with, of what is added."""
    call, (x, gamma, *_, seed) = _of(made.node), made.wide()
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


def _attention(made: _Expansion) -> list[relax.Var]:
    call = made.node.call
    return [made(op.nn.attention(*made.given, _seen(made, call), call.attr("scale")))]


def _attention_gradient(made: _Expansion) -> list[relax.Var]:
    stated, mask = vjp_of(made.node.call), _seen(made, _of(made.node))
    bias = op.nn.attention(*_stand_ins(stated.operands), mask, stated.forward.attr("scale"))
    *given, seed = made.given
    operands = {**dict(zip(stated.given, given, strict=True)), 3: mask}
    expr = vjp_call(op_call(relax.BlockBuilder().normalize(bias)), operands, {0: seed}, stated.wrt)
    return made.all(expr)


def _seen(made: _Expansion, call: OpCall) -> relax.Var:
    """What a mask adds to the product of a query and a key, by their positions in the whole sequence."""
    (queries, keys), window = (tensor.shape[1] for tensor in call.inputs[:2]), call.attr("window_size")
    start = keys - queries if call.attr("causal_mask") == "BottomRight" else 0
    dtype = call.inputs[0].dtype

    def mask() -> relax.Var:
        rows = made(op.reshape(made(op.arange(start, start + queries, 1, "int64")), (1, 1, queries, 1)))
        columns = made(op.reshape(made(op.arange(0, keys, 1, "int64")), (1, 1, 1, keys)))
        seen = made(op.less_equal(columns, rows))
        if window is not None:
            first = made(op.subtract(rows, relax.const(window, "int64")))
            seen = made(op.logical_and(seen, made(op.greater(columns, first))))
        zero, lowest = (relax.const(numpy.array([value]), dtype) for value in (0.0, -math.inf))
        return made(op.where(seen, zero, lowest))

    return made.once(("mask", queries, keys, start, window, dtype, made.node.scopes), mask)


def _stand_ins(types: Sequence[TensorType]) -> list[relax.Var]:
    return [relax.Var(f"x{n}", relax.TensorStructInfo(each.shape, each.dtype)) for n, each in enumerate(types)]


_Make = Callable[[_Expansion], Sequence[relax.Var]]
_ALONG: dict[str, _Make] = {
    "nn.softmax": _softmax,
    "nn.log_softmax": _log_softmax,
    "std": _deviation,
    "variance": _variance,
}
_OF_MEANS = ("std", "variance", "nn.layer_norm")
_ATTENTION = "nn.attention"
_NORMS = ("nn.layer_norm", "nn.rms_norm")


def _apart(node: Node) -> _Make | None:
    """How an operator is taken apart, if it is one of those: norms over the last dims, in their order, and attention
    with a mask."""
    if node.call.operator in _ALONG:
        return _ALONG[node.call.operator]
    is_gradient = node.call.operator == VJP
    call = _of(node)
    if call.name == _ATTENTION and call.attr("causal_mask") is not None:
        return _attention_gradient if is_gradient else _attention
    if call.name not in _NORMS:
        return None
    ndim, axes = call.inputs[0].ndim, _dims(call)
    plain = axes == tuple(range(ndim - len(axes), ndim)) and call.attr("scale", True) and call.attr("center", True)
    whole = not is_gradient or len(node.inputs) == len(call.inputs) + 1
    return (_norm_gradient if is_gradient else _norm) if plain and whole else None
