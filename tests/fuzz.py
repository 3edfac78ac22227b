"""Random kernels until Ctrl-C, or for FUZZ_SECONDS: `make fuzz`.

Every round has a seed of its own, so that `python -m tests.fuzz --seed N --rounds 1` runs it again. What is wrong is shrunk,
and printed as the source of a kernel with its mesh and shardings. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.random_kernels.check import Outcome, run
from tests.random_kernels.reduction import reduced
from tests.random_kernels.spec import Case
from tests.random_kernels.strategy import cases


class Wrong(Exception):
    """A counterexample."""

    def __init__(self, case: Case, outcome: Outcome):
        super().__init__(outcome.reason)
        self.case, self.outcome = case, outcome


def fuzz_round(number: int, examples: int, target: str = "interpret") -> tuple[Counter, Wrong | None]:
    """Try so many kernels of one seed; the counts of verdicts, and the counterexample, shrunk, if there is one."""
    counts: Counter = Counter()

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(cases())
    def attempt(case: Case) -> None:
        outcome = run(case, target)
        if not counts["wrong"]:  # hypothesis runs a counterexample once more
            counts[outcome.verdict] += 1
        if outcome.verdict == "wrong":
            raise Wrong(case, outcome)

    try:
        attempt()
    except Wrong as wrong:
        return counts, wrong
    return counts, None


def _report(number: int, counts: Counter, wrong: Wrong | None, start: float) -> None:
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("right", "refused", "wrong"))
    print(f"{time.monotonic() - start:7.0f} s  seed {number}: {verdicts}", flush=True)
    if wrong is not None:
        small = reduced(wrong.case)
        print(f"{small}\n{run(small).reason}\n", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run rounds until time is up."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="the first round's seed")
    parser.add_argument("--rounds", type=int, default=0, help="0: until time is up")
    parser.add_argument("--examples", type=int, default=200, help="kernels per round")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FUZZ_SECONDS", "inf")))
    parser.add_argument("--target", default="interpret", help="interpret (poisoned) or c")
    options = parser.parse_args(argv)
    start, total, number = time.monotonic(), Counter(), options.seed
    try:
        while time.monotonic() - start < options.seconds and (not options.rounds or number < options.seed + options.rounds):
            counts, wrong = fuzz_round(number, options.examples, options.target)
            total += counts
            _report(number, counts, wrong, start)
            number += 1
    except KeyboardInterrupt:
        pass
    print(f"{total['right']} right, {total['refused']} refused, {total['wrong']} wrong")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
