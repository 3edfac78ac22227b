"""What the meshes of a pipeline hold: weights, sums of their gradients, what forwards leave for backwards, and what a
fragment needs beside. Bytes are those of one device, the busiest, padding included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mesh_tensor.pipelining.check import Held
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.schedule import Schedule

GRADIENT = 4  # bytes of an element at least: sums are kept in float32


def tile_bytes(here: Any, names: Iterable[str], least: int = 0) -> int:
    """Of values of a stage's fragments, by name; an element counts as `least` bytes at least."""
    total = 0
    for name in names:
        shape, dtype = here.types[name]
        total += math.prod(here.layouts[name].tile_shape(shape)) * max(least, dtype.itemsize)
    return total


def weights_of(here: Any) -> list[str]:
    """The parameters of a stage that stay."""
    return [name for name in here.stage.params if name not in here.inputs]


def held_for_backward(here: Any) -> Held:
    """What a stage holds of one microbatch: after F, and after I."""
    later = {name for kind, fragment in here.fragments.items() if kind != "F" for name in fragment.takes}
    halfway = set(here.fragments["W"].takes) if {"I", "W"} <= here.fragments.keys() else later
    made = {*here.fragments["F"].takes, *here.fragments["F"].gives}
    given = {name for kind in "FI" if kind in here.fragments for name in here.fragments[kind].gives}
    from_input = here.fragments["I"].takes if "I" in here.fragments else ()
    after_input, weights = halfway & {*made, *given, *from_input}, set(weights_of(here))
    return Held(tile_bytes(here, (later & made) - weights), tile_bytes(here, after_input - weights))


def summed_gradients(here: Any) -> list[str]:
    """The weights whose gradients a stage's fragments make."""
    return [name for name in weights_of(here) if gradient_name(name) in here.given]


def pipeline_peaks(
    schedule: Schedule, stages: Sequence[Any], made: Mapping[tuple[int, str], Any], meshes: int
) -> tuple[int, ...]:
    """Per mesh: the most that one of its devices holds."""
    held = {here.stage.index: held_for_backward(here) for here in stages}
    found = []
    for mesh in range(meshes):
        mine = [here for here in stages if schedule.mesh_of[here.stage.index] == mesh]
        state = sum(
            tile_bytes(here, weights_of(here)) + tile_bytes(here, map(gradient_name, summed_gradients(here)), GRADIENT)
            for here in mine
        )
        beside = {here.stage.index: _beside(here, held[here.stage.index], made) for here in mine}
        live, most = 0.0, 0.0
        for action in schedule.rows[mesh]:
            most = max(most, live + beside[action.stage].get(action.kind, 0))
            live += held[action.stage].change(action.kind) if schedule.has_backward else 0
            most = max(most, live)
        found.append(state + int(most))
    return tuple(found)


def _beside(here: Any, held: Held, made: Mapping[tuple[int, str], Any]) -> dict[str, int]:
    """What each fragment of a stage needs beside weights and what was there before it."""
    weights, found = set(weights_of(here)), {}
    for kind, fragment in here.fragments.items():
        own = tile_bytes(here, [name for name in fragment.takes if name in weights])
        before = {"F": 0.0, "W": held.forward if held.weight is None else held.weight}.get(kind, held.forward)
        found[kind] = max(0, made[here.stage.index, kind].peak_bytes - own - int(before))
    return found
