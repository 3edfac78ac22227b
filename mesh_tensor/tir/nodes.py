"""Which nodes are in a statement: it is walked once, however many passes ask."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tvm import tirx

_RECENT = 16  # statements whose nodes are kept: those that one kernel's passes ask for


def nodes(stmt: tirx.Stmt, *kinds: type) -> list[Any]:
    """The statement's nodes of these kinds, those inside of others first."""
    found = [nodes for kind, nodes in _by_kind(stmt).items() if issubclass(kind, kinds)]
    if len(found) == 1:
        return [node for _, node in found[0]]
    return [node for _, node in sorted((entry for entries in found for entry in entries), key=_place)]


def _place(entry: tuple[int, object]) -> int:
    return entry[0]


@lru_cache(maxsize=_RECENT)
def _by_kind(stmt: tirx.Stmt) -> dict[type, list[tuple[int, Any]]]:
    """All nodes by what they are, each with its place among all."""
    found: dict[type, list[tuple[int, Any]]] = {}
    count = 0

    def visit(node: object) -> None:
        nonlocal count
        count += 1
        found.setdefault(type(node), []).append((count, node))

    tirx.stmt_functor.post_order_visit(stmt, visit)
    return found
