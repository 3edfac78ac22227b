"""What has to hold of the record of every stage, checked where it is handed on (see `verify`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mesh_tensor.tir.nodes import function_name

from .layouts import Lowered
from .stages import Annotated, LocalParts, Part, Parts, Ruled
from .verify import enabled, explicit_problems, local_problems, raise_on

Record = TypeVar("Record")


def verified(record: Record) -> Record:
    """The record, of which all holds that its stage promises.

    Raises:
        VerificationError: lists what does not, if every lowering is to be checked.
    """
    check = _CHECKS.get(type(record))
    if check is not None and enabled():
        raise_on(list(check(record)), f"the record {type(record).__name__}")
    return record


def _annotated(record: Annotated) -> Iterator[str]:
    """Every named buffer is a parameter; ranks and axes agree."""
    for name, sharding in record.asked.items():
        if name not in record.shapes or sharding.ndim != len(record.shapes[name]) or sharding.mesh != record.mesh:
            yield f"{name} is annotated {sharding}, which is no layout of it on {record.mesh}"


def _ruled(record: Ruled) -> Iterator[str]:
    """Every access to a parameter is explained by a factor, or its dim is marked as needing replication."""
    analysis = record.analysis
    owners: dict[tuple[str, int], str] = {}
    for factor in analysis.factors:
        for dim in factor.dims:
            if dim in owners:
                yield f"{dim[0]} dim {dim[1]} is of the factors {owners[dim]} and {factor.name}"
            owners[dim] = factor.name
    for statement in analysis.kernel.statements:
        for access in statement.accesses:
            name = access.buffer.name
            for at in range(len(access.indices)) if analysis.kernel.is_param(access.buffer) else ():
                if (name, at) in analysis.lookups:
                    continue
                if analysis.coordinates.of_access(access, at) is None and analysis.reason_whole(name, at) is None:
                    yield f"{name} dim {at} can be split, but index {access.indices[at]} walks no factor"


def _decided(part: Part) -> Iterator[str]:
    """An axis splits a factor that may be split, or nothing; every parameter has a placement."""
    analysis, assignment = part.analysis, part.assignment
    for axis, factor in assignment.axes.items():
        if factor is not None and (factor not in analysis.factors or factor.blocked is not None):
            yield f"axis {axis} splits {factor.name}: {factor.blocked or 'it is none of the factors'}"
    for param in analysis.kernel.params:
        if analysis.written(param) != (param in assignment.produced):
            yield f"parameter {param} is written, or is left in a layout, but not both"
        if param not in assignment.produced and param not in assignment.needed:
            yield f"parameter {param} has no placement"


def _cut(record: Parts) -> Iterator[str]:
    """No split factor's result is needed complete inside a part; what a part takes over was left by an earlier one."""
    mesh, left = record.ruled.kernel.mesh, set(record.ruled.kernel.shapes)
    for part in record.parts:
        name = function_name(part.analysis.kernel.func)
        yield from _decided(part)
        for factor, reduction in part.analysis.reductions.items():
            if reduction.cut is not None and any(mesh.size(axis) > 1 for axis in part.assignment.axes_of(factor)):
                yield f"kernel {name} needs what is reduced over {factor.name} in the middle"
        yield from (f"kernel {name} takes {p}, which nothing left" for p in part.assignment.needed if p not in left)
        left.update(part.assignment.produced)


def _local(record: LocalParts) -> Iterator[str]:
    """No access leaves its tile; no global extent bounds a loop over a split factor."""
    kernel = record.cut.ruled.kernel
    for local in record.parts:
        analysis, assignment = local.part.analysis, local.part.assignment
        over_tiles = kernel.reading.over_tiles
        for problem in local_problems(local.func, analysis, assignment, kernel.mesh, over_tiles=over_tiles):
            yield f"{function_name(local.func)}: {problem}"


_CHECKS: dict[type, Callable[[Any], Any]] = {
    Annotated: _annotated,
    Ruled: _ruled,
    Part: _decided,
    Parts: _cut,
    LocalParts: _local,
    Lowered: explicit_problems,
}
