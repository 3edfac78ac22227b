"""What becomes of a sequence of calls, in a word."""

from __future__ import annotations

import random
from dataclasses import dataclass

from . import sequences
from .kernels import NAMES
from .sequences import FAULTS, Sequence


@dataclass(frozen=True)
class Verdict:
    """`right`, `refused` where some call was, or `wrong`, with the reason."""

    verdict: str
    reason: str = ""


def make_sequence(number: int) -> Sequence:
    """The sequence of a number."""
    draw = random.Random(number)
    count, several = draw.choice((2, 3)), draw.random() < 0.5
    first = draw.choices(NAMES if several else (*NAMES, "resume"), k=draw.randint(2, 10))
    lanes = (tuple(first), *([tuple(draw.choices(NAMES, k=draw.randint(1, 8)))] if several else []))
    places = [(draw.randrange(count), draw.randrange(len(first))) for _ in range(draw.randint(0, 4))]
    return Sequence(count, lanes, {place: draw.choice(FAULTS) for place in places})


def run(sequence: Sequence) -> Verdict:
    """Run it on ranks that are threads."""
    try:
        found = sequences.run(sequence)
    except AssertionError as error:
        return Verdict("wrong", f"{sequence}: {error}")
    said = [outcome for outcomes in found.values() for outcome in outcomes if outcome]
    wrong = [outcome.words for outcome in said if outcome.verdict == "wrong"]
    if wrong:
        return Verdict("wrong", f"{sequence}: {wrong}")
    return Verdict("refused" if any(outcome.verdict == "refused" for outcome in said) else "right")
