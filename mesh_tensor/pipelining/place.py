"""Which mesh every stage is on, and the schedule that runs it so."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.topology import Topology

from .check import Takes, check_schedule
from .orders import make
from .schedule import Action, Schedule

_IN_ORDER = ("forward", "gpipe")  # orders that any stages on any meshes have


def place(
    topology: Topology, stages: Sequence[str | None], schedule: Schedule | str, microbatches: int
) -> tuple[list[str], Schedule]:
    """The mesh of every stage, and the schedule. Stages whose mesh isn't stated are where the schedule has them.

    Raises:
        MeshTensorError: the schedule has other stages, meshes or microbatches, or has stages elsewhere than stated.
    """
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
    """The schedule of that name for these stages."""
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
