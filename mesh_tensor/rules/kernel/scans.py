"""States that a loop carries in order, and may use on the way: running sums, linear recurrences, running maxima, the
best of all positions.

After one iteration such a state is `a * state + b`, or the larger of it and b, where neither a nor b depends on earlier
iterations. So a device can tell, from its own part alone, what it makes of any state that it takes over: `a` of all its
iterations multiplied, and what it makes of 0. What every device then starts from is a scan of these.

Of any other state nothing is known before it is there: devices take turns, and each hands on what it ends with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.effects import chosen
from mesh_tensor.tir.nodes import nodes

from .coordinates import Coordinates
from .copied_states import copied_states
from .factors import Factor
from .in_order import is_of_its_blocks, left_behind, loop_in_order
from .iterations import Iteration
from .live_ranges import LiveRange
from .state_finder import carrying_loops, changed_in, is_in_place, is_plain
from .state_values import Atom, Level, Part, StateValue
from .statements import RESUMED, TURN, Kernel, Loop, Statement, mentions, without_binds
from .states import Best, Stated, find_best, find_stated

_ONE = Part(Level.FIXED, 1.0)


@dataclass(frozen=True, eq=False)
class Carried:
    """A live range that is carried. `op`: what adds to it (`sum`, `max`, `min`), or replaces it, `best`, or `stated`
    by the author, or whatever the loop does, `turn`. `scaled`: statements that scale what was there before, each with
    the factor. `copied`: what makes it a copy of another one."""

    held: LiveRange
    op: str
    scaled: Mapping[Statement, tirx.PrimExpr]
    best: Best | None = None
    stated: Stated | None = None
    copied: Statement | None = None

    @property
    def starts_anew(self) -> bool:
        """Whether it may be scaled with NaN, which says that nothing is left of what was there before."""
        return any(math.isnan(imm.value) for by in self.scaled.values() for imm in nodes(by, tirx.FloatImm))

    @property
    def starts_neutral(self) -> bool:
        """Whether a device may start from a neutral element; else it starts like the whole kernel, which may count as
        often as one likes."""
        return self.best is None and self.stated is None


@dataclass(frozen=True, eq=False)
class Scan:
    """What one loop, the whole top-level statement `top`, carries in order."""

    loop: Loop
    top: int
    carried: tuple[Carried, ...]
    body: frozenset[Statement]

    @property
    def is_resumed(self) -> bool:
        """Whether every device starts it from what those before left."""
        return self.loop.node is not None and RESUMED in self.loop.node.annotations

    @property
    def in_turns(self) -> bool:
        """Whether a device can only begin when the one before it has ended: nothing else is known of what it makes."""
        return any(part.op == "turn" for part in self.carried)

    @property
    def names(self) -> list[str]:
        """The buffers that are carried."""
        return [str(part.held.buffer.name) for part in self.carried]


def find_scans(kernel: Kernel, coordinates: Coordinates, factor: Factor, *, in_turns: bool = False) -> tuple[Scan, ...]:
    """The scans over a factor, one after the other, none of which goes on with what another one carries; none where
    a loop carries anything else. `in_turns`: devices may take turns for that."""
    groups: dict[int, list[Loop]] = {}
    for loop in carrying_loops(kernel, coordinates, factor):
        groups.setdefault(next(s.top for s in kernel.statements if loop.var in s.vars), []).append(loop)
    found = [_scan(kernel, coordinates, factor, loops, in_turns) for _, loops in sorted(groups.items())]
    known = tuple(scan for scan in found if scan is not None)
    held = [(scan, part.held) for scan in known for part in scan.carried]
    apart = not any(
        statement in other.body
        for scan, live_range in held
        for statement, _ in (*live_range.reads, *live_range.writes)
        for other in known
        if other is not scan
    )
    return known if apart and len(known) == len(found) else ()


def goes_in_turns(kernel: Kernel, factor: Factor) -> bool:
    """Whether devices take turns for a loop over the factor already."""
    loops = (loop for var, loop in kernel.loops.items() if var in factor.roles)
    return any(loop.node is not None and TURN in loop.node.annotations for loop in loops)


def _scan(
    kernel: Kernel, coordinates: Coordinates, factor: Factor, loops: Sequence[Loop], in_turns: bool
) -> Scan | None:
    """The scan of loops in one top-level statement, None if it is none: one loop that carries, all of what it carries
    is such a state, and whatever else it leaves belongs to a position."""
    made = loop_in_order(kernel, coordinates, factor, loops)
    if made is None:
        return None
    loop, body = made
    assert loop.node is not None
    if not is_of_its_blocks(body, loop, coordinates, factor):
        return None
    found = None if TURN in loop.node.annotations else _linear(kernel, coordinates, factor, loop)
    if found is None and in_turns:
        found = _whatever(kernel, coordinates, factor, loop, body)
    if found is None:
        return None
    if any(True for _ in left_behind(kernel, coordinates, factor, loop, [part.held for part in found])):
        return None
    return Scan(loop, body[0].top, tuple(found), frozenset(body))


def _linear(kernel: Kernel, coordinates: Coordinates, factor: Factor, loop: Loop) -> list[Carried] | None:
    """What the loop carries, if what a device makes of all of that is known from its own part of the loop."""
    ranges = [r for r in coordinates.ranges.all if not r.is_param and loop.var in changed_in(r)]
    iteration = Iteration(kernel, coordinates, factor, loop, ordered=True)
    groups = {
        r: Carried(r, "best", {}, best) for best in find_best(iteration, ranges) for r in (best.best, *best.along)
    }
    groups |= {r: Carried(r, op, {}) for r in ranges if r not in groups and (op := _plain(iteration, r))}
    groups |= {r: Carried(r, "stated", {}, None, one) for one in find_stated(iteration, ranges) for r in one.held}
    inner = [r for r in ranges if changed_in(r) & factor.roles.keys() != {loop.var}]
    if not groups.keys() >= set(inner):
        return None
    found = [groups[r] if r in groups else _carried(iteration, r) for r in ranges]
    known = [part for part in found if part is not None]
    return known if len(known) == len(found) else None


def _whatever(
    kernel: Kernel, coordinates: Coordinates, factor: Factor, loop: Loop, body: Sequence[Statement]
) -> list[Carried] | None:
    """What the loop carries or leaves, whatever it makes of that: each device needs what the one before it ends with.
    None where that is of positions of the factor."""
    written = dict.fromkeys(coordinates.ranges.of(s.write) for s in body if s.write is not None)
    ranges = [r for r in written if not r.is_param and not any(x is loop for x in r.scope)]
    places = (coordinates.of_node((r, dim)) for r in ranges for dim in range(len(r.buffer.shape)))
    if any(place is not None and place[0] is factor for place in places):
        return None
    copies = copied_states(kernel, coordinates.ranges, loop, ranges)
    return [Carried(r, "turn", {}, copied=copies.get(r)) for r in ranges] or None


def _plain(iteration: Iteration, live_range: LiveRange) -> str | None:
    """The operation with which a loop combines more into a live range, where it does nothing else with it, and what it
    combines depends on no earlier iteration."""
    inside = [s for s, _ in live_range.writes if iteration.loop.var in s.vars]
    op = inside[0].op if is_plain(live_range, iteration.loop.var) else None
    free = all(iteration.uses.get(s, {}).keys() <= {live_range} for s in inside)
    return op if op in ("sum", "max", "min") and free and all(map(iteration.runs_alike, inside)) else None


def _carried(iteration: Iteration, live_range: LiveRange) -> Carried | None:
    value = iteration.value(live_range)
    updates = [s for s, _ in live_range.writes if iteration.loop.var in s.vars]
    if value is None or not all(iteration.runs_alike(s) for s in updates):
        return None
    atom = value.atom
    if atom is not None and atom.key[0] == "max":
        keys, own = atom.key[1], ("before", live_range)
        is_plain = own in keys and all(key == own or key[0] in ("block", "fixed") for key in keys)
        return Carried(live_range, "max", {}) if is_plain and is_in_place(atom, live_range) else None
    rate = _rate(value, live_range)
    if rate is None:
        return None
    if rate == _ONE:
        return Carried(live_range, "sum", {})
    if not all(iteration.uses.get(s, {}).keys() <= {live_range} for s in updates):
        return None  # what it is scaled by isn't said where it is stored: it comes back by way of other buffers
    node = iteration.loop.node
    is_resumed = node is not None and RESUMED in node.annotations
    if not is_resumed and all(s.op == "prod" and not s.fresh for s in updates):
        # Alone, what such an update makes of 0 would be read as a product, which devices start from 1.
        return None
    scaled = {s: _with_kept_values(scale, iteration) for s in updates if (scale := _scale(s)) is not None}
    known = all(s in scaled or _adds(s) for s in updates) and all(_is_alone(s, scaled[s], iteration) for s in scaled)
    return Carried(live_range, "sum", scaled) if known else None


def _with_kept_values(scale: tirx.PrimExpr, iteration: Iteration) -> tirx.PrimExpr:
    """The scale, with what its variables are bound to if that is the same wherever they are used."""
    kept = all(map(iteration.keeps_its_value, set(tirx.analysis.undefined_vars(scale)) & iteration.kernel.binds.keys()))
    return without_binds(scale, iteration.kernel) if kept else scale


def _rate(value: StateValue, live_range: LiveRange) -> Part | None:
    """What the state is multiplied with in an iteration, None if it is no linear function of itself."""
    if value.log is not None or any(power for power, _ in value.terms):
        return None
    before: list[tuple[Atom | None, Part]] = [(a, Part(Level.FIXED, rate)) for a, rate in value.atoms.items()]
    before += [(carried, part) for (_, carried), part in value.terms.items() if carried is not None]
    if len(before) != 1:
        return None
    ((atom, part),) = before
    assert atom is not None
    return part if atom.key == ("before", live_range) and is_in_place(atom, live_range) else None


def _adds(statement: Statement) -> bool:
    return statement.op == "sum" and not statement.fresh


def _scale(statement: Statement) -> tirx.PrimExpr | None:
    """What a store multiplies its target with, None if it is no store that does."""
    node = statement.node
    if not isinstance(node, tirx.BufferStore) or statement.op not in (None, "prod"):
        return None
    return _coefficient(node.value, node)


def _coefficient(expr: tirx.PrimExpr, store: tirx.BufferStore) -> tirx.PrimExpr | None:
    """Of an expression that is linear in what is stored to; None if it is not said as sums and products. NaN where
    nothing is left of that: 0 times what may be infinite is something else."""
    if isinstance(expr, tirx.BufferLoad) and expr.buffer.same_as(store.buffer):
        return tirx.const(1.0, expr.dtype)
    if not mentions(expr, store.buffer):
        return tirx.const(math.nan if is_float(expr.dtype) else 0, expr.dtype)
    if isinstance(expr, (tirx.Add, tirx.Sub)):
        a, b = _coefficient(expr.a, store), _coefficient(expr.b, store)
        if a is None or b is None or (isinstance(expr, tirx.Sub) and mentions(expr.b, store.buffer)):
            return None
        return b if not mentions(expr.a, store.buffer) else a if not mentions(expr.b, store.buffer) else a + b
    if isinstance(expr, tirx.Mul):
        a, b = (expr.a, expr.b) if mentions(expr.a, store.buffer) else (expr.b, expr.a)
        inside = None if mentions(b, store.buffer) else _coefficient(a, store)
        return None if inside is None else inside * b
    choice = chosen(expr)
    if choice is not None and not mentions(choice[0], store.buffer):
        then, otherwise = (_coefficient(value, store) for value in choice[1:])
        return None if then is None or otherwise is None else tirx.if_then_else(choice[0], then, otherwise)
    return None


def _is_alone(statement: Statement, scale: tirx.PrimExpr, iteration: Iteration) -> bool:
    """Whether the scale can be multiplied up in loops of its own: the statement's loops inside are those of its
    target's dims, and change nothing that the scale reads."""
    inner = statement.loops[statement.loops.index(iteration.loop) + 1 :]
    indexed = {v for form in statement.target.forms if form is not None for v in form.terms}
    if any(x.var not in indexed for x in inner):
        return False
    nest = {x.var for x in inner}
    bound = [s.node.var for s in iteration.body if isinstance(s.node, tirx.Bind) and nest & s.vars]
    if any(var.same_as(used) for var in bound for used in tirx.analysis.undefined_vars(scale)):
        return False
    written = [s.write.buffer for s in iteration.body if s.write is not None and nest & s.vars]
    return not any(mentions(scale, buffer) for buffer in written)
