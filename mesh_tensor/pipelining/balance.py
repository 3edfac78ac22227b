"""Stages that cost alike: the bindings of a function, in order, cut where the dearest stage is cheapest; which mesh
every stage is on, and the schedule that runs it so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tvm import ir, relax

from mesh_tensor.annotations.names import bindings, relax_functions
from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.topology import Topology
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.cost import operator_work

from .assign import NamedStage
from .check import Takes, check_schedule
from .flow import Flow
from .orders import make
from .schedule import Action, Schedule

_MOST = 400  # places where cuts are tried: those over which the least goes


def balanced_stages(flow: Flow, count: int, inputs: Sequence[str], machine: Machine) -> list[NamedStage]:
    """The function in `count` stages. A stage takes as long as its operators on one device of the machine, and as what
    goes over its two ends (as much comes back, where gradients do) needs over its outermost link. Refused where there
    are fewer places to cut, or sizes are open."""
    varying = flow.below(inputs)
    used = flow.above(flow.returned)  # what is written besides comes where its operands are
    names = [name for name in flow.bindings if name in varying and name in used]
    seconds = _seconds(flow, names, machine)
    places = _places(flow, names, machine)
    if len(places) < count - 1:
        refuse(
            f"{count} stages of a function that can be cut in {len(places)} places",
            where=f"stages of {flow.function!r}",
            fix=f"ask for at most {len(places) + 1} stages",
        )
    ends = _cut(seconds, places, count)
    starts = [0, *ends]
    return [NamedStage(tuple(names[a:b])) for a, b in zip(starts, [*ends, len(names)], strict=True)]


def _cut(seconds: Sequence[float], crossing: Mapping[int, float], count: int) -> list[int]:
    """Where the stages after the first start, so that the dearest takes least; of equals, that with less crossing."""
    total = [0.0]
    for each in seconds:
        total.append(total[-1] + each)
    places = [0, *crossing, len(seconds)]
    # best[place]: (the dearest stage up to there, what crosses in all, where stages start)
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(count):
        ending = places[1:-1] if stage < count - 1 else places[-1:]
        best = {
            end: min(
                (
                    max(dear, total[end] - total[start] + crossing.get(start, 0.0) + crossing.get(end, 0.0)),
                    sent + crossing.get(start, 0.0),
                    [*at, start],
                )
                for start, (dear, sent, at) in best.items()
                if start < end
            )
            for end in ending
            if any(start < end for start in best)
        }
    return best[len(seconds)][2][1:]


def _places(flow: Flow, names: Sequence[str], machine: Machine) -> dict[int, float]:
    """Where the bindings can be cut: position -> the seconds that what goes over takes; tuples can't go."""
    rate, start = (machine.links[-1].rate, machine.links[-1].start) if machine.links else (math.inf, 0.0)
    position = {name: i for i, name in enumerate(names)}
    last = {name: max((position[u] for u in flow.users[name] if u in position), default=-1) for name in names}
    found = {}
    for cut in range(1, len(names)):
        crossing = [name for name in names[:cut] if last[name] >= cut]
        infos = [flow.bindings[name].var.struct_info for name in crossing]
        if crossing and all(isinstance(info, relax.TensorStructInfo) for info in infos):
            found[cut] = sum(start + _bytes(info) / rate for info in infos)
    kept = sorted(found, key=lambda cut: (found[cut], cut))[:_MOST]
    return {cut: found[cut] for cut in sorted(kept)}


def _seconds(flow: Flow, names: Sequence[str], machine: Machine) -> list[float]:
    functions = relax_functions(flow.mod)
    known: dict[str, float] = {}

    def of(expr: relax.Expr) -> float:
        if not isinstance(expr, relax.Call):
            return 0.0
        if isinstance(expr.op, ir.GlobalVar):
            called = expr.op.name_hint
            if called not in known and called in functions:
                known[called] = sum(of(binding.value) for binding in bindings(functions[called]))
            return known.get(called, 0.0)
        return operator_work(op_call(expr), machine).seconds

    return [of(flow.bindings[name].value) for name in names]


