"""When collectives run: one that nothing waits for yet is started, and waited for where its result is first used.

A collective may start as soon as what it sends is there. It is not started earlier than a few operators that compute
before it is needed, because until then its result takes memory (think of gathered weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mesh_tensor.base.collectives import COLLECTIVES
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.rules.operator.cost import class_of

from .steps import CollectiveStep, KernelStep, OpStep, Step, WaitStep

# Products (or kernels) that may run between a collective's start and the use of its result.
_AHEAD = CPU.tuning.products_ahead


def schedule(steps: Sequence[Step]) -> list[Step]:
    """The steps with collectives started early where something can run beside them. The order in which collectives
    start is the same on every device."""
    ready = {name: index + 1 for index, step in enumerate(steps) for name in step.writes}
    before: dict[int, list[CollectiveStep]] = {}
    waits: dict[int, list[WaitStep]] = {}
    moved: set[int] = set()
    for index, step in enumerate(steps):
        collective = step.collective
        if collective is None or not COLLECTIVES[collective.kind].sends:
            continue
        dst = collective.dst
        first_use = next((i for i in range(index + 1, len(steps)) if dst in steps[i].uses), len(steps))
        start = _earliest(steps, ready.get(collective.src, 0), index)
        if _computes(steps[start:first_use]):
            started = replace(collective, wait=False)
            moved.add(index)
            ready[dst] = first_use
            before.setdefault(start, []).append(started)
            waits.setdefault(first_use, []).append(WaitStep(started))
    result: list[Step] = []
    for index, step in enumerate(steps):
        result += _here(before.get(index, []), waits.get(index, []))
        if index not in moved:
            result.append(step)
    return [*result, *_here(before.get(len(steps), []), waits.get(len(steps), []))]


def _here(starts: list[CollectiveStep], waits: list[WaitStep]) -> list[Step]:
    """Collectives start before others are waited for, but for those that send what is waited for."""
    awaited = {wait.collective.dst for wait in waits}
    later = [step for step in starts if step.src in awaited]
    return [*(step for step in starts if step.src not in awaited), *waits, *later]


def _earliest(steps: Sequence[Step], ready: int, index: int) -> int:
    """From where a collective may start: not before it is ready, nor before too many products."""
    start, products = index, 0
    while start > ready and products <= _AHEAD:
        products += _is_product(steps[start - 1])
        start -= products <= _AHEAD
    return start


def _computes(between: Sequence[Step]) -> bool:
    return any(_is_product(step) for step in between)


def _is_product(step: Step) -> bool:
    """Whether it takes long enough to hide a collective behind it."""
    return isinstance(step, KernelStep) or (isinstance(step, OpStep) and class_of(step.call.name) == "product")
