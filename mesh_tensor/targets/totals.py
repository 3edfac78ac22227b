"""Totals: what earlier runs of a program left of its results, to which the steps that make these add them: each while
it is in a cache, and a product of matrices as it is multiplied. Nothing else of a run sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import OpStep

from .straight_line import Line
from .torch_ops import added_function

_WIDE = ("float32", "float64")  # what is narrower is added up in float32


def total_of(storage: str) -> str:
    """The name under which a run finds what is to be added to a result in this storage, if anything is."""
    return f"total of {storage}"


def can_be_totals(program: Program, results: Sequence[str]) -> dict[str, str]:
    """Those of a program's results that an operator makes, and nothing but the caller takes, with the values that they
    are in it."""
    values, times = program.values, Counter(results)
    outputs = {str(p.output): p.name for p in program.parameters if p.output and times[p.name] == 1}
    uses = Counter(storage for step in program.steps for storage in {values[name].storage for name in step.uses})
    return {
        outputs[name]: name
        for step in program.ops
        if step.kernel is None and not step.checked
        for name in step.results
        if name in outputs and uses[values[name].storage] == 1
        if values[name].dtype in _WIDE and values[name].slab is None
    }


def totals_of(step: OpStep, storages: Sequence[str], totals: Collection[str]) -> tuple[str, ...]:
    """Per result of a step, in these storages, the name of what it is added to, as far as it is one of `totals`;
    nothing where none is."""
    named = zip(step.results, storages, strict=True)
    names = tuple([total_of(storage) if name in totals else "" for name, storage in named])
    return names if any(names) else ()


def adding(step: OpStep, line: Line, totals: Collection[str]) -> Line:
    """The line of a step that adds to those of its results that are among `totals`."""
    names = totals_of(step, line.results, totals)
    return replace(line, totals=names, added=added_function(step.call)) if names else line
