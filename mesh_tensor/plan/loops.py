"""Loops: what a function that ends by calling itself is.

    def f(i, state, xs, sums):
        more = i < 5                            head: run before every step, and once more at the end
        if more:
            x = take(xs, i, axis=0)             body
            ...
            r = f(i + 1, new, xs, put(sums, i, row))
        else:
            r = (state, sums)                   ending
        return r

A parameter that is handed on as it is stays the same (`xs`); the others are carried. Where one of them counts from a
number to another, it is known how often the body runs; then what is taken of a parameter at the count alone, and what
is put into one at the count alone, are the rows that steps take and give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import ir, relax

from mesh_tensor.rules.operator.call import op_name, plain


@dataclass(frozen=True, eq=False)
class Recursion:
    """A function that ends by calling itself: `again` are the arguments of that call, `ending` gives its result when it
    does not. `goes_on`: what `condition` is when it calls itself."""

    params: tuple[relax.Var, ...]
    head: tuple[relax.Binding, ...]
    condition: relax.Expr
    goes_on: bool
    body: tuple[relax.Binding, ...]
    again: tuple[relax.Expr, ...]
    ending: relax.Expr

    @cached_property
    def kept(self) -> frozenset[int]:
        """The parameters that stay the same."""
        pairs = zip(self.params, self.again, strict=True)
        return frozenset([n for n, (param, arg) in enumerate(pairs) if _same(param, arg)])

    @cached_property
    def bound(self) -> dict[relax.Var, relax.Expr]:
        """What head and body bind."""
        return {one.var: one.value for one in (*self.head, *self.body)}

    def counter(self, given: Sequence[int | None]) -> Counter | None:
        """What counts the steps, if parameters begin with these numbers, where they are known."""
        call = self.bound.get(self.condition, self.condition) if self.goes_on else None
        if not isinstance(call, relax.Call) or op_name(call.op) != "less":
            return None
        for number, (param, first) in enumerate(zip(self.params, given, strict=True)):
            last, step = self._size(call.args[1]), self._call(self.again[number], "add")
            by_one = step is not None and _same(step.args[0], param) and whole_number(step.args[1]) == 1
            if first is not None and last is not None and by_one and _same(call.args[0], param):
                return Counter(number, first, max(first, last))
        return None

    def _size(self, expr: relax.Expr) -> int | None:
        """The whole number that a constant is, or a size that is made a tensor, as R.arange(n, n + 1)."""
        shaped = self._call(expr, "reshape")
        made = None if shaped is None or shaped.struct_info.ndim else self._call(shaped.args[0], "arange")
        if made is None:
            return whole_number(expr)
        first, last, step = map(plain, made.args[:3])
        return first if isinstance(first, int) and last == first + 1 and step == 1 else None

    def rows_taken(self, counter: Counter) -> dict[relax.Var, int]:
        """The variables that are a parameter's row at the count, with its number; of parameters that have the row, and
        stay the same."""
        found = {}
        for binding in self.body:
            call = binding.value
            is_take = isinstance(call, relax.Call) and op_name(call.op) == "take" and len(call.args) == 2
            if is_take and plain(call.attrs.axis) == 0 and _same(call.args[1], self.params[counter.at]):
                number = next((n for n, param in enumerate(self.params) if _same(param, call.args[0])), -1)
                if number in self.kept and counter.within(self.params[number]):
                    found[binding.var] = number
        return found

    def rows_put(self, counter: Counter) -> dict[int, relax.Expr]:
        """The parameters of which each step puts the row at the count, and nothing else looks at: each with that row.
        All of their rows are put."""
        found = {}
        for number, again in enumerate(self.again):
            put, param = self._call(again, "scatter_nd"), self.params[number]
            if put is None or put.attrs.reduction != "update" or not _same(put.args[0], param):
                continue
            index = self._call(put.args[1], "reshape", "expand_dims")
            at = (
                index is not None
                and _same(index.args[0], self.params[counter.at])
                and put.args[1].struct_info.ndim == 1
            )
            alone = all(sum(_uses(var, value) for value in self._taken()) == 1 for var in (param, again))
            if at and alone and counter.first == 0 and plain(param.struct_info.shape.values[0]) == counter.last:
                found[number] = put.args[2]
        return found

    def _call(self, var: relax.Expr, *names: str) -> relax.Call | None:
        """The call of one of these operators that a variable is bound to."""
        value = self.bound.get(var)
        return value if isinstance(value, relax.Call) and op_name(value.op) in names else None

    def _taken(self) -> Iterator[relax.Expr]:
        """Everything that a step computes with."""
        yield from (*self.bound.values(), *self.again, self.condition)


@dataclass(frozen=True)
class Counter:
    """The parameter `at` counts from `first` to just below `last`."""

    at: int
    first: int
    last: int

    def within(self, rows: relax.Var) -> bool:
        """Whether a tensor has a row for every count."""
        sizes = [plain(size) for size in rows.struct_info.shape.values]
        return bool(sizes) and isinstance(sizes[0], int) and self.first >= 0 and self.last <= sizes[0]


def recursion_of(name: str, func: relax.Function) -> Recursion | None:
    """What the function of that name is, if it ends by calling itself, and does so nowhere else."""
    if not calls_itself(name, func) or not isinstance(func.body, relax.SeqExpr):
        return None
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    *head, last = bindings or [None]
    if not isinstance(last, relax.VarBinding) or not isinstance(last.value, relax.If):
        return None
    if not _same(last.var, func.body.body) or any(name in _calls(binding.value) for binding in head):
        return None
    branches = last.value.true_branch, last.value.false_branch
    found = [_tail_call(name, branch) for branch in branches]
    for goes_on, made, ending in ((True, found[0], branches[1]), (False, found[1], branches[0])):
        if made is not None and name not in _calls(ending):
            body, call = made
            params, again = tuple(func.params), tuple(call.args)
            return Recursion(params, tuple(head), last.value.cond, goes_on, body, again, ending)
    return None


def calls_itself(name: str, func: relax.Function) -> bool:
    """Whether its body has a call of it."""
    return name in _calls(func.body)


def _tail_call(name: str, branch: relax.Expr) -> tuple[tuple[relax.Binding, ...], relax.Call] | None:
    """The bindings of a branch, and the call of the function in which it ends."""
    if not isinstance(branch, relax.SeqExpr):
        return ((), branch) if name in _calls(branch) and isinstance(branch, relax.Call) else None
    bindings = [binding for block in branch.blocks for binding in block.bindings]
    result = branch.body
    while bindings and isinstance(result, relax.Var) and _same(bindings[-1].var, result):
        result = bindings.pop().value
    is_call = isinstance(result, relax.Call) and isinstance(result.op, ir.GlobalVar) and result.op.name_hint == name
    if not is_call or any(name in _calls(binding.value) for binding in bindings):
        return None
    return tuple(bindings), result


def _calls(expr: relax.Expr) -> set[str]:
    """The module's functions that an expression calls."""
    found: set[str] = set()

    def look(node: Any) -> None:
        if isinstance(node, relax.Call) and isinstance(node.op, ir.GlobalVar):
            found.add(node.op.name_hint)

    relax.analysis.post_order_visit(expr, look)
    return found


def _uses(var: relax.Var, expr: relax.Expr) -> int:
    """How often a variable stands in an expression."""
    count = 0

    def look(node: Any) -> None:
        nonlocal count
        count += isinstance(node, relax.Var) and node.same_as(var)

    relax.analysis.post_order_visit(expr, look)
    return count


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, relax.Var) and one.same_as(other)


def whole_number(expr: relax.Expr | None) -> int | None:
    """The whole number that a constant is, None for all else."""
    if not isinstance(expr, relax.Constant) or expr.data.shape or "int" not in expr.data.dtype:
        return None
    return int(expr.data.numpy())


def used_in(bindings: Sequence[relax.Binding], expr: relax.Expr) -> set[relax.Var]:
    """The variables that an expression takes from outside, of those that the bindings make."""
    free = relax.analysis.free_vars(expr)
    return {binding.var for binding in bindings if any(binding.var.same_as(var) for var in free)}
