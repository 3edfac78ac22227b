"""The best of all positions, and what comes with it: `if x > best: best = x; where = j`.

The first position wins among equals, so the best of several parts in order is found by the same comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.tir.nodes import same_expression

from .iterations import Iteration
from .live_ranges import LiveRange
from .statements import Statement, is_load_of, same_indices

_STRICT = (tirx.GT, tirx.LT)


@dataclass(frozen=True, eq=False)
class Best:
    """`best` and what comes `along` are replaced where the condition holds. `first`: `best` is its first operand."""

    best: LiveRange
    along: tuple[LiveRange, ...]
    condition: tirx.PrimExpr
    first: bool

    def better(self, mine: tirx.PrimExpr, best: tirx.PrimExpr) -> tirx.PrimExpr:
        """Whether another value takes the place of the best one."""
        kind = type(self.condition)
        return kind(best, mine) if self.first else kind(mine, best)


def find_best(iteration: Iteration, carried: Sequence[LiveRange]) -> list[Best]:
    """The groups of carried live ranges that are replaced together, by one comparison."""
    updates = {r: [s for s, _ in r.writes if iteration.loop.var in s.vars] for r in carried}
    groups: dict[tirx.PrimExpr, dict[LiveRange, Statement]] = {}
    for live_range, statements in updates.items():
        if len(statements) == 1 and statements[0].conditions:
            groups.setdefault(statements[0].conditions[-1], {})[live_range] = statements[0]
    found = [_best(iteration, condition, group) for condition, group in groups.items()]
    return [best for best in found if best is not None]


def _best(iteration: Iteration, condition: tirx.PrimExpr, group: dict[LiveRange, Statement]) -> Best | None:
    for live_range, statement in group.items() if isinstance(condition, _STRICT) else ():
        for first, held, value in ((True, condition.a, condition.b), (False, condition.b, condition.a)):
            if not is_load_of(held, statement.target) or not _replaces(statement, value):
                continue
            if all(_is_free(iteration, s, live_range, statement) for s in group.values()):
                along = tuple(other for other in group if other is not live_range)
                return Best(live_range, along, condition, first)
    return None


def _replaces(statement: Statement, value: tirx.PrimExpr) -> bool:
    node = statement.node
    return isinstance(node, tirx.BufferStore) and statement.op is None and same_expression(node.value, value)


def _is_free(iteration: Iteration, statement: Statement, best: LiveRange, of_best: Statement) -> bool:
    """Whether all that is stored depends on no earlier iteration, at the places of the best values."""
    node = statement.node
    if not isinstance(node, tirx.BufferStore) or statement.op is not None or iteration.leaves_some(statement):
        return False
    around = [node.value, *statement.conditions[:-1], *statement.bounds]
    once = not any(best in iteration.loads_in(expr) for expr in around)
    return (
        same_indices(statement.target, of_best.target) and once and iteration.uses.get(statement, {}).keys() <= {best}
    )
