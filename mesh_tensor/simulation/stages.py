"""What the stages of a pipeline take beside their fragments, and what its meshes hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from mesh_tensor.base.collectives import BETWEEN, collective_time
from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.machine import Link, Machine
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.placement import Partial, Replicate
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.pipelining.check import Held
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.schedule import Action, Schedule
from mesh_tensor.program.verify import peak_bytes
from mesh_tensor.redistribution.transfer import TransferPlan

from .costs import working_bytes


def adding_seconds(here: Any, machine: Machine) -> tuple[float, float]:
    """Seconds in which a microbatch's gradients of a stage's weights are kept, of the first one, and added to those
    before, of others."""
    nbytes, starts = 0, 0
    for name in map(gradient_name, summed_gradients(here)):
        layout = _as_made(here, name)
        axes = {axis for axes in layout.dims for axis in axes} | {axis for axis, _ in layout.partial}
        rounds = machine.rounds(math.prod(here.mesh.size(axis) for axis in axes))
        nbytes += rounds * tile_bytes(here, [name], GRADIENT)
        starts += rounds
    seconds = nbytes / machine.memory_rate(3 * nbytes)
    started = machine.launch * (min(1, starts) if machine.processors is None else starts)  # else all start as one
    return started + starts * machine.value + 2 * seconds, started + 3 * seconds


def _as_made(here: Any, name: str) -> Sharding:
    """How a weight's gradient lies as a backward leaves it."""
    made = next(each for kind, each in here.fragments.items() if kind != "F" and name in each.gives)
    return made.layouts[name]


def reducing_seconds(here: Any, machine: Machine, mesh: Mesh | None = None) -> float:
    """Seconds in which the gradients of a stage's weights are reduced that its backwards leave as parts; on another
    mesh, if one is given, that differs in axes over which they are parts."""
    mesh = here.mesh if mesh is None else mesh
    seconds, rounds = 0.0, machine.rounds(mesh.num_devices)
    for name in map(gradient_name, summed_gradients(here)):
        if axes := tuple(axis for axis, _ in _as_made(here, name).partial):
            group = math.prod(mesh.size(axis) for axis in axes)
            received = 2 * (group - 1) / group * tile_bytes(here, [name], GRADIENT)
            seconds += rounds * collective_time(machine, BETWEEN[Partial, Replicate].name, received, mesh, axes)
    return seconds


def transfer_seconds(
    stages: Any, here: Any, machine: Machine, links: Callable[[str, str], Link]
) -> Iterator[tuple[int, float]]:
    """What a stage takes of others on other meshes, forwards: from which stage, and how long that is on its way over
    the link between two meshes."""
    forward = here.fragments["F"]
    types = dict(zip(forward.takes, (value.type for value in forward.module.plan.graph.params), strict=True))
    for name, source in here.stage.takes.items():
        if stages[source].stage.mesh == here.stage.mesh:
            continue
        tensor, itemsize = types[name], max(1, dtype_bits(types[name].dtype) // 8)
        layouts = stages[source].layouts[name], here.layouts[name]
        plan = TransferPlan.make(tensor.shape, tensor.dtype, itemsize, *layouts)
        link = links(stages[source].stage.mesh, here.stage.mesh)
        moved = max(plan.busiest()) + plan.before.bytes + plan.after.bytes
        yield source, (link.start + moved / link.rate) * machine.rounds(here.mesh.num_devices)


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
    carried = here.fragments["F"].module.carried_bytes()
    until = carried * ("I" not in here.fragments)  # which takes it, where there is one
    return Held(carried + tile_bytes(here, (later & made) - weights), until + tile_bytes(here, after_input - weights))


def summed_gradients(here: Any) -> list[str]:
    """The weights whose gradients a stage's fragments make."""
    return [name for name in weights_of(here) if gradient_name(name) in here.given]


def held_bytes_of(
    schedule: Schedule, stages: Sequence[Any], machine: Machine, meshes: int
) -> tuple[tuple[int, ...], ...]:
    """Per mesh: the most that one of its devices holds while each of its actions runs, and when all have."""
    held = {here.stage.index: held_for_backward(here) for here in stages}
    found = []
    for mesh in range(meshes):
        mine = [here for here in stages if schedule.mesh_of[here.stage.index] == mesh]
        state = sum(tile_bytes(here, weights_of(here)) for here in mine)
        sums = {  # which are the first microbatch's gradients first
            here.stage.index: tile_bytes(here, map(gradient_name, summed_gradients(here)), GRADIENT) for here in mine
        }
        beside, at_first = (
            {here.stage.index: _beside(here, held[here.stage.index], machine, first) for here in mine}
            for first in (False, True)
        )
        last_kind = {here.stage.index: "W" if "W" in here.fragments else "B" for here in mine}
        live, row, actions = 0.0, list[int](), schedule.rows[mesh]
        for action, following in zip_longest(actions, actions[1:]):
            awaited = 0  # ranks make ready for what the next action takes
            if machine.processors is None and following is not None:
                awaited = tile_bytes(stages[following.stage], _arriving(stages, following))
            first = action.kind == last_kind[action.stage] and action.stage in sums
            most = live + (at_first if first else beside)[action.stage].get(action.kind, 0)
            live += held[action.stage].change(action.kind) if schedule.has_backward else 0
            before, state = state, state + (sums.pop(action.stage) if first else 0)
            row.append(awaited + int(max(before + most, state + live)))
        found.append((*row, state + int(live)))
    return tuple(found)


def _arriving(stages: Sequence[Any], action: Action) -> Iterator[str]:
    """What an action takes of other meshes, by name; a gradient as often as stages give it."""
    here = stages[action.stage]
    if action.kind == "F":
        yield from (name for name, source in here.stage.takes.items() if _are_apart(here, stages[source]))
        return
    before = here.fragments["I"].takes if action.kind == "W" and "I" in here.fragments else ()
    fragment = here.fragments.get(action.kind)
    for name in () if fragment is None else fragment.takes:
        if name not in before and (value := here.valued.get(name)) in here.stage.gives:
            takers = [there for there in stages if value in there.stage.takes and _are_apart(here, there)]
            yield from (name for there in takers if name in there.given)


def _are_apart(here: Any, there: Any) -> bool:
    return here.stage.mesh != there.stage.mesh


def _beside(here: Any, held: Held, machine: Machine, first: bool) -> dict[str, int]:
    """What each fragment of a stage needs beside weights, sums of their gradients, and what was there before it; the
    `first` ones make what becomes these sums. Where devices have processors of their own, as ranks have, a backward
    forgets what it is the last to take."""
    weights, found = set(weights_of(here)), {}
    for kind, fragment in here.fragments.items():
        own = tile_bytes(here, [name for name in fragment.takes if name in weights])
        before = {"F": 0.0, "W": held.forward if held.weight is None else held.weight}.get(kind, held.forward)
        program = fragment.module.in_memory(machine.processors is None, added_up=not first)
        most = peak_bytes(program, working_bytes(machine))
        found[kind] = max(0, most - own - int(before))
    return found
