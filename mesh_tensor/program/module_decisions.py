"""What was decided of a module's function before it had steps, for people."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_tensor.base.decisions import Decisions
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.atoms import made_plain, plain_sharding
from mesh_tensor.plan.explicit import ExplicitGraph, forms_in
from mesh_tensor.plan.prices import bytes_moved


def module_decisions(explicit: ExplicitGraph) -> Decisions:
    """Annotations that meet, weights that are stored in another order, and what is gathered at the boundary."""
    graph = explicit.graph
    one = len(graph.annotations) == 1
    title = "an annotation that can't be used as stated" if one else "annotations that meet"
    conflicts = [f"  {conflict}" for conflict in explicit.layouts.conflicts]
    head = (f"module function {graph.name} on {graph.mesh}",)
    orders = [f"  {v.name}: {o.parts} parts of {o.sections} along dim {o.dim}" for v, o in graph.stored.items()]
    found = ((title, conflicts), ("weights that are stored in another order", orders))
    sections = tuple((name, *lines) for name, lines in found if lines)
    boundary = list(_gathered_at_the_boundary(explicit))
    notes = (("gathered where it comes, or goes, in tiles", *boundary),) if boundary else ()
    return Decisions(head, sections, notes, tuple(form.name for form in explicit.params), _asked(explicit))


def _asked(explicit: ExplicitGraph) -> dict[str, Sharding]:
    """What was stated of parameters, over their own dims."""
    graph = explicit.graph
    stated = {value: annotation.sharding for value, annotation in graph.annotations.items()}
    for node in graph.nodes:
        if node.is_annotation and node.outputs[0] in stated:
            stated.setdefault(node.inputs[0], stated[node.outputs[0]])
    return {form.name: stated[form.value] for form in explicit.params if form.value in stated}


def _gathered_at_the_boundary(explicit: ExplicitGraph) -> Iterator[str]:
    """What is gathered of arguments and results that come and go in tiles, because what the program splits is no dim of
    theirs."""
    atoms, stored = explicit.atoms, explicit.graph.stored
    for form in dict.fromkeys((*explicit.params, *forms_in(explicit.result))):
        dims, shape = atoms.of[form.value], atoms.shape(form.value)
        if form.value not in stored and plain_sharding(form.sharding, dims) is None:
            whole = Sharding.of(form.sharding.mesh, len(shape), {})
            nameable = whole if form in explicit.params else made_plain(form.sharding, dims)
            received = bytes_moved(shape, form.dtype, form.sharding, nameable)
            why = f"{form.sharding} of {shape} is no layout of {form.value.type.shape}"
            yield f"  {form.name}: {received:,} bytes ({why})"
