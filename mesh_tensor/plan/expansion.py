"""The nodes that others are in the place of one, as where an operator is taken apart; and what is known by then of what
it takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from tvm import relax

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.rules.operator.call import OpCall, op_call, tensor_type, tensors_in
from mesh_tensor.rules.operator.vjp import VJP, vjp_of

from .ir import Node, Scope, Value

op = relax.op
Known = dict[Hashable, Value]  # by what they are of, and where they stand


def mean_of(call: OpCall, inputs: Sequence[Value], scopes: tuple[Scope, ...]) -> Hashable | None:
    """What a mean is of that keeps its dims, and where it stands; None of anything else."""
    is_mean = call.name == "mean" and bool(call.attr("keepdims"))
    return ("mean", call.outputs[0].dtype, inputs[0], call.axes(call.attr("axis")), scopes) if is_mean else None


def of_node(node: Node) -> OpCall:
    """The call, or that of which it is the gradient."""
    return vjp_of(node.call).forward if node.call.operator == VJP else node.call


def wide(dtype: str) -> str:
    """The dtype in which rows are summed."""
    return "float32" if dtype in NARROW else dtype


@dataclass(eq=False)
class Expansion:
    """The nodes that a node becomes, in the making. `known`: what was made before it, of which it takes what it needs;
    what it makes of that kind is added."""

    node: Node
    known: Known = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._builder, self._made = relax.BlockBuilder(), list[Node]()
        self.given = [value.variable() for value in self.node.inputs]
        self._values = dict(zip(self.given, self.node.inputs, strict=True))

    def nodes(self, make: Make) -> list[Node]:
        """All of them, in order. A result may be taken by others of them, or be what was there before."""
        results = make(self)
        named: dict[Value, Value] = {}
        for var, result in zip(results, self.node.outputs, strict=True):
            value = self._values[self.cast(var, result.type.dtype)]
            if value in named or all(value not in one.outputs for one in self._made):
                value = self._values[self(op.reshape(var, list(result.type.shape)))]
            named[value] = result

        def again(values: Sequence[Value]) -> tuple[Value, ...]:
            return tuple([named.get(value, value) for value in values])

        return [replace(one, inputs=again(one.inputs), outputs=again(one.outputs)) for one in self._made]

    def wide(self) -> list[relax.Var]:
        """The node's operands, in the dtype in which rows are summed."""
        return [self.cast(x, wide(x.struct_info.dtype)) for x in self.given]

    def cast(self, x: relax.Var, dtype: str) -> relax.Var:
        """In that dtype."""
        return x if x.struct_info.dtype == dtype else self(op.astype(x, dtype))

    def __call__(self, expr: relax.Expr) -> relax.Var:
        """What an expression of what was made gives."""
        call = op_call(self._builder.normalize(expr))
        inputs = tuple([self._value(arg) for arg in tensors_in(call.expr.args)])
        key = mean_of(call, inputs, self.node.scopes)
        if key in self.known:
            return self.variable(self.known[key])
        return self._added(call, inputs)[0]

    def all(self, expr: relax.Expr) -> list[relax.Var]:
        """The same, of an expression that gives several."""
        call = op_call(self._builder.normalize(expr))
        return self._added(call, tuple([self._value(arg) for arg in tensors_in(call.expr.args)]))

    def _added(self, call: OpCall, inputs: tuple[Value, ...]) -> list[relax.Var]:
        name = f"{self.node.outputs[0].name}_{len(self._made)}"
        values = tuple([Value(f"{name}_{n}" if n else name, out) for n, out in enumerate(call.outputs)])
        self._made.append(Node(call, inputs, values, self.node.scopes, self.node.where))
        return [self.variable(value) for value in values]

    def once(self, key: Hashable, make: Callable[[], relax.Var]) -> relax.Var:
        """What is known under this key, or becomes known now."""
        if key not in self.known:
            self.known[key] = self._values[make()]
        return self.variable(self.known[key])

    def variable(self, value: Value) -> relax.Var:
        """What stands for a value that is there by then."""
        made = value.variable()
        self._values[made] = value
        return made

    def _value(self, arg: relax.Expr) -> Value:
        if isinstance(arg, relax.Constant):
            return Value("const", tensor_type(arg.struct_info, "a constant"), arg)
        return self._values[arg]


Make = Callable[[Expansion], Sequence[relax.Var]]
