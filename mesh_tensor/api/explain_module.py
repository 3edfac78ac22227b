"""explain_module: what was decided for a module, why, and what it costs, as text for people."""

from __future__ import annotations

from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.program.steps import Program

from .explain import step_rows, table


def explain_module(plan: ModulePlan) -> str:
    """The parameters' layouts, conflicts with how they were resolved, every step with its bytes and reason, and the
    cost per device."""
    program = plan.made.program
    sections = [
        [f"module function {program.name} on {program.mesh}"],
        ["parameters", *_parameters(plan)],
        _conflicts(plan),
        ["steps of each device", *_steps(program)],
        _costs(program),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _parameters(plan: ModulePlan) -> list[str]:
    rows: list[tuple[object, ...]] = [("parameter", "shape", "dtype", "layout", "tile")]
    for form in plan.explicit.params:
        shape = plan.atoms.shape(form.value)
        rows.append((form.name, _size(shape), form.dtype, form.sharding, _size(form.sharding.tile_shape(shape))))
    return table(rows)


def _conflicts(plan: ModulePlan) -> list[str]:
    if not plan.layouts.conflicts:
        return []
    one = len(plan.graph.annotations) == 1
    head = "an annotation that can't be used as stated" if one else "annotations that meet"
    return [head, *(f"  {conflict}" for conflict in plan.layouts.conflicts)]


def _steps(program: Program) -> list[str]:
    head = ("step", "makes", "over", "bytes received", "flops", "because")
    return table([head, *step_rows(program, lambda step: step.writes)])


def _costs(program: Program) -> list[str]:
    flops = sum(step.flops for step in program.steps)
    received = sum(step.bytes for step in program.steps)
    return [f"per device: {flops:,} flops, {received:,} bytes received"]


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
