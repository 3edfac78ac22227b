"""Parameters' dims that are indexed by data: tables whose rows are looked up, results that are scattered into.

Where axes split such a dim, every device does what falls into its tile, and nothing where an index falls into
another's. What is looked up is then there on one device, and neutral on the others: partial. What is scattered lies
where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.reductions import REDUCTIONS
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import loads, same_expression

from .coordinates import Coordinates
from .factor_derivation import Dim
from .factors import Factor
from .partial_values import PartialValues
from .reader import known_uses
from .reductions import Reduction
from .statements import Access, Kernel, Statement, without_binds

Uses = Sequence[tuple[Statement, Access]]


@dataclass(frozen=True, eq=False)
class Lookup:
    """A dim that is indexed by data, as a factor that no loop walks; and what is partial where it is split."""

    dim: Dim
    factor: Factor
    reduction: Reduction


def candidates(kernel: Kernel, coordinates: Coordinates) -> list[Factor]:
    """The dims that may be such, as factors without names."""
    return [
        Factor("", kernel.params[param].shape[dim], ((param, dim),), {})
        for param, dim in coordinates.detached
        if _is_indexed_by_data(kernel, kernel.params[param], dim)
    ]


def lookup(kernel: Kernel, coordinates: Coordinates, factor: Factor) -> Lookup | None:
    """What splitting a candidate means; None if nothing is known of that."""
    (place,) = factor.dims
    param, dim = place
    uses = known_uses(kernel, kernel.params[param])
    if not uses:
        return None
    if any(access is statement.write for statement, access in uses):
        return Lookup(place, factor, Reduction()) if all(_only_writes(s, a) for s, a in uses) else None
    if not all(_takes_one(statement, access, dim) for statement, access in uses):
        return None
    reduction = _reduction(kernel, coordinates, factor, uses)
    return None if reduction is None else Lookup(place, factor, reduction)


def _is_indexed_by_data(kernel: Kernel, buffer: tirx.Buffer, dim: int) -> bool:
    """Whether all that uses the parameter is understood, and indexes the dim by what is loaded."""
    uses = known_uses(kernel, buffer)
    if not uses or buffer.dtype == "bool":
        return False
    return all(
        _is_loaded(access.indices[dim], buffer, kernel) and dim not in s.element_dims(access) for s, access in uses
    )


def _is_loaded(index: tirx.PrimExpr, table: tirx.Buffer, kernel: Kernel) -> bool:
    """Whether an index reads memory; what a variable is bound to, only of other parameters that nothing writes: it was
    read before, and must be the same since, on all devices."""
    if not vars_of([index], {}) & kernel.binds.keys():
        return bool(loads(index))
    read = [load.buffer for load in loads(without_binds(index, kernel))]
    return bool(read) and all(kernel.keeps(buffer) and not buffer.same_as(table) for buffer in read)


def _only_writes(statement: Statement, access: Access) -> bool:
    """Whether the statement is a store, or an atomic update of one element, and nothing is made of what was there."""
    if access is not statement.write:
        return False
    if statement.tile_op is None:
        return isinstance(statement.node, tirx.BufferStore)
    return isinstance(statement.tile_op, tile_ops.Atomic) and not statement.tile_op.dst.long_dims


def _takes_one(statement: Statement, access: Access, dim: int) -> bool:
    """Whether what the statement stores is made of one row of the dim, and nothing else in it depends on the table."""
    if statement.write is None or statement.target.buffer.dtype == "bool":
        return False
    if isinstance(statement.tile_op, tile_ops.Copy):
        return access in statement.reads[:1]
    if not isinstance(statement.node, tirx.BufferStore) or statement.op not in (None, *REDUCTIONS):
        return False
    loops = [e for loop in statement.loops for e in (loop.min, loop.extent) if isinstance(e, tirx.PrimExpr)]
    elsewhere = [*statement.conditions, *loops, *statement.target.indices]
    if any(load.buffer.same_as(access.buffer) for expr in elsewhere for load in loads(expr)):
        return False
    mine = [load for load in loads(statement.values[0]) if load.buffer.same_as(access.buffer)]
    nested = [inner for load in loads(statement.values[0]) for index in load.indices for inner in loads(index)]
    if not mine or any(inner.buffer.same_as(access.buffer) for inner in nested):
        return False
    return all(same_expression(load.indices[dim], mine[0].indices[dim]) for load in mine)


def _reduction(kernel: Kernel, coordinates: Coordinates, factor: Factor, uses: Uses) -> Reduction | None:
    """What is partial, as of any factor that is combined over."""
    partial = PartialValues(kernel, coordinates, factor)
    problems = [partial.add(statement, statement.op or "sum", ()) for statement in _once(uses)]
    if any(problems) or partial.follow() is not None:
        return None
    gated = []
    for statement, problem in partial.starts():
        if problem:
            return None
        gated.append(statement)
    if partial.why_not_cut() is not None:
        return None
    return Reduction(partial.ops, {}, tuple(gated), partial.cut, partial.completed)


def _once(uses: Uses) -> Iterator[Statement]:
    yield from dict.fromkeys(statement for statement, _ in uses)
