"""What of a function follows from how many rows its batch has, as `x.sum() / len(x)` does: numbers that values are, and
how they differ in the same function of a larger batch; and the function that is run on parts of a batch, which is told
of the whole one: what sums are over all parts, and which share of the rows a part has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, relax

from mesh_tensor.annotations.names import Fresh, variables
from mesh_tensor.rules.operator import OpRule
from mesh_tensor.rules.operator.aten import name_of
from mesh_tensor.rules.operator.rule import Dim, atoms_of

from .batch_devices import AnyKind, Apart, kind_within, with_kind
from .batch_kinds import Divided, Fixed, Mean, Mixed, Rows, Sum, placed_factors
from .ir import Graph, Node, Value


@dataclass(frozen=True)
class Total:
    """The binding `value` of the whole batch, as the parameter `name`: the sum of the parts', or the mean by rows."""

    name: str
    value: str
    kind: Sum | Mean


class PartsWriter:
    """Writes a function that takes totals and shares."""

    def __init__(self, func: relax.Function) -> None:
        self._func = func
        self._bindings = {b.var.name_hint: b for block in func.body.blocks for b in block.bindings}
        self._vars = {var.name_hint: var for var in variables(func)}
        self._fresh = Fresh(list(self._vars))
        self._params: dict[str, relax.Var] = {}
        self._swapped: dict[str, dict[str, relax.Var]] = {}  # binding that takes something -> what -> what instead
        self._scaled: dict[str, list[relax.Binding]] = {}  # binding -> what comes before it
        self.totals: dict[str, Total] = {}
        self.shares: dict[str, str] = {}

    def take_total(self, binding: str, user: str, kind: Sum | Mean) -> None:
        """In the binding `user`, the batch's value instead of the part's."""
        if binding not in self.totals:
            self.totals[binding] = Total(self._fresh.name(f"{binding}_total"), binding, kind)
            self._parameter(self.totals[binding].name, self._vars[binding].struct_info)
        self._swapped.setdefault(user, {})[binding] = self._params[self.totals[binding].name]

    def take_share(self, value: str, user: str) -> None:
        """In the binding `user`, the part's share of a value instead of it."""
        info = self._vars[value].struct_info
        share = next((name for name, dtype in self.shares.items() if dtype == info.dtype), "")
        if not share:
            share = self._fresh.name("batch_share")
            self.shares[share] = str(info.dtype)
            self._parameter(share, relax.TensorStructInfo((), info.dtype))
        scaled = relax.BlockBuilder().normalize(relax.op.multiply(self._vars[value], self._params[share]))
        made = type(self._vars[user])(self._fresh.name(f"{value}_share"), info)
        self._scaled.setdefault(user, []).append(relax.VarBinding(made, scaled))
        self._swapped.setdefault(user, {})[value] = made

    def written(self, mod: ir.IRModule, function: str) -> ir.IRModule:
        """The module with the function written so."""
        func, mod = self._func, mod.clone()
        blocks = [type(block)([b for old in block.bindings for b in self._again(old)]) for block in func.body.blocks]
        totals = [self._params[total.name] for total in self.totals.values()]
        params = [*func.params, *totals, *(self._params[name] for name in self.shares)]
        body = relax.SeqExpr(blocks, func.body.body)
        made = relax.Function(params, body, func.ret_struct_info, func.is_pure, func.attrs)
        mod.update_func(mod.get_global_var(function), made)
        return mod

    def _parameter(self, name: str, info: relax.StructInfo) -> None:
        self._params[name] = relax.Var(name, info)

    def _again(self, binding: relax.Binding) -> list[relax.Binding]:
        user = binding.var.name_hint
        wanted = self._swapped.get(user, {})
        swapped = {name: wanted[root] for name in self._vars if (root := self._root(name)) in wanted}
        value = _Swapped(swapped).visit_expr(binding.value) if swapped else binding.value
        if isinstance(binding, relax.MatchCast):
            made: relax.Binding = relax.MatchCast(binding.var, value, binding.struct_info)
        else:
            made = relax.VarBinding(binding.var, value)
        return [*self._scaled.get(user, ()), made]

    def _root(self, name: str) -> str:
        """The binding that one is another name of."""
        while name in self._bindings and isinstance(self._bindings[name].value, relax.Var):
            name = self._bindings[name].value.name_hint
        return name


@relax.expr_functor.mutator
class _Swapped(relax.PyExprMutator):
    """Writes an expression with other variables."""

    def __init__(self, swapped: Mapping[str, relax.Var]) -> None:
        super().__init__()
        self._swapped = swapped

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self._swapped.get(var.name_hint, var)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self._swapped.get(var.name_hint, var)


_SAME_NUMBER = ("reshape", "astype", "squeeze", "expand_dims", "broadcast_to", "full", "full_like", "mean", "sum")
_COMBINED: Mapping[str, Callable[[float, float], float]] = {
    "multiply": operator.mul,
    "add": operator.add,
    "maximum": max,
    "minimum": min,
}
_DIVIDING = ("divide", "multiply", "matmul")
_OF_SHAPES = ("reshape", "broadcast_to", "full", "ones", "zeros")  # whose options are shapes alone


