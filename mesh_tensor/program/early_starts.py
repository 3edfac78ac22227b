"""When collectives run: one that nothing waits for yet is started, and waited for where its result is first used.

A collective may start as soon as what it sends is there. It is not started earlier than a few operators that compute
before it is needed, because until then its result takes memory (think of gathered weights).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mesh_tensor.base.collectives import COLLECTIVES
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.rules.operator.call import operator_name
from mesh_tensor.rules.operator.cost import class_of
from mesh_tensor.rules.operator.update import UPDATE

from .program import Value
from .steps import CollectiveStep, KernelStep, LoopStep, OpStep, Step, WaitStep

# Products, kernels or updates of parameters that may run between a collective's start and the use of its result.
_AHEAD = CPU.tuning.products_ahead


def early_starts(steps: Sequence[Step], values: Mapping[str, Value]) -> Sequence[Step]:
    """The steps with collectives started early where something can run beside them: `steps` itself if there is none.
    The order in which collectives start is the same on every device."""
    stored = {name: value.storage for name, value in values.items()}
    uses = [{stored[name] for name in step.uses} for step in steps]
    writes = [{stored[name] for name in step.writes} for step in steps]
    written: dict[str, int] = {}  # per storage: from where on what was written to it is there
    used: dict[str, int] = {}  # ... and from where on nothing before uses it
    before: dict[int, list[CollectiveStep]] = {}
    waits: dict[int, list[WaitStep]] = {}
    moved: set[int] = set()
    for index, step in enumerate(steps):
        collective, end = step.collective, index + 1
        if collective is step and collective.wait and COLLECTIVES[collective.kind].sends:
            src, dst = stored[collective.src], stored[collective.dst]
            later = range(end, len(steps))
            first_use = next((i for i in later if dst in uses[i] or src in writes[i]), len(steps))
            start = _earliest(steps, max(written.get(src, 0), used.get(dst, 0)), index)
            if any(_takes_long(between) for between in steps[start:first_use]):
                started, end = replace(collective, wait=False), first_use
                moved.add(index)
                before.setdefault(start, []).append(started)
                waits.setdefault(first_use, []).append(WaitStep(started))
        written |= dict.fromkeys(writes[index], end)
        used |= dict.fromkeys(uses[index], end)
    if not moved:
        return steps
    result: list[Step] = []
    for index in range(len(steps) + 1):
        result += _here(before.get(index, []), waits.get(index, []), stored)
        result += steps[index : index + 1] if index not in moved else []
    return result


def _here(starts: list[CollectiveStep], waits: list[WaitStep], stored: Mapping[str, str]) -> list[Step]:
    """Collectives start before others are waited for, but for those that send, or write to, what is waited for."""
    made = {stored[wait.collective.dst] for wait in waits}
    sent = {stored[wait.collective.src] for wait in waits}
    later = [step for step in starts if stored[step.src] in made or stored[step.dst] in made | sent]
    return [*(step for step in starts if step not in later), *waits, *later]


def _earliest(steps: Sequence[Step], ready: int, index: int) -> int:
    """From where a collective may start: not before it is ready, nor before too many products."""
    start, products = index, 0
    while start > ready and (products := products + _takes_long(steps[start - 1])) <= _AHEAD:
        start -= 1
    return start


def _takes_long(step: Step) -> bool:
    """Whether it takes long enough to hide a collective behind it."""
    if isinstance(step, OpStep):
        return class_of(step.call.name) == "product" or operator_name(step.call) == UPDATE
    return isinstance(step, (KernelStep, LoopStep))
