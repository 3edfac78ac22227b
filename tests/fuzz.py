"""Random kernels, compositions of what the planner knows, kernels over tiles, programs, modules, loops, manual
computations, training, pipelines, corrupt files and calls on ranks until Ctrl-C, or for FUZZ_SECONDS: `make fuzz`;
where they are asked for, compositions and histories of training on ranks, and the samples that torch tests its
operators with (these need expecttest).

Every number is one of each; `python -m tests.fuzz --seed N --cases 1 --of modules` runs one again. What is wrong is
made smaller and printed as source with its mesh and shardings. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.random_compositions.strategy import make_case as make_composition_case
from tests.random_kernels.over_tiles import make_tiles_case
from tests.random_kernels.programs import make_program_case
from tests.random_kernels.strategy import make_case as make_kernel_case
from tests.random_modules.strategy import make_case as make_module_case

from . import parsed_once
from . import random_loops as loops
from . import random_manual as manual
from . import random_training as training
from .adversarial_protocol import check as ranks
from .api.pipeline import random_models as pipeline_models
from .api.pipeline import test_random_models as pipelines
from .corrupt import check as files
from .importers import random_operators as operators
from .random_kernels import check as kernels
from .random_kernels import check_tiles as tiles
from .random_kernels import reduction as kernel_reduction
from .random_modules import check as modules
from .random_modules import reduction as module_reduction
from .runtime.ranks import random_compositions as rank_compositions
from .runtime.ranks import random_histories as histories

#: So many numbers between two lines of output.
ROUND = 100
MAKERS: dict[str, Callable[[int], Any]] = {
    "kernels": make_kernel_case,
    "compositions": make_composition_case,
    "tiles": make_tiles_case,
    "programs": make_program_case,
    "modules": make_module_case,
    "loops": loops.make_loop_case,
    "manual_loops": int,
    "manual_gradients": int,
    "training": training.make_training_case,
    "histories": histories.make_history,
    "pipelines": pipeline_models.make_fuzz_case,
    "operators": operators.make_operator_case,
    "files": int,
    "ranks": ranks.make_sequence,
    "rank_compositions": int,
}
KINDS = tuple(MAKERS)
_USUAL = tuple(kind for kind in KINDS if kind not in ("histories", "operators", "rank_compositions"))
_OWN: dict[str, Callable[[Any], Any]] = {
    "ranks": ranks.run,
    "rank_compositions": rank_compositions.run,
    "training": training.run,
    "histories": histories.run,
    "loops": loops.run,
    "manual_loops": loops.run_manual,
    "manual_gradients": manual.run,
    "pipelines": pipelines.run,
    "operators": operators.run,
}


def fuzz(options: argparse.Namespace) -> Counter:
    """Run cases until time is up; the counts of verdicts."""
    start, counts, number = time.monotonic(), Counter(), options.seed
    constructs: dict[str, Counter] = {}
    end = options.seed + options.cases if options.cases else float("inf")
    try:
        while number < end and time.monotonic() - start < options.seconds:
            for kind in options.of:
                case = MAKERS[kind](number)
                outcome = run(kind, case, options.target)
                counts[outcome.verdict] += 1
                for construct in getattr(case, "seen", ()):
                    constructs.setdefault(construct, Counter())[outcome.verdict] += 1
                if outcome.verdict == "wrong":
                    print(f"number {number} of {kind}: {outcome.reason}", flush=True)
                    small = smaller(kind, case, options.target)
                    print(f"{small}\n{run(kind, small, options.target).reason}\n", flush=True)
            number += 1
            if not (number - options.seed) % ROUND:
                print(f"{time.monotonic() - start:6.0f} s, up to {number}: {told(counts)}", flush=True)
    except KeyboardInterrupt:
        print()
    for construct, found in sorted(constructs.items()):
        print(f"  {construct}: {told(found)}")
    return counts


def run(kind: str, case: Any, target: str) -> Any:
    """What becomes of a case; `target` is for kernels."""
    if kind == "files":
        return files.run(case)
    if kind == "modules":
        return modules.run(case)
    if kind in _OWN:
        return _OWN[kind](case)
    return tiles.run(case, target) if kind == "tiles" else kernels.run(case, target)


def smaller(kind: str, case: Any, target: str) -> Any:
    """The case made smaller, where that is quick enough."""
    if kind == "files" or kind in _OWN:
        return case
    if kind == "modules":
        return module_reduction.reduced(case)
    return kernel_reduction.reduced(case) if kind != "tiles" and target == "interpret" else case


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
    parser.add_argument("--target", default="interpret", choices=("interpret", "c"), help="of kernels")
    parser.add_argument(
        "--of",
        nargs="+",
        default=_USUAL,
        choices=KINDS,
        help="what to make; default: all but histories, operators, rank_compositions",
    )
    options = parser.parse_args(argv)
    parsed_once.install()
    os.environ["MESH_TENSOR_VERIFY"] = "1"
    print(f"first number: {options.seed}")
    counts = fuzz(options)
    print(told(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