class Numbers:
    """The numbers that values of a graph are everywhere, where that is known."""

    def __init__(self, graph: Graph) -> None:
        self._known: dict[Value, float | None] = {}
        for node in graph.nodes:
            self._known |= {value: self._made(node, value) for value in node.outputs}

    def of(self, value: Value) -> float | None:
        """The number that a value is everywhere."""
        if value not in self._known:
            array = None if value.data is None else value.data.data.numpy()
            same = array is not None and array.size and (array == array.flat[0]).all()
            self._known[value] = float(array.flat[0]) if array is not None and same else None
        return self._known[value]

    def divisor(self, node: Node) -> float | None:
        """What a node divides by, or multiplies with the inverse of."""
        if node.kernel is not None or node.call.name not in _DIVIDING:
            return None
        if node.call.name == "divide":
            return self.of(node.inputs[1])
        number = next((n for v in reversed(node.inputs) if (n := self.of(v)) is not None), None)
        return 1 / number if number else None

    def _made(self, node: Node, value: Value) -> float | None:
        if node.kernel is not None:
            return None
        name, known = node.call.name, [self.of(v) for v in node.inputs]
        operands = [number for number in known if number is not None]
        if name == "arange" and value.type.elements == 1:
            return float(node.call.literals[0])
        if name in ("ones", "ones_like"):
            return 1.0
        if not operands or len(operands) < len(known):
            return None
        if name in _COMBINED and len(operands) == 2:
            return _COMBINED[name](*operands)
        repeated = node.inputs[0].type.elements // max(1, value.type.elements) if name == "sum" else 1
        return operands[0] * repeated if name in _SAME_NUMBER else None


class Larger:
    """A graph beside that of the same function of a batch that has `times` as many rows. `differs`: why they are not
    the same operators on the same values, if they aren't."""

    def __init__(self, graph: Graph, larger: Graph, times: int) -> None:
        self._numbers, self._others, self._times = Numbers(graph), Numbers(larger), times
        self._twin = dict(zip(graph.params, larger.params, strict=True))
        self._nodes = dict(zip(graph.nodes, larger.nodes, strict=False))
        same = len(graph.nodes) == len(larger.nodes)
        self.differs = "" if same else f"there are {len(graph.nodes)} operators, and {len(larger.nodes)} for all rows"
        for node, other in self._nodes.items():
            pairs = list(zip(node.inputs, other.inputs, strict=False))
            alike = node.call.name == other.call.name and len(node.inputs) == len(other.inputs)
            if not (alike and all(self._twin.setdefault(mine, its) is its for mine, its in pairs)):
                self.differs = self.differs or f"{node.where} is another operator for all rows, or one of other values"
            self._twin |= dict(zip(node.outputs, other.outputs, strict=False))

    def kinds(self, node: Node, rule: OpRule, kinds: Sequence[AnyKind], made: Sequence[AnyKind]) -> list[AnyKind]:
        """The kinds of a node's results, which are `made` of operands of these kinds if all numbers are constants."""
        if self.differs:
            return [Mixed(self.differs)] * len(made)
        if any(isinstance(kind, Mixed) for kind in made):
            return list(made)
        fixed = [value for value, kind in zip(node.inputs, kinds, strict=True) if isinstance(kind, Fixed)]
        changed = [value for value in fixed if self._is_changed(value)]
        within = made[0].kind if isinstance(made[0], Apart) else made[0]
        if changed and isinstance(within, (Sum, Rows)) and rule.linear:
            mine, its = self._numbers.divisor(node), self._others.divisor(self._nodes[node])
            if mine and its and abs(its / mine - self._times) <= 1e-6 * self._times:
                return [with_kind(made[0], Mean() if isinstance(within, Sum) else Divided(within))]
        alone = len(fixed) == len(kinds)
        if alone and self._numbers.of(node.outputs[0]) is not None:
            return list(made)
        if not changed and (self._is_same_kernel(node, alone) if node.kernel else self._is_as_said(node, rule, made)):
            return list(made)
        names = " and ".join(value.name for value in changed) or "sizes or constants"
        why = f"{node.where} ({name_of(node.call)}) computes with {names}, which depend on how many rows there are"
        return [Mixed(why)] * len(made)

    def _is_changed(self, value: Value) -> bool:
        """Whether a number or a constant is another one for more rows."""
        mine, its = self._numbers.of(value), self._others.of(self._twin[value])
        if mine is not None or its is not None:
            return mine != its
        return value.data is not None and not _is_equal(value, self._twin[value])

    def _is_same_kernel(self, node: Node, alone: bool) -> bool:
        """Whether a kernel does the same for more rows: what depends on no part of the batch, by its very loops."""
        return not alone or ir.structural_equal(node.kernel, self._nodes[node].kernel)

    def _is_as_said(self, node: Node, rule: OpRule, made: Sequence[AnyKind]) -> bool:
        """Whether a node does the same with more rows, and its results have the shapes that their kinds say."""
        other = self._nodes[node]
        same = node.call.name in _OF_SHAPES or node.call.options == other.call.options
        resized = {dim for value, dims in zip(node.inputs, rule.inputs, strict=True) for dim in self._of(value, dims)}
        apart = resized.isdisjoint({None, *rule.reduced, *placed_factors(rule)})
        for value, kind in zip(node.outputs, made, strict=True):
            mine, its = value.type.shape, other.outputs[node.outputs.index(value)].type.shape
            if isinstance(kind, Fixed) and not (apart and (same or mine != its)):
                return False
            within = kind_within(kind)
            rows = within.dim if isinstance(within, Rows) else None
            grown = tuple(size * self._times if d == rows else size for d, size in enumerate(mine))
            if not isinstance(kind, Fixed) and not (same and its == grown):
                return False
        return True

    def _of(self, value: Value, dims: Sequence[Dim]) -> set[str | None]:
        """The factors of a value's dims that have other sizes for more rows; None: of one that has no factor."""
        sizes = zip(dims, value.type.shape, self._twin[value].type.shape, strict=True)
        return {atom for dim, mine, its in sizes if mine != its for atom in atoms_of(dim) or [None]}


def _is_equal(one: Value, other: Value) -> bool:
    if one.data is None or other.data is None or one.type != other.type:
        return False
    return bool((one.data.data.numpy() == other.data.data.numpy()).all())
