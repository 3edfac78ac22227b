"""Results that others wait for, made before all that they don't need: what a stage's backward hands on is on its way
while the gradients of the stage's own weights are computed, as zero-bubble schedules have it between two actions.

    product dW2 = X2^T dY         product dX2 = dY W2^T
    product dX2 = dY W2^T         product dX1 = dX2 W1^T
    product dW1 = X1^T dX2        (hand on dX1)
    product dX1 = dX2 W1^T        product dW2 = X2^T dY
    (hand on dX1)                 product dW1 = X1^T dX2

What comes later holds its operands until then: as much comes later as takes no more memory than before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from .builder import with_ends, with_lifetimes
from .program import Program
from .steps import OpStep, Step
from .verify import peak_bytes

_TRIES = 8  # how finely what comes later is measured


def handed_on_first(
    program: Program, wanted: Collection[str], ends: Collection[str], totals: Collection[str], kept: Mapping[str, str]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps until the values `wanted` are there, and those that come then. Inputs in the storages `ends` are freed
    after their last use; `totals`: values that may be added to what is there before; `kept`: by their first results,
    the names of what steps leave for others, or take of theirs, beside values."""
    values = program.values
    work = [step for step in program.steps if not step.begins and not step.ends]
    whole = with_ends(program.steps, values, ends), ()
    storages = {values[name].storage for name in wanted}
    made = [number for number, step in enumerate(work) if storages & _stored(program, step.writes)]
    if not made or not all(isinstance(step, OpStep) for step in work):
        return whole
    before, after = work[: made[-1] + 1], work[made[-1] + 1 :]
    free = _not_needed(program, before, storages, kept)
    most = _peaks(program, whole[0], totals)
    for left in range(_TRIES):
        later = set(free[len(free) * left // _TRIES :])
        first = [step for number, step in enumerate(before) if number not in later]
        rest = [*(before[number] for number in sorted(later)), *after]
        steps = with_ends(with_lifetimes([*first, *rest], values, program.parameters), values, ends)
        if all(now <= then for now, then in zip(_peaks(program, steps, totals), most, strict=True)):
            behind = 1 + next(number for number, step in enumerate(steps) if step is first[-1])
            while behind < len(steps) and steps[behind].ends:
                behind += 1
            return steps[:behind], steps[behind:]
    return whole


def _not_needed(program: Program, steps: Sequence[Step], wanted: Collection[str], kept: Mapping[str, str]) -> list[int]:
    """The numbers of the steps that the last one doesn't need, nor those that make what is in the storages `wanted`,
    nor any that these need."""
    found: list[int] = []
    touched = [_touched(program, step, kept) for step in steps]
    uses, writes = touched[-1][0].union(wanted), touched[-1][1]
    for number in range(len(steps) - 2, -1, -1):
        used, written = touched[number]
        if written & uses or used & writes:
            uses, writes = uses | used, writes | written
        else:
            found.append(number)
    return found[::-1]


def _touched(program: Program, step: Step, kept: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """The storages that a step uses, and those that it writes; in both what it leaves for another step, or takes."""
    between = {kept[name] for name in step.writes if name in kept}
    return _stored(program, step.uses) | between, _stored(program, step.writes) | between


def _stored(program: Program, names: Collection[str]) -> set[str]:
    return {program.values[name].storage for name in names}


def _peaks(program: Program, steps: Sequence[Step], totals: Collection[str]) -> tuple[int, int]:
    """The most bytes that are held at once, if the totals come to life on the way, and if they are there before."""
    none = {name: replace(program.values[name], shape=(0,) * len(program.values[name].shape)) for name in totals}
    ran = replace(program, steps=steps)
    return peak_bytes(ran), peak_bytes(replace(ran, values={**program.values, **none}))
