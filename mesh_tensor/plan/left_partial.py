"""Results left as their parts: the sums that a plan completes at its end, for callers who add up several of them and
complete that once.

    dW_parts = einsum(X, dY)                dW_parts = einsum(X, dY)
    dW = all_reduce(dW_parts)
    return dW                               return dW_parts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from mesh_tensor.base.collectives import BETWEEN
from mesh_tensor.base.placement import Partial, Replicate

from .explicit import Change, ExplicitGraph
from .ir import leaves, map_tree


def completed_last(explicit: ExplicitGraph) -> dict[str, Change]:
    """By the names of results: the sum over devices that ends it, and that nothing else takes."""
    completion = BETWEEN[Partial, Replicate].name
    taken = Counter(form for step in explicit.steps for form in step.inputs)
    results = {form for form in leaves(explicit.result) if not taken[form]}
    return {
        step.dst.name: step
        for step in explicit.steps
        if isinstance(step, Change) and step.dst in results and (step.move.kind, step.move.op) == (completion, "sum")
    }


def left_partial(explicit: ExplicitGraph, names: Collection[str]) -> ExplicitGraph:
    """The same without the last sums of these results, which are then the parts."""
    found = completed_last(explicit)
    last = {found[name] for name in names}
    before = {step.dst: step.src for step in last}
    layouts = {step.dst.value: step.src.sharding for step in last}
    return replace(
        explicit,
        layouts=replace(explicit.layouts, of={**explicit.layouts.of, **layouts}),
        steps=[step for step in explicit.steps if step not in last],
        result=map_tree(explicit.result, lambda form: before.get(form, form)),
    )
