"""What the symbolic sizes of a function have to fulfil. (A model that decides by a size is recorded with one way.)"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from tvm import relax

from mesh_tensor.base.errors import refuse, shown

# A function attribute that an importer sets: texts like "n % 4 == 0", over names of symbols.
CONDITIONS_ATTR = "mesh_tensor_sizes"
# TVM's own attributes: from names of symbols to the least and the most that they may be.
_BOUNDS = {"tir_var_lower_bound": ">=", "tir_var_upper_bound": "<="}
_NO_LOWER_BOUND = 2  # torch assumes of every open size that it is neither 0 nor 1, and takes both

_FUNCTIONS = {"max": max, "min": min, "abs": abs}
_ARITHMETIC = (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.UnaryOp, ast.USub)
_LOGIC = (ast.BoolOp, ast.And, ast.Or, ast.Not, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class SizeCondition:
    """A condition on sizes, in Python's syntax: comparisons of sums, products and quotients of numbers and names.
    Refused where something else is in it."""

    def __init__(self, text: str) -> None:
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            refuse(f"the condition {shown(text)} on sizes can't be read", why=str(error))
        if other := [type(node).__name__ for node in ast.walk(tree.body) if not _is_known(node)]:
            refuse(f"the condition {shown(text)} on sizes can't be read", why=f"there is a {other[0]} in it")
        self._tree, self.text = tree, ast.unparse(tree)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.names = frozenset(names - _FUNCTIONS.keys())

    @cached_property
    def _code(self) -> Any:
        return compile(self._tree, "<sizes>", "eval")

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes fulfil it; where it divides by 0 they don't."""
        try:
            return bool(eval(self._code, {"__builtins__": {}, **_FUNCTIONS}, dict(sizes)))  # of what is known alone
        except ZeroDivisionError:
            return False


def size_conditions(func: relax.Function) -> tuple[SizeCondition, ...]:
    """What the function's symbols have to fulfil."""
    attrs = func.attrs or {}
    bounds = [
        f"{name} {sign} {int(bound)}"
        for attr, sign in _BOUNDS.items()
        for name, bound in sorted(attrs.get(attr, {}).items())
        if sign == "<=" or int(bound) > _NO_LOWER_BOUND
    ]
    texts = dict.fromkeys([*bounds, *map(str, attrs.get(CONDITIONS_ATTR, ()))])
    return tuple(map(SizeCondition, texts))


def unfulfilled(
    conditions: Iterable[SizeCondition], sizes: Mapping[str, int], places: Mapping[str, str]
) -> Iterator[str]:
    """What these sizes don't fulfil; what is about others is left out. `places`: what a size is one of, in words."""
    for condition in conditions:
        if condition.names <= sizes.keys() and not condition.holds(sizes):
            told = [f"{name} = {sizes[name]} ({places[name]})" for name in sorted(condition.names)]
            yield f"{', '.join(told)}, but the module is for {condition.text}"


def _is_known(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float))
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and bool(node.args) and not node.keywords
    return isinstance(node, (ast.Name, ast.Load, *_ARITHMETIC, *_LOGIC))
