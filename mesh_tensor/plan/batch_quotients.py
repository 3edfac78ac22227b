"""Rows that are divided by how many rows their batch has: summed up, they are a mean. And numbers that values are
divided by in a module of known sizes, which may be such a size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mesh_tensor.rules.operator import OpRule

from .batch_kinds import REGROUPS, Kind, Mean, Mixed, Rows, Sum, is_rounded, mixed, result_kinds
from .ir import Node


@dataclass(frozen=True)
class Divided:
    """Rows that are divided by how many rows there are, or by as many times more. `count`: the number, where it may
    just as well be a constant; 0: it is known to be larger for more rows. `partly`: something was added to them that is
    not divided so."""

    rows: Rows
    count: int = 0
    partly: bool = False


def quotient_kinds(
    node: Node, rule: OpRule, kinds: Sequence[Kind | Divided], quotients: str | None
) -> list[Kind | Divided]:
    """The kinds of a node's results, of its operands'; `quotients` as `batch_parts` takes it. What is not linear in
    rows that a number divides makes neither a sum nor a mean of them: if it may be a constant, it is one then."""
    divided = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, Divided)}
    made = result_kinds(node, rule, [kind.rows if isinstance(kind, Divided) else kind for kind in kinds])
    if not divided:
        return [quotient(node, kind, quotients) if isinstance(kind, Sum) else kind for kind in made]
    some, count = next(iter(divided.values())).rows, math.gcd(*(kind.count for kind in divided.values()))
    is_linear = node.call.name in REGROUPS or frozenset(divided) in rule.linear or is_rounded(node)
    is_added = not is_linear and any(set(divided) < linear for linear in rule.linear)
    if is_linear or (is_added and count):
        partly = is_added or any(kind.partly for kind in divided.values())
        return [_carried(node, kind, Divided(some, count, partly), quotients) for kind in made]
    if count:
        return [*made]
    names = " and ".join(node.inputs[i].name for i in divided)
    return [*mixed(node, f"is not linear in {names}, which is divided by how many rows there are")]


def _carried(node: Node, kind: Kind, divided: Divided, quotients: str | None) -> Kind | Divided:
    """What a result is of operands that are `divided`, of what it is without that."""
    count = divided.count
    if isinstance(kind, Rows):
        return replace(divided, rows=kind)
    if isinstance(kind, Sum):
        made = quotient(node, replace(kind, by=count), quotients) if count else Mean()
        return _ambiguous(node, count) if divided.partly and isinstance(made, Mean) else made
    if isinstance(kind, Mean) and not count:
        return mixed(node, "takes a mean of what is divided by how many rows there are")[0]
    return kind


def quotient(node: Node, made: Sum, quotients: str | None) -> Kind:
    """What a sum is that is divided by a number: where its elements are a multiple of that, the number may be one that
    was read off a part, and is larger for the whole batch."""
    if not made.by or made.elements % made.by or quotients == "sum":
        return made
    if quotients == "mean":
        return Mean()
    return _ambiguous(node, made.by)


def _ambiguous(node: Node, number: int) -> Mixed:
    return Mixed(
        f"{node.where.partition('.')[2]} divides a sum by {number}, which may be a constant, or the number of elements"
        " in a part"
    )
