"""Propagation: a layout for every value of a Graph, from those that were stated.

Annotations of lower priority are heard first; of these, layouts of activations before those that say where weights are
stored (see `stored`). How they spread: see `spread`. What was stated stays, whenever it spreads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh_tensor.base.sharding import Partial, Placement, Shard, Sharding

from .atoms import Atoms
from .ir import Graph, Value
from .spread import Conflict, Spread
from .stored import stored_axes


@dataclass(eq=False)
class Layouts:
    """The layout of every value, over the value's atoms, and the conflicts that were met."""

    of: dict[Value, Sharding]
    conflicts: list[Conflict] = field(default_factory=list)


def propagate(graph: Graph, atoms: Atoms) -> Layouts:
    """A layout for every value of the graph. Deterministic."""
    spread = Spread(graph, atoms)
    for value, annotation in graph.annotations.items():
        spread.state(value, annotation)
    for starting in _turns(graph, stored_axes(graph, atoms)):
        for value, axes in starting.items():
            spread.start(value, axes)
        spread.run()
    layouts = _layouts(graph, atoms, spread)
    layouts |= {result: layouts[replaced] for result, replaced in graph.state.items()}
    return Layouts(layouts, list(dict.fromkeys(spread.conflicts())))


def _turns(graph: Graph, stored: Mapping[Value, frozenset[str]]) -> list[dict[Value, frozenset[str]]]:
    """Which axes of which annotated values start to spread together, in order."""
    turns: dict[tuple[int, bool], dict[Value, frozenset[str]]] = {}
    for value, annotation in graph.annotations.items():
        late = stored.get(value, frozenset())
        turns.setdefault((annotation.priority, False), {})[value] = frozenset(graph.mesh) - late
        if late:
            turns.setdefault((annotation.priority, True), {})[value] = late
    return [turns[turn] for turn in sorted(turns)]


def _layouts(graph: Graph, atoms: Atoms, spread: Spread) -> dict[Value, Sharding]:
    """Of every value: what splits its atoms, and what it was stated to be partial over."""
    layouts: dict[Value, Sharding] = {}
    known: dict[tuple, Sharding] = {}
    for value, places in spread.places.items():
        partial = graph.annotations[value].sharding.partial if value in graph.annotations else ()
        key = (len(atoms.shape(value)), tuple(places.items()), partial)
        if key not in known:
            split: dict[str, Placement] = {axis: Shard(place) for axis, place in places.items()}
            known[key] = Sharding.of(graph.mesh, key[0], split | {axis: Partial(op) for axis, op in partial})
        layouts[value] = known[key]
    return layouts
