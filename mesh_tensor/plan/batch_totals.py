"""The function that is run on parts of a batch, which is told of the whole one: what sums are over all parts, and which
share of the rows a part has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import ir, relax

from mesh_tensor.annotations.names import Fresh, variables

from .batch_kinds import Mean, Sum


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
