"""Parameters' dims that are indexed by data: tables whose rows are looked up, results that are scattered into.

Where axes split such a dim, every device does what falls into its tile, and nothing where an index falls into
another's. What is looked up is then there on one device, and neutral on the others: partial. What is scattered lies
where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from .coordinates import Coordinates
from .data_indices import is_loaded, only_writes, takes_one
from .factor_derivation import Dim
from .factors import Factor
from .partial_values import PartialValues
from .reader import known_uses
from .reductions import Reduction
from .statements import Access, Kernel, Statement

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
        return Lookup(place, factor, Reduction()) if all(only_writes(s, a) for s, a in uses) else None
    if not all(takes_one(statement, access, dim) for statement, access in uses):
        return None
    reduction = _reduction(kernel, coordinates, factor, uses)
    return None if reduction is None else Lookup(place, factor, reduction)


def _is_indexed_by_data(kernel: Kernel, buffer: tirx.Buffer, dim: int) -> bool:
    """Whether all that uses the parameter is understood, and indexes the dim by what is loaded."""
    uses = known_uses(kernel, buffer)
    if not uses or buffer.dtype == "bool":
        return False
    return all(is_loaded(kernel, statement, access, dim) for statement, access in uses)


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
