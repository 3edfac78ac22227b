"""Loops whose iterations have to run in order, device after device: one that carries something, is a whole top-level
statement, and leaves behind what it carries, and what belongs to its positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .coordinates import Coordinates
from .factors import Factor
from .live_ranges import LiveRange
from .padding import Padding, takes_whole_blocks
from .statements import Kernel, Loop, Statement, describe


def loop_in_order(
    kernel: Kernel, coordinates: Coordinates, factor: Factor, loops: Sequence[Loop]
) -> tuple[Loop, list[Statement]] | None:
    """The one of the loops in a top-level statement that all of the others are inside of, with its statements; None
    where it is not the whole statement, not all of it is understood, programs walk the factor, too, or the last block
    does something behind the dim's end."""
    inside = [s for s in kernel.statements if any(loop in s.loops for loop in loops)]
    loop = next((loop for loop in loops if all(loop.var in s.vars for s in inside)), None)
    if loop is None or loop.node is None:
        return None
    body = [s for s in kernel.statements if loop.var in s.vars]
    if any(s.unknown or s.may_be_skipped for s in body):
        return None
    padding = Padding(kernel, coordinates, factor, past_the_end=True)
    if not takes_whole_blocks(kernel, factor) and not all(map(padding.is_skipped, body)):
        return None
    around = body[0].loops[: body[0].loops.index(loop)]
    return None if any(x.kind != "grid" or x.var in factor.roles for x in around) else (loop, body)


def is_of_its_blocks(body: Sequence[Statement], loop: Loop, coordinates: Coordinates, factor: Factor) -> bool:
    """Whether whatever an iteration walks of the factor, in a loop inside or in a statement, is in the iteration's own
    block of it, and iterations go along the factor block by block."""
    inner = {x.var for s in body for x in s.loops[s.loops.index(loop) + 1 :]}
    found = [coordinates.of_statement(statement).get(factor) for statement in body]
    forms = [form for form in found if form is not None]
    forms += [form for form in coordinates.forms[factor] if form.terms.keys() & inner]
    return all(form.terms and form.ordered[0][0].same_as(loop.var) for form in forms)


def left_behind(
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
