"""States that a loop carries in order, and may use on the way: running sums, linear recurrences, running maxima, the
best of all positions.

After one iteration such a state is `a * state + b`, or the larger of it and b, where neither a nor b depends on earlier
iterations. So a device can tell, from its own part alone, what it makes of any state that it takes over: `a` of all its
iterations multiplied, and what it makes of 0. What every device then starts from is a scan of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.effects import chosen
from mesh_tensor.tir.nodes import nodes

from .coordinates import Coordinates
from .factors import Factor
from .iterations import Iteration
from .live_ranges import LiveRange
from .padding import takes_whole_blocks
from .replaced_states import Best, Stated, find_best, find_stated
from .state_finder import carrying_loops, changed_in, is_in_place, is_plain
from .state_values import Atom, Level, Part, StateValue
from .statements import RESUMED, Kernel, Loop, Statement, describe, mentions, without_binds

_ONE = Part(Level.FIXED, 1.0)


@dataclass(frozen=True, eq=False)
class Carried:
    """A live range that is carried. `op`: what adds to it (`sum`, `max`, `min`), or replaces it, `best`, or `stated`
    by the author. `scaled`: statements that scale what was there before, each with the factor."""

    held: LiveRange
    op: str
    scaled: Mapping[Statement, tirx.PrimExpr]
    best: Best | None = None
    stated: Stated | None = None

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
    def names(self) -> list[str]:
        """The buffers that are carried."""
        return [str(part.held.buffer.name) for part in self.carried]


def find_scans(kernel: Kernel, coordinates: Coordinates, factor: Factor) -> tuple[Scan, ...]:
    """The scans over a factor, one after the other, none of which goes on with what another one carries; none where
    a loop carries anything else."""
    groups: dict[int, list[Loop]] = {}
    for loop in carrying_loops(kernel, coordinates, factor):
        groups.setdefault(next(s.top for s in kernel.statements if loop.var in s.vars), []).append(loop)
    found = [_scan(kernel, coordinates, factor, loops) for _, loops in sorted(groups.items())]
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


def _scan(kernel: Kernel, coordinates: Coordinates, factor: Factor, loops: Sequence[Loop]) -> Scan | None:
    """The scan of loops in one top-level statement, None if it is none: one loop that carries, all of what it carries
    is such a state, and whatever else it leaves belongs to a position."""
    loop = next((loop for loop in loops if all(loop.var in s.vars for s in kernel.statements if _in(s, loops))), None)
    if loop is None or not takes_whole_blocks(kernel, factor):
        return None
    body = [s for s in kernel.statements if loop.var in s.vars]
    if any(s.unknown or s.may_be_skipped for s in body) or kernel.loops[loop.var].node is None:
        return None
    if any(x.kind != "grid" for x in body[0].loops[: body[0].loops.index(loop)]):
        return None
    ranges = [r for r in coordinates.ranges.all if not r.is_param and loop.var in changed_in(r)]
    iteration = Iteration(kernel, coordinates, factor, loop, ordered=True)
    groups = {
        r: Carried(r, "best", {}, best) for best in find_best(iteration, ranges) for r in (best.best, *best.along)
    }
    groups |= {r: Carried(r, op, {}) for r in ranges if r not in groups and (op := _plain(iteration, r))}
    inner = [r for r in ranges if changed_in(r) & factor.roles.keys() != {loop.var}]
    if inner and not (_walks_its_blocks(body, loop, coordinates, factor) and groups.keys() >= set(inner)):
        return None
    groups |= {r: Carried(r, "stated", {}, None, one) for one in find_stated(iteration, ranges) for r in one.held}
    found = [groups[r] if r in groups else _carried(iteration, r) for r in ranges]
    known = [part for part in found if part is not None]
    if len(known) < len(found) or any(True for _ in _left_behind(kernel, coordinates, factor, loop, ranges)):
        return None
    return Scan(loop, body[0].top, tuple(known), frozenset(body))


def _in(statement: Statement, loops: Sequence[Loop]) -> bool:
    return any(loop in statement.loops for loop in loops)


def _walks_its_blocks(body: Sequence[Statement], loop: Loop, coordinates: Coordinates, factor: Factor) -> bool:
    """Whether all that an iteration does along the factor is in the iteration's own block of it."""
    forms = (coordinates.of_statement(statement).get(factor) for statement in body)
    return all(loop.var in form.terms for form in forms if form is not None)


def _plain(iteration: Iteration, live_range: LiveRange) -> str | None:
    """The operation with which a loop combines more into a live range, where it does nothing else with it, and what it
    combines depends on no earlier iteration."""
    inside = [s for s, _ in live_range.writes if iteration.loop.var in s.vars]
    op = inside[0].op if is_plain(live_range, iteration.loop.var) else None
    free = all(iteration.uses.get(s, {}).keys() <= {live_range} for s in inside)
    return op if op in ("sum", "max", "min") and free and all(map(iteration.runs_alike, inside)) else None


def _left_behind(
    kernel: Kernel, coordinates: Coordinates, factor: Factor, loop: Loop, carried: Sequence[LiveRange]
) -> Iterator[str]:
    """What the loop leaves that is neither a state nor of a position."""
    for statement in kernel.statements:
        if loop.var not in statement.vars or statement.write is None:
            continue
        live_range = coordinates.ranges.of(statement.write)
        if live_range.is_param and not _is_of_position(statement, live_range, coordinates, factor, loop):
            yield f"{describe(statement)} is of no position"
        elif not live_range.is_param and live_range not in carried and not any(x is loop for x in live_range.scope):
            yield f"{live_range.buffer.name} is used after the loop"


def _is_of_position(
    statement: Statement, live_range: LiveRange, coordinates: Coordinates, factor: Factor, loop: Loop
) -> bool:
    """Whether an iteration writes to its own positions of a parameter, and nothing reads what another one wrote."""
    if not coordinates.walks(statement.target, factor):
        return False
    if loop.var not in live_range.carried:
        return True
    touched = {s for s, _ in (*live_range.reads, *live_range.writes) if loop.var in s.vars}
    places = [coordinates.of_statement(s).get(factor) for s in touched]
    adds_only = not any(loop.var in s.vars for s, _ in live_range.reads)
    return adds_only and all(place is not None and loop.var in place.terms for place in places)


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
