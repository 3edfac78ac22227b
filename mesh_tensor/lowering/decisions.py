"""What was decided for a kernel, and why, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from mesh_tensor.base.decisions import Decisions, columns
from mesh_tensor.rules.kernel.factors import Factor, tile_extent

if TYPE_CHECKING:
    from .layouts import Lowered


def decisions_of(lowered: Lowered) -> Decisions:
    """In which view the kernel was read and why; factors and what splits them; what could not be split."""
    head = (f"kernel {lowered.name} on {lowered.mesh}", f"rule: {lowered.rule}", str(lowered.reading))
    whole = [f"  {buffer} dim {dim}: {reason}" for (buffer, dim), reason in lowered.whole.items()]
    notes = (("asked to be split, but needed whole", *whole),) if whole else ()
    return Decisions(head, (("factors", *_factors(lowered)),), notes, asked=lowered.asked)


def _factors(lowered: Lowered) -> list[str]:
    rows: list[tuple[object, ...]] = [("factor", "size", "combines", "split by", "tile", "because")]
    assignment = lowered.assignment
    by_name = {factor.name: factor for factor in assignment.factors}
    for name, kind in lowered.rule.factors.items():
        axes = assignment.axes_of(by_name[name])
        size = _whole_size(lowered, by_name[name])
        tile = tile_extent(size, [lowered.mesh.size(a) for a in axes])
        why = "; ".join(dict.fromkeys(assignment.reasons[a] for a in axes)) or "no axis uses it"
        rows.append((name, _plain(size), kind.split(":")[0], ", ".join(axes) or "-", _plain(tile), why))
    unused = [axis for axis, factor in assignment.axes.items() if factor is None]
    return [*columns(rows), *(f"  axis {axis} splits nothing: {assignment.reasons[axis]}" for axis in unused)]


def _whole_size(lowered: Lowered, factor: Factor) -> tirx.PrimExpr:
    """The size of the dim that a factor walks, or walks a tile of."""
    if not lowered.reading.over_tiles:
        return factor.size
    tensors = {name: given or left for name, given, left in lowered.parameters}
    param, dim = factor.dims[0]
    tensor = tensors.get(param)
    return factor.size if tensor is None else lowered.tensors[tensor].shape[dim]


def _plain(size: object) -> object:
    return int(size) if isinstance(size, tirx.IntImm) else size
