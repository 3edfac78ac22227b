"""Taints: the loop variables that what a live range holds may depend on."""

from __future__ import annotations

from tvm import tirx

from .live_ranges import LiveRange, LiveRanges
from .statements import Kernel, used_vars

Taints = dict[LiveRange, set[tirx.Var]]


def find_taints(kernel: Kernel, ranges: LiveRanges) -> Taints:
    """For every live range, the loop variables that its content may depend on."""
    taints: Taints = {r: set() for r in ranges.all}
    changed = True
    while changed:
        changed = False
        for statement in kernel.statements:
            if statement.write is None:
                continue
            target = taints[ranges.of(statement.write)]
            size = len(target)
            target |= used_vars(statement, kernel)
            for access in statement.reads:
                target |= taints[ranges.of(access)]
            changed |= len(target) > size
    return taints
