"""What the parts of a batch make of a value: rows behind each other, a sum, a mean, the same in all; and the
function that is run on them, which is told of the whole batch.

By an operator's sharding rule: rows are followed through the factors, sums and means through what is linear in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, relax

from mesh_tensor.annotations.names import Fresh, variables
from mesh_tensor.base.dtypes import is_float
from mesh_tensor.rules.operator import OpRule, TensorType
from mesh_tensor.rules.operator.aten import name_of
from mesh_tensor.rules.operator.rule import Dim, atoms_of

from .ir import Node
from .tir_rule import counted


@dataclass(frozen=True)
class Fixed:
    """The same for every part of a batch; differs between positions along the dims `along` at most."""

    along: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rows:
    """The batch's value has the parts' behind each other along `dim`, which is (`outer`, rows and what is in them).
    `count`: how many rows a part has."""

    dim: int
    outer: int
    count: int


@dataclass(frozen=True)
class Sum:
    """The batch's value is the sum of the parts'. `elements`: of how many elements it is one, in a part."""

    elements: int


@dataclass(frozen=True)
class Mean:
    """The batch's value is the mean of the parts', weighted by their rows."""


@dataclass(frozen=True)
class Mixed:
    """The batch's value does not follow from the parts'."""

    why: str


Kind = Fixed | Rows | Sum | Mean | Mixed
_REGROUPS = ("reshape", "flatten", "nn.batch_flatten", "expand_dims", "squeeze")


def result_kinds(node: Node, rule: OpRule, kinds: Sequence[Kind]) -> list[Kind]:
    """The kinds of a node's results, of its operands'."""
    mixed = next((kind for kind in kinds if isinstance(kind, Mixed)), None)
    if mixed is not None:
        return [mixed] * len(node.outputs)
    rows = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, Rows)}
    added = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, (Sum, Mean))}
    if rows and added:
        names = ", ".join(node.inputs[i].name for i in added)
        return _mixed(node, f"takes rows of the batch and {names}, which is made of all rows")
    if rows:
        return _of_rows(node, rule, kinds, rows)
    return _of_sums(node, rule, added) if added else _fixed(node, rule, kinds)


def _mixed(node: Node, why: str) -> list[Kind]:
    return [Mixed(f"{node.where} ({name_of(node.call)}) {why}")] * len(node.outputs)


def _fixed(node: Node, rule: OpRule, kinds: Sequence[Kind]) -> list[Kind]:
    """What does not depend on the batch: along which dims it varies. Along a factor, a result is made of what the
    operands have there: if these don't vary along it, it doesn't either, unless it minds where it stands."""
    moving = {*placed_factors(rule), *(counted(node) if node.kernel is not None else ())}
    for kind, dims in zip(kinds, rule.inputs, strict=True):
        for d in kind.along if isinstance(kind, Fixed) else ():
            moving.update(atoms_of(dims[d]))

    def varies(dim: Dim, size: int) -> bool:
        return size > 1 and (dim is None or not moving.isdisjoint(atoms_of(dim)))

    return [
        Fixed(frozenset(d for d, dim in enumerate(dims) if varies(dim, value.type.shape[d])))
        for value, dims in zip(node.outputs, rule.outputs, strict=True)
    ]


def placed_factors(rule: OpRule) -> frozenset[str]:
    """The factors along which an operator may make something else of the same in another place."""
    windows = {reaches.factor for reaches in rule.windows.values()}
    inner = {one.factor for one in rule.inner}
    return rule.positional | rule.unsplit | rule.devices | rule.blocks.keys() | rule.first.keys() | windows | inner


def _of_sums(node: Node, rule: OpRule, added: dict[int, Sum | Mean]) -> list[Kind]:
    """Sums and means through what is linear in them. A mean is one with what is fixed added to it."""
    waiting, means = set(added), any(isinstance(kind, Mean) for kind in added.values())
    names = " and ".join(node.inputs[i].name for i in added)
    if len({type(kind) for kind in added.values()}) > 1:
        return _mixed(node, f"takes sums and means over the batch's rows together, {names}")
    together = next((linear for linear in rule.linear if waiting <= linear), None)
    if together is None and waiting == {0} and _is_rounded(node):
        together = frozenset({0})
    if together is None:
        return _mixed(node, f"is not linear in {names}, which is made of all rows")
    if means:
        return [Mean()] * len(node.outputs)
    if together != waiting:
        fixed = " and ".join(node.inputs[i].name for i in sorted(together - waiting))
        return _mixed(node, f"adds {fixed}, which is the same for all rows, to {names}, a sum over them")
    elements = {kind.elements for kind in added.values() if isinstance(kind, Sum)}
    return [Sum(elements.pop() if len(elements) == 1 else 0)] * len(node.outputs)


def _is_rounded(node: Node) -> bool:
    """A cast that changes sums by rounding at most: not one to whole numbers."""
    return node.call.name == "astype" and (
        is_float(node.call.outputs[0].dtype) or node.call.inputs[0].dtype == node.call.outputs[0].dtype
    )


def _of_rows(node: Node, rule: OpRule, kinds: Sequence[Kind], rows: dict[int, Rows]) -> list[Kind]:
    """Rows through the factor that they are; summed over, they are a sum."""
    if node.call.name in _REGROUPS:
        return [_regrouped(node, rows[0])]
    found = {rule.inputs[i][kind.dim] for i, kind in rows.items()}
    like = {(kind.outer, kind.count) for kind in rows.values()}
    factor = found.pop() if len(found) == 1 else None
    if not isinstance(factor, str) or len(like) != 1:
        return _mixed(node, "needs the batch's rows together")
    if node.kernel is not None and (factor in rule.reduced or factor in counted(node)):
        return _mixed(node, "is a kernel that sums over the batch's rows, or computes with their numbers")
    why = _in_the_way(node, rule, kinds, factor)
    if why:
        return _mixed(node, why)
    some = next(iter(rows.values()))
    return [_along(node, rule, factor, some, number, dims) for number, dims in enumerate(rule.outputs)]


def _in_the_way(node: Node, rule: OpRule, kinds: Sequence[Kind], factor: str) -> str:
    """Why rows are not on their own in an operator whose factor they are."""
    if factor in rule.positional or factor in rule.unsplit or any(one.factor == factor for one in rule.inner):
        return "needs the batch's rows together"
    for value, kind, dims in zip(node.inputs, kinds, rule.inputs, strict=True):
        for d, dim in enumerate(dims):
            meets = factor in atoms_of(dim) and value.type.shape[d] > 1
            if meets and isinstance(kind, Fixed) and d in kind.along:
                return f"takes rows of the batch with {value.name}, which has as many as one microbatch"
            if meets and isinstance(kind, Rows) and d != kind.dim:
                return f"takes the rows of {value.name} twice"
    return ""


def _along(node: Node, rule: OpRule, factor: str, rows: Rows, number: int, dims: Sequence[Dim]) -> Kind:
    """A result of an operator whose factor the rows are."""
    sizes = _sizes(node, rule)
    for d, dim in enumerate(dims):
        atoms = atoms_of(dim)
        if factor in atoms:
            before = math.prod(sizes[atom] for atom in atoms[: atoms.index(factor)])
            return Rows(d, rows.outer * before, rows.count)
    ops = rule.partial[number] if rule.partial else rule.reduced
    if ops.get(factor) != "sum":
        return _mixed(node, "needs the batch's rows together")[0]
    if node.call.name == "mean":
        return Mean()
    summed = {atom for dims in rule.inputs for dim in dims for atom in atoms_of(dim) if atom in ops}
    return Sum(math.prod(sizes[atom] for atom in summed))


def _sizes(node: Node, rule: OpRule) -> dict[str, int]:
    sizes = dict(rule.sizes)
    tensors: list[tuple[TensorType, tuple[Dim, ...]]] = [
        *zip(node.call.inputs, rule.inputs, strict=True),
        *zip(node.call.outputs, rule.outputs, strict=True),
    ]
    for tensor, dims in tensors:
        for size, dim in zip(tensor.shape, dims, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    return sizes


def _regrouped(node: Node, rows: Rows) -> Kind:
    """Rows of a tensor whose dims are taken apart or put together: what is before them stays before them, and they are
    not taken apart themselves."""
    source, target = node.inputs[0].type.shape, node.outputs[0].type.shape
    if source[: rows.dim + 1] == target[: rows.dim + 1]:
        return rows
    before = math.prod(source[: rows.dim]) * rows.outer
    if node.call.name == "expand_dims":
        new = {axis % len(target) for axis in node.call.attr("axis")}
        return Rows([d for d in range(len(target)) if d not in new][rows.dim], rows.outer, rows.count)
    done = 1
    for d, size in enumerate(target):
        mine = done * size > before and before % done == 0 and size % (before // done) == 0
        if mine and size // (before // done) % rows.count == 0 and (rows.count > 1 or before == 1):
            return Rows(d, before // done, rows.count)
        done *= size
    return _mixed(node, "regroups dims so that it is not known which has the batch's rows")[0]


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
