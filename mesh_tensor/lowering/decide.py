"""The propagated stage: what every axis splits of a kernel, and where its parameters then have to lie.

`strict=True` refuses what would have to move data that the annotations don't ask to move."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment, KernelDecision
from mesh_tensor.plan.tir_rule import Sizes
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.kernel.factors import Factor
from mesh_tensor.rules.kernel.sharding_rule import Analysis

from .original_dims import with_original_dims, without_windows_of_groups
from .stages import Part, Ruled
from .tile_positions import check_positions
from .tile_sums import check_stores
from .view import check_local_layouts


def decide(ruled: Ruled, whole: Mapping[Dim, str], *, strict: bool, split: Mapping[str, Dim] | None = None) -> Part:
    """The kernel as one part, none of whose dims in `whole` is split; `split` is what axes split, if that is known.
    Refused where `strict` asks for that and something would have to be moved, or where a kernel over tiles means
    something else on its tiles."""
    analysis = ruled.analysis
    part = decide_part(ruled, analysis, whole, _fixed(ruled, split), in_place=strict)
    if strict or ruled.kernel.reading.over_tiles:
        assignment = with_original_dims(ruled.refined, part.assignment)
        if strict:
            check_strict(ruled.kernel.name, assignment, ruled.kernel.asked, ruled.kernel.mesh)
        if ruled.kernel.reading.over_tiles:
            _check_over_tiles(ruled, analysis, assignment)
    return part


def split_at(ruled: Ruled, sizes: Sizes, *, strict: bool) -> dict[str, Dim]:
    """What axes split of a kernel whose symbols have these sizes: axis -> a dim that the factor walks."""
    axes = decide_part(ruled, ruled.analysis, ruled.whole, {}, in_place=strict, sizes=sizes).assignment.axes
    dims = {axis: factor.dims[0] for axis, factor in axes.items() if factor is not None}
    return {axis: (param, ruled.refined.original(param, dim)) for axis, (param, dim) in dims.items()}


def _fixed(ruled: Ruled, split: Mapping[str, Dim] | None) -> dict[str, Factor | None]:
    """The factors that walk the dims which axes split; axes that split none split nothing."""
    if split is None:
        return {}
    places = {axis: (param, ruled.refined.outer(param, dim)) for axis, (param, dim) in split.items()}
    return {axis: ruled.analysis.factor_of(*places[axis]) if axis in places else None for axis in ruled.kernel.mesh}


def decide_part(
    ruled: Ruled,
    analysis: Analysis,
    whole: Mapping[Dim, str],
    fixed: Mapping[str, Factor | None],
    *,
    in_place: bool = False,
    sizes: Sizes = MappingProxyType({}),
    lying: Mapping[str, Sharding] = MappingProxyType({}),
    blocks: Mapping[str, int] = MappingProxyType({}),
) -> Part:
    """A part of the kernel, with what every axis splits of it; `fixed` are axes of which that is known, and `blocks` of
    which whole blocks their tiles are; `lying` is how workspaces lie."""
    analysis = without_windows_of_groups(ruled.refined, analysis)
    asked = {param: layout for param, layout in {**ruled.asked, **lying}.items() if param in analysis.kernel.params}
    over_tiles = ruled.kernel.reading.over_tiles
    decision = KernelDecision(
        analysis,
        ruled.kernel.mesh,
        asked,
        fixed=fixed,
        banned=whole,
        in_place=in_place,
        over_tiles=over_tiles,
        sizes=sizes,
        prices=ruled.kernel.prices,
        blocks=blocks,
    )
    return Part(analysis, decision.decide())


def _check_over_tiles(ruled: Ruled, analysis: Analysis, assignment: Assignment) -> None:
    """What is over tiles already can't be made local by any rewrite: it is checked."""
    name, mesh, asked = ruled.kernel.name, ruled.kernel.mesh, ruled.kernel.asked
    check_local_layouts(name, assignment, asked)
    splits = {
        factor: axes
        for factor in analysis.factors
        if (axes := tuple(axis for axis in assignment.axes_of(factor) if mesh.size(axis) > 1))
    }
    check_positions(name, analysis, splits, asked, {**ruled.kernel.shapes, **ruled.refined.shapes()})
    check_stores(name, analysis, splits, asked)


def check_strict(name: str, assignment: Assignment, asked: Mapping[str, Sharding], mesh: Mesh) -> None:
    """Refuse inputs that would be gathered or exchanged, and outputs that would be gathered. The refusal lists every
    buffer, dim and axis that can't lie as annotated, with the reason."""
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
        if want is not None and used.window(want) is not None and have is None:
            continue  # all need the same few places of it
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
