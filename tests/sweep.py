"""Runs every kernel x sharding of its buffers x mesh x size on the interpreter, poisoned, and counts what comes out.

`make sweep` runs it; SWEEP_ARGS are its arguments. Where there are more shardings than `--limit`, so many are drawn,
the same ones every time. It fails on one wrong result, and on one refusal of a kernel that may not be refused.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from .sweep_points import KERNELS, MESHES, NEVER_REFUSED, Outcome, Point, count_shardings, run, sample

CHUNK = 50
SHOWN = 5


@dataclass
class Tally:
    """What came of the points of one kernel."""

    verdicts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[Point, str]] = field(default_factory=list)

    def add(self, point: Point, outcome: Outcome) -> None:
        self.verdicts[outcome.verdict] += 1
        if outcome.verdict == "refused":
            self.refusals[outcome.reason] += 1
        elif outcome.verdict == "wrong":
            self.wrong.append((point, outcome.reason))


def run_chunk(points: list[Point]) -> list[tuple[Point, Outcome]]:
    """The outcomes of some points, in one process."""
    return [(point, run(point)) for point in points]


def chunks(options: argparse.Namespace) -> Iterator[list[Point]]:
    """The points to run, in lists of one kernel, mesh and size each."""
    for kernel in options.kernel or KERNELS:
        for mesh in options.mesh or MESHES:
            for size in range(len(KERNELS[kernel].sizes)) if options.size is None else [options.size]:
                points = [Point(kernel, mesh, size, i) for i in options.index or ()]
                points = points or sample(kernel, mesh, size, options.limit)
                for start in range(0, len(points), CHUNK):
                    yield points[start : start + CHUNK]


def sweep(options: argparse.Namespace) -> dict[str, Tally]:
    """Run all points; one line per kernel is printed when its last point is done."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        last = None
        for results in pool.imap(run_chunk, chunks(options)):
            for point, outcome in results:
                if last not in (None, point.kernel):
                    print(row(last, tallies[last], options), flush=True)
                last = point.kernel
                tallies[point.kernel].add(point, outcome)
    if last is not None:
        print(row(last, tallies[last], options), flush=True)
    return tallies


def row(kernel: str, tally: Tally, options: argparse.Namespace) -> str:
    """A row of the table of counts; `of` says how many points there are in all."""
    sizes = len(KERNELS[kernel].sizes) if options.size is None else 1
    total = sum(count_shardings(kernel, mesh) for mesh in options.mesh or MESHES) * sizes
    counts = (tally.verdicts[verdict] for verdict in ("right", "refused", "wrong"))
    return f"{kernel:32}" + "".join(f"{count:9}" for count in counts) + f"{sum(tally.verdicts.values()):9} of {total}"


def report(tallies: dict[str, Tally]) -> int:
    """Print the totals, the reasons of refusals and the wrong points; the exit status."""
    totals = sum((tally.verdicts for tally in tallies.values()), Counter())
    print(f"{'all':32}" + "".join(f"{totals[verdict]:9}" for verdict in ("right", "refused", "wrong")))
    for kernel, tally in tallies.items():
        if tally.refusals:
            print(f"\n{kernel} was refused" + (", which it never may be" if kernel in NEVER_REFUSED else ""))
        for reason, count in tally.refusals.most_common():
            print(f"{count:7} x {reason}")
        if tally.wrong:
            print(f"\n{kernel} is wrong at {len(tally.wrong)} points, among them")
        for point, reason in tally.wrong[:SHOWN]:
            print(f"  {point.arguments}\n    " + reason.replace("\n", "\n    "))
    forbidden = [kernel for kernel, tally in tallies.items() if kernel in NEVER_REFUSED and tally.refusals]
    return int(bool(totals["wrong"] or forbidden))


def mesh_shape(text: str) -> tuple[int, ...]:
    """`2x3` -> (2, 3)."""
    return tuple(int(size) for size in text.split("x"))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", action="append", choices=list(KERNELS), metavar="NAME", help="may be repeated")
    parser.add_argument("--mesh", action="append", type=mesh_shape, metavar="2x2", help="may be repeated")
    parser.add_argument("--size", type=int, help="which of the kernel's sizes (from 0); all by default")
    parser.add_argument("--index", action="append", type=int, help="run the sharding with this number only")
    parser.add_argument("--limit", type=int, default=100, help="at most so many per kernel, mesh, size; 0: all")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    return parser.parse_args(argv)


def main() -> int:
    """Run the sweep that the command line asks for."""
    options, start = parse_arguments(), time.monotonic()
    os.environ["MESH_TENSOR_VERIFY"] = "1"
    print(f"{'kernel':32}" + "".join(f"{title:>9}" for title in ("right", "refused", "wrong", "run")))
    status = report(sweep(options))
    print(f"\n{time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
