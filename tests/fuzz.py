"""Random kernels until Ctrl-C, or for FUZZ_SECONDS: `make fuzz`.

Every kernel has a number; `python -m tests.fuzz --seed N --cases 1` runs it again. What is wrong is made smaller and
printed as the source of a kernel with its mesh and shardings. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter

from tests.random_kernels.check import run
from tests.random_kernels.reduction import reduced
from tests.random_kernels.strategy import make_case

#: So many kernels between two lines of output.
ROUND = 100


def fuzz(options: argparse.Namespace) -> Counter:
    """Run kernels until time is up; the counts of verdicts."""
    start, counts, number = time.monotonic(), Counter(), options.seed
    end = options.seed + options.cases if options.cases else float("inf")
    try:
        while number < end and time.monotonic() - start < options.seconds:
            case = make_case(number)
            outcome = run(case, options.target)
            counts[outcome.verdict] += 1
            if outcome.verdict == "wrong":
                print(f"number {number}: {outcome.reason}", flush=True)
                small = reduced(case) if options.target == "interpret" else case
                print(f"{small}\n{run(small, options.target).reason}\n", flush=True)
            number += 1
            if not (number - options.seed) % ROUND:
                print(f"{time.monotonic() - start:6.0f} s, up to {number}: {told(counts)}", flush=True)
    except KeyboardInterrupt:
        print()
    return counts


def told(counts: Counter) -> str:
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("right", "refused", "wrong"))


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "inf"))
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9), help="the first number")
    parser.add_argument("--cases", type=int, default=0, help="so many; 0: until time is up")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="for so long; default: FUZZ_SECONDS, or for ever"
    )
    parser.add_argument("--target", default="interpret", choices=("interpret", "c"))
    options = parser.parse_args(argv)
    print(f"first number: {options.seed}")
    counts = fuzz(options)
    print(told(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
