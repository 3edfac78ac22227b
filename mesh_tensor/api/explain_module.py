"""explain_module: what was decided for a module, why, and what it costs, as text for people."""

from __future__ import annotations

from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.program.steps import CollectiveStep, KernelStep, OpStep, Program, WaitStep
from mesh_tensor.rules.operator.call import operator_name

from .explain import table


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
    rows: list[tuple[object, ...]] = [("step", "makes", "over", "bytes received", "flops", "because")]
    for step in program.steps:
        if isinstance(step, OpStep):
            by = "torch" if step.kernel is None else f"kernel {step.kernel.attrs['global_symbol']} for"
            rows.append((f"{by} {operator_name(step.call)}", ", ".join(step.results), "", "", f"{step.flops:,}", ""))
        elif isinstance(step, KernelStep):
            rows.append((f"kernel {step.name}", ", ".join(step.writes), "", "", f"{step.flops:,}", ""))
        elif isinstance(step, CollectiveStep):
            kind = f"{step.kind}({step.op})" if step.op else step.kind
            kind = kind if step.wait else f"start {kind}"
            layouts = f"{program.values[step.src].sharding} -> {program.values[step.dst].sharding}"
            why = f"{step.reason} ({layouts})"
            rows.append((kind, step.dst, ", ".join(step.axes), f"{step.bytes:,}", "", why))
        elif isinstance(step, WaitStep):
            rows.append((f"wait {step.collective.kind}", step.collective.dst, "", "", "", ""))
    return table(rows)


def _costs(program: Program) -> list[str]:
    flops = sum(step.flops for step in program.steps if isinstance(step, (OpStep, KernelStep)))
    received = sum(step.bytes for step in program.steps if isinstance(step, CollectiveStep))
    return [f"per device: {flops:,} flops, {received:,} bytes received"]


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
