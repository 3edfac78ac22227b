"""What a kernel means, told by Python itself: its source is run as Python over numpy arrays, element by element.

Nothing of it goes through TIR, so this shares no mistake with the interpreter, the analysis or a code generator. Loops
run in order, whatever their kind; what lies outside a parameter reads as 0 and is not written."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from .python_language import LANGUAGE, Memory, Region


def run_as_python(source: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Run the kernel that `source` defines on its parameters' arrays, in place."""
    memory = {name: Memory(array, is_param=True) for name, array in arrays.items()}
    with np.errstate(all="ignore"):
        _function(source)(**memory)


@lru_cache(maxsize=64)
def _function(source: str) -> Callable[..., None]:
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    for arg in function.args.args:
        arg.annotation = None
    variables = {
        node.targets[0].id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _word(node.value) == "alloc_var"
    }
    tree = ast.fix_missing_locations(_ToPython(variables).visit(tree))
    scope: dict[str, Any] = {"T": LANGUAGE, "place": Region}
    exec(compile(tree, "<kernel as Python>", "exec"), scope)
    return scope[function.name]


def _word(call: ast.Call) -> str:
    """What is called: `copy` in `T.copy(...)`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


class _ToPython(ast.NodeTransformer):
    """TileLang to Python: programs are loops, choices are lazy, places are not read, variables keep their dtype."""

    _TAKES_PLACES = (
        "copy",
        "atomic_add",
        "atomic_max",
        "atomic_min",
        "atomic_or",
        "fill",
        "clear",
        "gemm",
        "cumsum",
        "cummax",
        "reducer_update",
    )

    def __init__(self, variables: set[str]):
        self.variables = variables

    def visit_With(self, node: ast.With) -> ast.stmt:
        launch, names = node.items[0].context_expr, node.items[0].optional_vars
        assert isinstance(launch, ast.Call)
        targets = names.elts if isinstance(names, ast.Tuple) else [names]
        body = [self.visit(stmt) for stmt in node.body]
        for target, extent in reversed(list(zip(targets, launch.args, strict=True))):
            body = [ast.For(target, _call("range", extent), body, [])]
        return body[0]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        word = _word(node)
        args = list(node.args)
        if word in self._TAKES_PLACES:
            args = [self._place(arg, whole=word == "copy" or n == 0) for n, arg in enumerate(args)]
        node.args = [self.visit(arg) for arg in args]
        if word == "if_then_else":
            condition, then, otherwise = node.args
            return ast.IfExp(condition, then, otherwise)
        return node

    def _place(self, arg: ast.expr, *, whole: bool) -> ast.expr:
        if not isinstance(arg, ast.Subscript) or not whole:
            return arg
        indices = arg.slice.elts if isinstance(arg.slice, ast.Tuple) else [arg.slice]
        return ast.Call(ast.Name("place", ast.Load()), [arg.value, *(_one_index(i) for i in indices)], [])

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if isinstance(node.value, ast.Call) and _word(node.value) == "loop_break":
            return ast.Break()
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        target = node.targets[0]
        allocates = isinstance(node.value, ast.Call) and _word(node.value) == "alloc_var"
        if isinstance(target, ast.Name) and target.id in self.variables and not allocates:
            node.value = _typed(target.id, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and node.target.id in self.variables:
            name = node.target.id
            value = ast.BinOp(ast.Name(name, ast.Load()), node.op, node.value)
            return ast.Assign([node.target], _typed(name, value))
        return node


def _typed(variable: str, value: ast.expr) -> ast.expr:
    """`type(variable)(value)`."""
    return ast.Call(_call("type", ast.Name(variable, ast.Load())), [value], [])


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _one_index(index: ast.expr) -> ast.expr:
    """`a:b` as a slice object."""
    if not isinstance(index, ast.Slice):
        return index
    none = ast.Constant(None)
    return _call("slice", index.lower or none, index.upper or none)
