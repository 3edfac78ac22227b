"""What a state that a loop carries is made of: maxima, sums that are scaled to them, and logarithms of such sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.annotations.combination import Combination, tried_combinations
from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.loops import is_backward
from mesh_tensor.tir.nodes import same_expression

from .iterations import Iteration
from .live_ranges import LiveRange
from .statements import Loop, Statement, is_load_of, same_indices


@dataclass(frozen=True, eq=False)
class RunningMax:
    """A maximum. `unbounded`: it may start at the lowest value, from which nothing can be taken. `of_block`: it is that
    of one block alone, whichever was the last. `stand_in`: what ends an iteration with a number in its place where it
    is the lowest value, from which later ones go on. What comes after the loop makes the same of the maximum of all as
    of these two."""

    held: LiveRange
    unbounded: bool
    of_block: bool = False
    stand_in: Statement | None = None

    @property
    def is_relative(self) -> bool:
        """Whether it need not be the maximum of all."""
        return self.of_block or self.stand_in is not None


@dataclass(frozen=True, eq=False)
class ScaledSum:
    """A sum of terms that are each times `2 ** (-rate * of)`. `place`: the row of `of`, in terms of the sum's dims."""

    held: LiveRange
    of: RunningMax
    rate: float
    place: tuple[Linear, ...]


@dataclass(frozen=True, eq=False)
class LogSum:
    """The logarithm of a sum: `2 ** (rate * held)` is one."""

    held: LiveRange
    rate: float


@dataclass(frozen=True, eq=False)
class State:
    """What one loop, in the top-level statement `top`, carries. `explained`: the statements that are understood as part
    of its update; `neutral`: of those that combine positions, whether what lies past the dim's end changes nothing.
    `uses`: what the loop's statements read that may depend on earlier blocks. `guarded`: loads of maxima in powers, for
    which something has to stand in while nothing is known of a row."""

    loop: Loop
    top: int
    maxima: tuple[RunningMax, ...]
    sums: tuple[ScaledSum, ...]
    logs: tuple[LogSum, ...]
    plain: tuple[LiveRange, ...]
    explained: frozenset[Statement]
    neutral: Mapping[Statement, bool]
    uses: Mapping[Statement, Mapping[LiveRange, None]]
    guarded: Mapping[Statement, tuple[tirx.BufferLoad, ...]]
    by_position: bool

    @property
    def ops(self) -> dict[LiveRange, str]:
        """What every part of the state is combined by, once it is scaled alike."""
        largest = [*(part.held for part in self.maxima), *(part.held for part in self.logs)]
        sums = [*(part.held for part in self.sums), *self.plain]
        return {**dict.fromkeys(largest, "max"), **dict.fromkeys(sums, "sum")}

    @property
    def takes_blocks(self) -> bool:
        """Whether a block of padding would have no maximum that could be taken from its elements."""
        return self.by_position or bool(self.logs) or any(running.of_block for running in self.maxima)

    @property
    def scaled(self) -> list[LiveRange]:
        """The parts that can't be combined as they are."""
        return [*(part.held for part in self.sums), *(part.held for part in self.logs)]


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


@dataclass(frozen=True, eq=False)
class Stated:
    """`held`: what the loop carries, in the order of the combination's buffers."""

    combination: Combination
    held: tuple[LiveRange, ...]


def find_stated(iteration: Iteration, carried: Sequence[LiveRange]) -> list[Stated]:
    """The groups of carried live ranges that were stated, and whose update depends on no other carried ones."""
    if is_backward(iteration.loop.node):
        return []  # it is tried in order
    found = []
    for combination in tried_combinations(iteration.kernel.root):
        groups = [[r for r in carried if r.buffer.name == name] for name in combination.names]
        if all(len(group) == 1 for group in groups):
            held = tuple(r for (r,) in groups)
            if not _used_on_the_way(iteration, held) & set(carried) - set(held):
                found.append(Stated(combination, held))
    return found


def _used_on_the_way(iteration: Iteration, held: Sequence[LiveRange]) -> set[LiveRange]:
    """All that an iteration reads for the sake of a state."""
    of = iteration.coordinates.ranges.of
    known, todo = set(held), list(held)
    while todo:
        live_range = todo.pop()
        for statement in iteration.body:
            if statement.write is None or of(statement.write) is not live_range:
                continue
            sources = {of(access) for access in statement.reads} - known
            known |= sources
            todo += sources
    return known
