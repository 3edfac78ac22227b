"""What plans of modules move, beside what people who place collectives by hand would.

python -m benchmarks.bench_plans_modules
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tilelang  # noqa: F401  (brings TVM)

import mesh_tensor as mt
from mesh_tensor.program.plan_module import PlanOptions, plan_module
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import CollectiveStep

from . import plan_layers, plan_modules
from ._timing import header, table
from .plan_modules import Case

_START = 4096  # bytes: less isn't counted against a plan


@dataclass(frozen=True)
class Row:
    """A case, and what a device receives by our plan: bytes, and by how many collectives."""

    case: Case
    bytes: int
    collectives: int

    @property
    def ratio(self) -> float:
        """Our bytes over the hand's; 1 where neither is worth a collective's start."""
        if max(self.bytes, self.case.hand.bytes) <= _START:
            return 1.0
        return max(self.bytes, 1) / max(self.case.hand.bytes, _START)


def planned(case: Case) -> Program:
    """The steps of every device."""
    mesh, built = mt.Mesh(case.mesh), case.build()
    if isinstance(built, mt.TrainingStep):
        return mt.distribute_module(built, mesh, case.shardings).program
    stated = mt.read_module_annotations(mt.annotate_module(built, mesh, case.shardings), "main", mesh)
    plan = plan_module(stated.module, "main", mesh, stated.annotations, PlanOptions(sub_axes=True), held=case.held)
    return plan.made.program


def measured(case: Case) -> Row:
    """The row of a case."""
    steps = [step for step in planned(case).steps if isinstance(step, CollectiveStep) and step.bytes]
    return Row(case, sum(step.bytes for step in steps), len(steps))


def report(rows: list[Row]) -> str:
    """The table, and its totals."""
    columns = ["module", "layout", "mesh", "bytes", "by hand", "ratio", "collectives", "by hand", "reason"]
    cells = [
        [
            row.case.module,
            row.case.layout,
            " ".join(f"{axis}:{size}" for axis, size in row.case.mesh.items()),
            f"{row.bytes:,}",
            f"{row.case.hand.bytes:,}",
            f"{row.ratio:.2f}",
            row.collectives,
            row.case.hand.collectives,
            row.case.hand.why,
        ]
        for row in rows
    ]
    mean = math.exp(sum(math.log(row.ratio) for row in rows) / len(rows))
    more = sum(row.ratio > 1.005 for row in rows)
    totals = sum(row.bytes for row in rows), sum(row.case.hand.bytes for row in rows)
    return (
        table(columns, cells) + f"\n{len(rows)} rows: {totals[0]:,} bytes, by hand {totals[1]:,}; {more} rows with "
        f"more; geometric mean of the ratios {mean:.3f}\n"
    )


if __name__ == "__main__":
    print(header("Plans of modules"))
    print(report([measured(case) for case in (*plan_modules.cases(), *plan_layers.cases())]))
