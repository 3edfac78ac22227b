"""Flow: the top-level bindings of a Relax function, and which takes what from which. Cuts go between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from tvm import ir, relax

from mesh_tensor.annotations.names import check_module, relax_function, unique_names, with_flat_parameters
from mesh_tensor.base.dtypes import is_float
from mesh_tensor.base.errors import refuse


class Flow:
    """The bindings of `function`, by name, in an order in which they can run. Every variable has a name of its own;
    calls of the module's functions are one binding each."""

    def __init__(self, mod: ir.IRModule, function: str) -> None:
        check_module(mod, "pipeline")
        self.mod = unique_names(with_flat_parameters(mod, function))
        self.function = function
        self.func = relax_function(self.mod, function)
        self.blocks = list(self.func.body.blocks)
        self.bindings = {b.var.name_hint: b for block in self.blocks for b in block.bindings}
        self.params = {var.name_hint: var for var in self.func.params}
        self.operands = {name: operands(b.value) for name, b in self.bindings.items()}

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The names of the tensors that the function returns, in order; tuples are taken apart."""
        return tuple(self._leaves(self.func.body.body))

    def tree(self, values: Mapping[str, Any]) -> Any:
        """What the function returns, with these values in place of its variables."""
        return self._tree(self.func.body.body, values)

    def _tree(self, expr: relax.Expr, values: Mapping[str, Any]) -> Any:
        if isinstance(expr, relax.Tuple):
            return tuple(self._tree(field, values) for field in expr.fields)
        name = expr.name_hint
        return values[name] if name in values else self._tree(self.bindings[name].value, values)

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """Per value: the bindings that take it."""
        found: dict[str, list[str]] = {name: [] for name in (*self.params, *self.bindings)}
        for name, taken in self.operands.items():
            for value in taken:
                found[value].append(name)
        return found

    def is_float(self, name: str) -> bool:
        """Whether a value is a tensor of floats."""
        info = (self.params[name] if name in self.params else self.bindings[name].var).struct_info
        return isinstance(info, relax.TensorStructInfo) and is_float(str(info.dtype))

    def above(self, roots: Iterable[str], among: Iterable[str] | None = None) -> set[str]:
        """The bindings that `roots` depend on, and they themselves; if so, only those among some."""
        allowed = self.bindings if among is None else set(among)
        found: set[str] = set()
        todo = [name for name in roots if name in allowed]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [value for value in self.operands[name] if value in allowed]
        return found

    def below(self, roots: Iterable[str]) -> set[str]:
        """The bindings that depend on `roots` (parameters or bindings)."""
        reached = set(roots)
        for name, taken in self.operands.items():
            if not reached.isdisjoint(taken):
                reached.add(name)
        return reached & self.bindings.keys()

    def _leaves(self, expr: relax.Expr) -> list[str]:
        if isinstance(expr, relax.Tuple):
            return [name for field in expr.fields for name in self._leaves(field)]
        if isinstance(expr, relax.Var) and not isinstance(expr.struct_info, relax.TupleStructInfo):
            return [expr.name_hint]
        if isinstance(expr, relax.Var) and expr.name_hint in self.bindings:
            value = self.bindings[expr.name_hint].value
            if isinstance(value, (relax.Tuple, relax.Var)):
                return self._leaves(value)
        return refuse(
            f"the result {expr} is no variable, or a tuple that is not written as one",
            where=f"module function {self.function!r}",
            why="every result has to come from one stage",
            fix="bind each result to a variable, and return a tuple of these",
        )


def operands(expr: relax.Expr) -> list[str]:
    """The variables that an expression takes, by name, each once."""
    free = relax.analysis.free_vars(expr)
    return list(dict.fromkeys(var.name_hint for var in free))
