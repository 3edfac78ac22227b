"""Which nodes are in a statement or an expression (a statement is walked once, however many passes ask), whether two
expressions are the same, or one is a number, and what a function is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, cast

from tvm import ir, tirx

#: `issubclass`, kept: what TVM's classes have in its place takes as long as a visit to the node.
_is_one_of = cast(Callable[[type, tuple[type, ...]], bool], cache(issubclass))
_STATEMENTS, _EXPRESSIONS = (tirx.Stmt,), (tirx.PrimExpr,)
_LEAVES = (tirx.Var, tirx.IntImm, tirx.FloatImm)
DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
_RECENT = 64  # statements whose nodes are kept: those that one kernel's passes ask for


def nodes(where: tirx.Stmt | tirx.PrimExpr | int, *kinds: type) -> list[Any]:
    """The nodes of these kinds in a statement or an expression, those inside of others first; a number has none."""
    if not _is_one_of(type(where), _STATEMENTS):
        return _in_expression(where, kinds) if _is_one_of(type(where), _EXPRESSIONS) else []
    found = [nodes for kind, nodes in _by_kind(where).items() if _is_one_of(kind, kinds)]
    if len(found) == 1:
        return [node for _, node in found[0]]
    return [node for _, node in sorted((entry for entries in found for entry in entries), key=itemgetter(0))]


def loads(where: tirx.Stmt | tirx.PrimExpr | int) -> list[tirx.BufferLoad]:
    """What a statement or an expression reads, element by element."""
    return nodes(where, tirx.BufferLoad)


def used(where: tirx.Stmt | tirx.PrimExpr) -> set[tirx.Var]:
    """The variables that a statement or an expression names, and the memory that it reads or writes."""
    accesses = nodes(where, tirx.BufferLoad, tirx.BufferStore)
    return {*nodes(where, tirx.Var), *(access.buffer.data for access in accesses)}


def conjuncts(condition: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    """The conditions that hold where this one does, as it is written, in order."""
    return conjuncts(condition.a) + conjuncts(condition.b) if isinstance(condition, tirx.And) else [condition]


def _in_expression(expr: tirx.PrimExpr, kinds: tuple[type, ...]) -> list[Any]:
    if _is_one_of(type(expr), _LEAVES):
        return [expr] if _is_one_of(type(expr), kinds) else []
    return [node for node in _all_nodes(expr) if _is_one_of(type(node), kinds)]


def _all_nodes(where: tirx.Stmt | tirx.PrimExpr) -> list[Any]:
    found: list[Any] = []
    tirx.stmt_functor.post_order_visit(where, found.append)
    return found


@lru_cache(maxsize=_RECENT)
def _by_kind(stmt: tirx.Stmt) -> dict[type, list[tuple[int, Any]]]:
    """All nodes by what they are, each with its place among all."""
    found: dict[type, list[tuple[int, Any]]] = {}
    for entry in enumerate(_all_nodes(stmt)):
        found.setdefault(type(entry[1]), []).append(entry)
    return found


def expressions(stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
    """The expressions of a statement itself, without those of statements in it; a block has none."""
    if isinstance(stmt, tirx.BufferStore):
        return [stmt.value, *stmt.indices]
    if isinstance(stmt, (tirx.Evaluate, tirx.Bind)):
        return [stmt.value]
    if isinstance(stmt, tirx.For):
        return [stmt.min, stmt.extent, *([] if stmt.step is None else [stmt.step])]
    return [stmt.condition] if isinstance(stmt, (tirx.IfThenElse, tirx.While)) else []


def is_const(expr: object, value: int) -> bool:
    """Whether an expression is this whole number."""
    return isinstance(expr, tirx.IntImm) and int(expr) == value


def int_or(expr: object, other: Any) -> Any:
    """The value of an expression that is a whole number; `other` where it is none."""
    return int(expr) if isinstance(expr, (int, tirx.IntImm)) else other


def function_name(func: Any) -> str:
    """The name of a function as messages say it: of one without a name, that which TVM gives it."""
    return str((func.attrs or {}).get("global_symbol", "main"))


def same_expression(a: tirx.PrimExpr, b: tirx.PrimExpr) -> bool:
    """Whether two expressions have the same structure over the same variables and buffers.

    To `structural_equal` alone, loads from any two buffers of one shape and dtype are the same."""
    return bool(ir.structural_equal(a, b)) and bool(ir.structural_equal(_named(a), _named(b)))


def _named(expr: tirx.PrimExpr) -> tirx.Stmt:
    """The expression with every load as a call of the buffer's own name."""

    def name(load: tirx.BufferLoad) -> tirx.PrimExpr:
        return tirx.call_extern(load.dtype, f"buffer_{hash(load.buffer)}", *load.indices)

    return tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), None, name, ["tirx.BufferLoad"])
