"""What of a program a simulation knows nothing of: how often something runs that only data says."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_tensor.program.loop_step import LoopStep
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import KernelStep, Step
from mesh_tensor.rules.kernel.loop_counts import unknown_extents
from mesh_tensor.rules.kernel.reader import read_kernel

_ONCE = "which data says: they count as once"


def left_out(program: Program) -> tuple[str, ...]:
    """In words, each once."""
    return tuple(dict.fromkeys(text for step in program.steps for text in _of(step)))


def _of(step: Step) -> Iterator[str]:
    if isinstance(step, LoopStep):
        if step.count is None:
            yield f"how often the steps of loop {step.where} run, {_ONCE}"
        for inner in step.inner:
            yield from _of(inner)
    elif isinstance(step, KernelStep):
        known = step.func.params[len(step.args) + len(step.scalars) :]
        if unknown := unknown_extents(read_kernel(step.func), known):
            yield f"how often loops of kernel {step.name} run ({'; '.join(unknown)}), {_ONCE}"
