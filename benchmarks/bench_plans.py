"""What every device receives where a kernel is split as one would, beside what an expert would have it receive.

python -m benchmarks.bench_plans [--devices N] [GROUP ...]

A row is needless if it moves more than 1.05 of the expert's bytes and what a collective's start costs. Ratios are of
bytes with that start added to both, so that rows where nothing has to move have one; fewer count as 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mesh_tensor as mt
from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.machine_presets import CPU

from ._timing import header, table
from .plan_cases import CASES, PlanCase, Way

_START = round(CPU.bytes_per_start)
MUST_SHARE, MUST_RATIO = 0.05, 1.05


@dataclass(frozen=True)
class PlanRow:
    """A kernel split one way: bytes that each device receives, the expert's, and why there are more."""

    case: PlanCase
    way: Way
    devices: int
    received: int
    expert: int
    why: str

    @property
    def ratio(self) -> float:
        return max(1.0, (self.received + _START) / (self.expert + _START))

    @property
    def is_needless(self) -> bool:
        return self.received > MUST_RATIO * self.expert + _START


def plan_row(case: PlanCase, way: Way, devices: int = 4) -> PlanRow:
    """The plan of a kernel that is split that way; one that is refused moves all of its tensors."""
    func = case.build()
    layouts = {b.name: {"x": way.dims[b.name]} if b.name in way.dims else {} for b in func.buffer_map.values()}
    missing = set(way.dims) - set(layouts)
    if missing:
        raise ValueError(f"{case.name}, {way.name}: no buffer is called {', '.join(sorted(missing))}")
    expert = way.expert(devices)
    annotated = mt.annotate(func, mt.Mesh({"x": devices}), layouts)
    try:
        received = sum(step.bytes for step in mt.compile(annotated, target="interpret").program.steps)
    except mt.MeshTensorError as error:
        everything = sum(math.prod(map(int, b.shape)) * itemsize(b.dtype) for b in func.buffer_map.values())
        return PlanRow(case, way, devices, everything, expert, f"refused: {_line(error)}")
    row = PlanRow(case, way, devices, received, expert, way.why)
    return PlanRow(case, way, devices, received, expert, _reason(annotated)) if row.is_needless else row


def _reason(annotated: object) -> str:
    """What `strict=True` says."""
    try:
        mt.compile(annotated, target="interpret", strict=True)
    except mt.MeshTensorError as error:
        return _line(error)
    return "nothing has to be gathered: it costs less"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).replace("|", "\\|")[:300]


def plan_rows(groups: Sequence[str] = (), devices: int = 4) -> Iterator[PlanRow]:
    """All rows, or those of some groups."""
    for case in CASES:
        if not groups or case.group in groups:
            yield from (plan_row(case, way, devices) for way in case.ways)


def summary(rows: Sequence[PlanRow]) -> list[tuple[str, int, int, str]]:
    """Per group and in all: rows, needless ones, and the geometric mean of the bytes over the expert's."""
    found = []
    for group in [*dict.fromkeys(row.case.group for row in rows), "all"]:
        own = [row for row in rows if group in (row.case.group, "all")]
        mean = math.exp(sum(math.log(row.ratio) for row in own) / len(own))
        found.append((group, len(own), sum(row.is_needless for row in own), f"{mean:.2f}"))
    return found


def main() -> int:
    """Print all rows; 1 if too many move too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", help="groups of kernels; all, if none is named")
    parser.add_argument("--devices", type=int, default=4, help="of the mesh's only axis")
    options = parser.parse_args()
    rows = list(plan_rows(options.groups, options.devices))
    print(header("What kernels move, beside an expert"))
    lines = [
        (
            r.case.group,
            r.case.name,
            r.way.name,
            f"{r.received:,}",
            f"{r.expert:,}",
            f"{r.ratio:.2f}",
            "needless" if r.is_needless else "",
            r.why,
        )
        for r in rows
    ]
    print(table(["group", "kernel", "split", "bytes received", "expert", "ratio", "", "because"], lines))
    total = summary(rows)
    print(table(["group", "rows", "needless", "geometric mean"], total))
    share = total[-1][2] / len(rows)
    print(f"needless {share:.1%} (asked <= {MUST_SHARE:.0%}), mean {total[-1][3]} (asked <= {MUST_RATIO})")
    return int(share > MUST_SHARE or float(total[-1][3]) > MUST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
