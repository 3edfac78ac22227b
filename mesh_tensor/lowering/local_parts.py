"""The local stage: every part of a kernel as the kernel that one device runs, with its splits.

What is written depends on what the axes split, not on the layouts that were asked for: it is written once for all that
come to the same (`_Choice`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import made_once
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.factors import Blocked, Factor
from mesh_tensor.rules.kernel.normalize import ANALYSES
from mesh_tensor.rules.kernel.padded_blocks import widen
from mesh_tensor.rules.kernel.sharding_rule import Analysis

from .localize import localize
from .original_dims import put_together, uneven_groups
from .parts import global_size
from .splits import DeviceCoordinates, Split, make_split
from .stages import LocalPart, LocalParts, Part, Parts, Unsplittable
from .view import check_local_layouts


def make_local(cut: Parts) -> LocalParts | Unsplittable:
    """The parts in local view. Refused where a kernel over tiles would need them in another layout, or nothing is split
    and the kernel can't be written all the same."""
    kernel, made = cut.ruled.kernel, []
    for index, part in enumerate(cut.parts):
        if kernel.reading.over_tiles:
            check_local_layouts(kernel.name, part.assignment, kernel.asked)
        local = _local_part(cut, part, f"{kernel.name}_{index}" if len(cut.parts) > 1 else kernel.name)
        if isinstance(local, Unsplittable):
            return local
        made.append(local)
    return LocalParts(cut, tuple(made))


def _local_part(cut: Parts, part: Part, name: str) -> LocalPart | Unsplittable:
    mesh, needed = cut.ruled.kernel.mesh, {} if cut.ruled.kernel.reading.over_tiles else part.assignment.needed
    made = _written(_Choice(part.analysis, mesh, tuple(part.assignment.axes.items()), tuple(needed.items()), name, cut))
    return made if isinstance(made, Unsplittable) else LocalPart(part, *made)


@dataclass(frozen=True)
class _Choice:
    """What a part in local view depends on: what axes split of which analysis, and the layouts of what it takes. The
    `cut` that it is of goes with the analysis."""

    analysis: Analysis
    mesh: Mesh
    axes: tuple[tuple[str, Factor | None], ...]
    needed: tuple[tuple[str, Sharding], ...]
    name: str
    cut: Parts = field(compare=False)


@made_once(ANALYSES)
def _written(choice: _Choice) -> tuple[tirx.PrimFunc, tuple[str, ...], tuple[Split, ...]] | Unsplittable:
    """The local kernel, the axes that it wants to know, and its splits: the same ones for all layouts for which the
    axes split the same."""
    ruled, analysis = choice.cut.ruled, choice.analysis
    coordinates = DeviceCoordinates(choice.mesh)
    splits = _splits(choice, coordinates)
    for split in splits:
        if why := uneven_groups(ruled.refined, analysis, split):
            return Unsplittable(split.factor, why)
    try:
        local, axes = localize(analysis, splits, coordinates, choice.name, dict(choice.needed))
        return widen(put_together(local, ruled.refined), analysis.kernel.func), axes, splits
    except Blocked as error:
        if not splits:
            refuse(f"kernel {ruled.kernel.name!r} can't be lowered", why=str(error), fix="simplify the kernel")
        return Unsplittable(error.factor or splits[-1].factor, str(error))


def _splits(choice: _Choice, coordinates: DeviceCoordinates) -> tuple[Split, ...]:
    analyzer, over_tiles = choice.analysis.kernel.analyzer, choice.cut.ruled.kernel.reading.over_tiles
    return tuple(
        make_split(factor, axes, coordinates, analyzer, global_size(factor, choice.cut.shapes), over_tiles)
        for factor in choice.analysis.factors
        if (axes := tuple(axis for axis, split in choice.axes if split is factor))
    )