def _bytes(info: relax.TensorStructInfo) -> int:
    return math.prod(int(extent) for extent in info.shape.values) * dtype_bits(info.dtype) // 8


_IN_ORDER = ("forward", "gpipe")  # orders that any stages on any meshes have


def place(
    topology: Topology, stages: Sequence[str | None], schedule: Schedule | str, microbatches: int
) -> tuple[list[str], Schedule]:
    """The mesh of every stage, and the schedule. Stages whose mesh isn't stated are where the schedule has them.
    Refused where the schedule has other stages, meshes or microbatches, or has stages elsewhere than stated."""
    stated = [mesh for mesh in stages if mesh is not None]
    unknown = [f"stage {i} is on {shown(mesh)}" for i, mesh in enumerate(stages) if mesh and mesh not in topology]
    if unknown:
        refuse(unknown, where="stages", fix=f"the topology has {listing(topology.names)}")
    if len(stated) == len(stages) and (idle := [name for name in topology if name not in stated]):
        refuse([f"mesh {name!r} has no stage" for name in idle], where=str(topology), fix="give every mesh a stage")
    made = schedule if isinstance(schedule, Schedule) else _named(topology, stages, schedule, microbatches)
    sizes = {"meshes": len(topology), "stages": len(stages), "microbatches": microbatches}
    have = {"meshes": made.num_meshes, "stages": made.num_stages, "microbatches": made.num_microbatches}
    wrong = [f"it has {have[what]} {what}, but there are {size}" for what, size in sizes.items() if have[what] != size]
    if not wrong:
        names = [topology.names[made.mesh_of[stage]] for stage in range(len(stages))]
        wrong = [
            f"it has stage {i} on {names[i]!r}, but that is on {mesh!r}"
            for i, mesh in enumerate(stages)
            if mesh is not None and mesh != names[i]
        ]
    if wrong:
        refuse(
            wrong,
            where=f"schedule {made.name!r}",
            why="the schedule is made for other stages",
            fix="state the stages in the order in which the schedule goes round the meshes, or take another schedule",
        )
    return names, made


def _named(topology: Topology, stages: Sequence[str | None], name: str, microbatches: int) -> Schedule:
    count, meshes = len(stages), len(topology)
    if name in _IN_ORDER and None not in stages:
        return _in_order(topology, [str(mesh) for mesh in stages], name, microbatches)
    if count % meshes:
        refuse(
            f"{count} stages on {meshes} meshes",
            where=f"schedule {name!r}",
            why="every mesh has as many stages as any other in a schedule with a name",
            fix="cut into a multiple of the number of meshes, or pass a Schedule of your own",
        )
    return make(name, meshes, microbatches, count // meshes)


def _in_order(topology: Topology, stages: Sequence[str], name: str, microbatches: int) -> Schedule:
    """All microbatches of a stage after the other, forwards first: can run wherever stages are."""
    rows = []
    for mesh in topology:
        mine = [stage for stage, where in enumerate(stages) if where == mesh]
        row = [Action("F", stage, i) for stage in mine for i in range(microbatches)]
        if name == "gpipe":
            row += [Action("B", stage, i) for stage in reversed(mine) for i in range(microbatches)]
        rows.append(tuple(row))
    return Schedule(name, tuple(rows))


def check_pipeline(schedule: Schedule, takes: Takes, trains: bool, limit: float | Sequence[float] | None) -> None:
    """Refuse a schedule that can't run these stages, or that has no backward where one is needed."""
    if trains != schedule.has_backward:
        refuse(
            f"it has {'no' if trains else 'a'} backward",
            where=f"schedule {schedule.name!r}",
            fix="take 1f1b, or another that trains" if trains else "take the schedule 'forward', or say what to train",
        )
    check_schedule(schedule, takes=takes, limit=limit)
