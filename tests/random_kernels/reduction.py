"""Making a counterexample small: fewer lines, simpler expressions, fewer axes and annotations, as long as it stays
wrong."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

from .check import run
from .spec import Case


def reduced(case: Case) -> Case:
    """The smallest case found that is wrong as `case` is, and not because of the kernel itself: with everything on one
    device it is right."""
    kind = _kind(case)
    for _ in range(20):
        smaller = _pass(case, kind)
        if smaller is case:
            break
        case = smaller
    return case


def _kind(case: Case) -> str:
    """What stays the same while a counterexample gets smaller: "" if it is none."""
    outcome = run(case)
    if outcome.verdict != "wrong":
        return ""
    return outcome.reason.strip().splitlines()[-1].split(":")[0] if "Traceback" in outcome.reason else "differs"


def _is_as_wrong(case: Case, kind: str) -> bool:
    try:
        alone = replace(case, mesh={"x": 1}, shardings={case.params[-1].name: {}}, blank=False)
        return _kind(case) == kind and run(alone).verdict == "right"
    except Exception:  # the text is no kernel any more
        return False


def _pass(case: Case, kind: str) -> Case:
    for candidates in (_fewer_axes, _fewer_annotations, _fewer_statements, _simpler_expressions, _fewer_params):
        case = _greedy(case, kind, candidates)
    return case


def _greedy(case: Case, kind: str, candidates: Callable[[Case], Iterator[Case]]) -> Case:
    """Take every candidate that is still wrong; go on from there."""
    position = 0
    while True:
        options = list(candidates(case))
        while position < len(options) and not _is_as_wrong(options[position], kind):
            position += 1
        if position >= len(options):
            return case
        case = options[position]


# -- the mesh ------------------------------------------------------------------------------------------------------


def _fewer_axes(case: Case) -> Iterator[Case]:
    for axis, size in case.mesh.items():
        if len(case.mesh) > 1:
            mesh = {name: n for name, n in case.mesh.items() if name != axis}
            yield replace(case, mesh=mesh, shardings={p: _without(s, axis) for p, s in case.shardings.items()})
        if size > 2:
            yield replace(case, mesh={**case.mesh, axis: 2})


def _without(stated: dict, axis: str) -> dict:
    if "sharding" not in stated:
        return {name: dim for name, dim in stated.items() if name != axis}
    plain = {name: dim for name, dim in stated["sharding"].items() if name != axis}
    partial = {name: op for name, op in stated.get("partial", {}).items() if name != axis}
    return {"sharding": plain, "partial": partial} if partial else plain


def _fewer_annotations(case: Case) -> Iterator[Case]:
    for name, stated in case.shardings.items():
        if len(case.shardings) > 1:
            yield replace(case, shardings={p: s for p, s in case.shardings.items() if p != name})
        for axis in stated:
            fewer = {a: d for a, d in stated.items() if a != axis}
            yield replace(case, shardings={**case.shardings, name: fewer})


# -- the kernel ----------------------------------------------------------------------------------------------------


def _fewer_statements(case: Case) -> Iterator[Case]:
    """Without one statement, or with a compound one replaced by its body."""
    tree = ast.parse(case.source)
    count = sum(len(body) for body in _bodies(tree))
    for unwrap in (False, True):
        for number in range(count):
            smaller = copy.deepcopy(tree)
            if _drop(smaller, number, unwrap):
                yield replace(case, source=ast.unparse(smaller) + "\n")


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The lists of statements inside the kernel's `with`."""
    kernel = tree.body[0]
    assert isinstance(kernel, ast.FunctionDef)
    for node in ast.walk(kernel.body[0]):
        if isinstance(node, (ast.With, ast.For, ast.If, ast.While)):
            yield node.body


def _drop(tree: ast.Module, number: int, unwrap: bool) -> bool:
    for body in _bodies(tree):
        if number < len(body):
            stmt = body[number]
            inner = stmt.body if unwrap and isinstance(stmt, (ast.For, ast.If)) else []
            if unwrap and not inner:
                return False
            body[number : number + 1] = inner
            if not body:
                body.append(ast.Pass())
            return True
        number -= len(body)
    return False


def _simpler_expressions(case: Case) -> Iterator[Case]:
    """With one expression replaced by a part of it."""
    tree = ast.parse(case.source)
    for number in range(sum(1 for _ in _places(tree))):
        for choice in range(3):
            smaller = copy.deepcopy(tree)
            node, name, index = list(_places(smaller))[number]
            held = getattr(node, name)
            parts = _parts(held if index is None else held[index])
            if choice < len(parts):
                if index is None:
                    setattr(node, name, parts[choice])
                else:
                    held[index] = parts[choice]
                yield replace(case, source=ast.unparse(smaller) + "\n")


def _places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where an expression that has parts stands."""
    kernel = tree.body[0]
    assert isinstance(kernel, ast.FunctionDef)
    for node in ast.walk(kernel.body[0]):
        for name, value in ast.iter_fields(node):
            values = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for index, item in values:
                if isinstance(item, ast.AST) and _parts(item):
                    yield node, name, index


def _parts(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.BoolOp):
        return list(node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        parts = {
            "if_then_else": node.args[1:],
            "max": node.args,
            "min": node.args,
            "abs": node.args,
            "cast": node.args[:1],
        }
        return list(parts.get(node.func.attr, []))
    return []


def _fewer_params(case: Case) -> Iterator[Case]:
    """Without a parameter that nothing uses any more."""
    for param in case.params:
        tree = ast.parse(case.source)
        kernel = tree.body[0]
        assert isinstance(kernel, ast.FunctionDef)
        used = {node.id for stmt in kernel.body for node in ast.walk(stmt) if isinstance(node, ast.Name)}
        if param.name not in used and len(case.shardings) > (param.name in case.shardings):
            kernel.args.args = [arg for arg in kernel.args.args if arg.arg != param.name]
            shardings = {p: s for p, s in case.shardings.items() if p != param.name}
            rest = tuple(p for p in case.params if p.name != param.name)
            yield replace(case, source=ast.unparse(tree) + "\n", params=rest, shardings=shardings)
