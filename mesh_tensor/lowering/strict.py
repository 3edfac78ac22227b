"""`strict=True`: refuse what would have to move data that the annotations don't ask to move."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment


def check_strict(name: str, assignment: Assignment, asked: Mapping[str, Sharding], mesh: Mesh) -> None:
    """Refuse inputs that would be gathered or exchanged, and outputs that would be gathered.

    Raises:
        MeshTensorError: lists every buffer, dim and axis that can't lie as annotated, with the reason.
    """
    problems = []
    for layouts, is_output in ((assignment.needed, False), (assignment.produced, True)):
        for param, layout in layouts.items():
            if param in asked:
                problems += _differences(param, asked[param], layout, is_output, assignment, mesh)
    if problems:
        refuse(
            list(dict.fromkeys(problems)),
            where=f"kernel {name!r}, strict=True",
            fix="annotate what the rule can split, or lower without strict=True to have the data moved",
        )


def _differences(
    param: str, asked: Sharding, used: Sharding, is_output: bool, assignment: Assignment, mesh: Mesh
) -> list[str]:
    found = []
    for axis in mesh.axis_names:
        if mesh.size(axis) == 1:
            continue
        want, have = asked.dim_of(axis), used.dim_of(axis)
        moves = (have if is_output else want) is not None and want != have
        computed_whole = is_output and have is None and want is not None and (param, want) in assignment.whole
        if not (moves and not (is_output and used.partial_op(axis))) and not computed_whole:
            continue
        dim = have if want is None else want
        reason = None if dim is None else assignment.whole.get((param, dim))
        if reason is not None:
            found.append(f"buffer {param!r} dim {dim} on axis {axis!r} needs replication: {reason}")
            continue
        factor = assignment.axes[axis]
        splits = "nothing" if factor is None else f"factor {factor.name}"
        wanted = "replicated" if want is None else f"sharded on dim {want}"
        given = "replicated" if have is None else f"sharded on dim {have}"
        found.append(
            f"buffer {param!r} is annotated {wanted} on axis {axis!r}, but lies {given}: the axis splits {splits} "
            f"({assignment.reasons[axis]})"
        )
    return found
