"""The local stage: every part of a kernel as one device runs it on its tiles."""

from __future__ import annotations

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.kernel.factors import Blocked

from .localize import localize
from .original_dims import put_together, uneven_groups
from .parts import global_size
from .splits import DeviceCoordinates, Split, make_split
from .stages import LocalPart, LocalParts, Part, Parts, Unsplittable
from .view import check_local_layouts


def make_local(cut: Parts) -> LocalParts | Unsplittable:
    """The parts in local view.

    Raises:
        MeshTensorError: a kernel over tiles would need them in another layout; or nothing is split, and the kernel
            can't be written all the same.
    """
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
    ruled, analysis = cut.ruled, part.analysis
    coordinates = DeviceCoordinates(ruled.kernel.mesh)
    splits = _splits(cut, part, coordinates)
    for split in splits:
        if why := uneven_groups(ruled.refined, analysis, split):
            return Unsplittable(split.factor, why)
    try:
        local, axes = localize(analysis, splits, coordinates, name)
        return LocalPart(part, put_together(local, ruled.refined), axes, splits)
    except Blocked as error:
        if not splits:
            refuse(f"kernel {ruled.kernel.name!r} can't be lowered", why=str(error), fix="simplify the kernel")
        return Unsplittable(error.factor or splits[-1].factor, str(error))


def _splits(cut: Parts, part: Part, coordinates: DeviceCoordinates) -> tuple[Split, ...]:
    analyzer, over_tiles = part.analysis.kernel.analyzer, cut.ruled.kernel.reading.over_tiles
    return tuple(
        make_split(factor, axes, coordinates, analyzer, global_size(factor, cut.shapes), over_tiles)
        for factor in part.analysis.factors
        if (axes := part.assignment.axes_of(factor))
    )
