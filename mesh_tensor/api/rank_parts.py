"""In which parts a rank runs a planned module: until what others wait for is there, and then; and what is added up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mesh_tensor.plan.ir import leaves
from mesh_tensor.program.from_graph import ModuleProgram
from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import Step
from mesh_tensor.runtime.ranks.rank_backend import in_parts
from mesh_tensor.targets.op_steps import Records
from mesh_tensor.targets.totals import can_be_totals


def added_up(made: ModuleProgram, program: Program, numbers: Collection[int]) -> dict[int, str]:
    """Those results, by these numbers, that may be added to totals, as the values that they are in the program."""
    if not numbers:
        return {}
    found, there = (can_be_totals(each, made.result) for each in (made.program, program))
    return {n: found[made.result[n]] for n in numbers if made.result[n] in found and made.result[n] in there}


def by_names(
    made: ModuleProgram, ends: Collection[int], totals: Mapping[int, str], handed_on: Collection[int]
) -> dict[str, Any]:
    """Parameters and results, by their numbers, by the program's names, as RankBackend takes them."""
    return {
        "ends": {made.inputs[number] for number in ends} - set(leaves(made.result)),
        "totals": frozenset(totals.values()),
        "handed_on": {made.result[number] for number in handed_on},
    }


def around_handing_on(
    plan: ModulePlan,
    carried: Records,
    *,
    ends: Collection[int],
    totals: Collection[int],
    handed_on: Collection[int],
) -> tuple[Sequence[Step], Sequence[Step]]:
    """What a rank runs of a plan until the results `handed_on` are there, nothing where that comes last, and what it
    runs then; all as RankModuleLaunch takes it."""
    made = plan.made
    apart = by_names(made, ends, added_up(made, made.program, totals), handed_on)
    before, first, _ = in_parts(made.program, carried=carried, **apart)
    return before, first
