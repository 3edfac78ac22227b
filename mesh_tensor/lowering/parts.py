"""The cut stage: a kernel becomes several where a split factor's result is needed complete in the middle of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.kernel.factors import Blocked, Factor
from mesh_tensor.rules.kernel.sharding_rule import Analysis, analyse

from .cut import Workspace, cut
from .decide import decide_part
from .original_dims import with_original_dims
from .stages import Part, Parts, Ruled, Shape, Unsplittable

_MOST_PARTS = 16


def cut_up(ruled: Ruled, part: Part, whole: Mapping[Dim, str]) -> Parts | Unsplittable:
    """The kernel's parts, between which partial values are completed. `whole`: dims that no axis may split."""
    names = _Names(ruled)
    todo, done, cuts = [part], list[Part](), 0
    while todo:
        current = todo.pop(0)
        where = _first_cut(ruled, current)
        if where is None:
            done.append(current)
            continue
        at, factor = where
        cuts += 1
        if cuts > _MOST_PARTS:
            return Unsplittable(factor, f"it would cut the kernel into more than {_MOST_PARTS} parts")
        try:
            first, second, workspaces = cut(current.analysis, at, f"w{cuts}")
        except Blocked as error:
            return Unsplittable(factor, str(error))
        names.add(workspaces, current.analysis)
        halves = [_decided(ruled, half, current, names, whole) for half in (first, second)]
        if any(halves[0].analysis.read(workspace.buffer.name) for workspace in workspaces):
            return Unsplittable(factor, "not all of what is live at the cut is certainly saved")
        todo[:0] = halves
    return Parts(ruled, with_original_dims(ruled.refined, part.assignment), tuple(done), names.shapes)


def _first_cut(ruled: Ruled, part: Part) -> tuple[int, Factor] | None:
    """The top-level statement before which the part is cut first, and the factor for which it is."""
    cuts = {
        reduction.cut: factor
        for factor, reduction in part.analysis.reductions.items()
        if reduction.cut is not None
        and any(ruled.kernel.mesh.size(axis) > 1 for axis in part.assignment.axes_of(factor))
    }
    return min(cuts.items(), key=lambda cut: cut[0]) if cuts else None


def _decided(ruled: Ruled, func: tirx.PrimFunc, whole_part: Part, names: _Names, whole: Mapping[Dim, str]) -> Part:
    """A part keeps the axes of the factors that it has; axes whose factor is gone are free again."""
    analysis = analyse(func)
    if ruled.kernel.reading.over_tiles:
        analysis = analysis.over_tiles()
    fixed: dict[str, Factor | None] = {}
    for axis, factor in whole_part.assignment.axes.items():
        if factor is not None and (same := [f for f in analysis.factors if names.of(f) & names.of(factor)]):
            fixed[axis] = max(same, key=lambda f: len(f.dims))
    return decide_part(ruled, analysis, whole, fixed)


@dataclass
class _Names:
    """The dims of workspaces by what they are called in the whole kernel: a dim of an original parameter where there
    is one; and the global shapes of all."""

    ruled: Ruled
    shapes: dict[str, Shape] = field(init=False)
    same: dict[Dim, Dim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes = {**self.ruled.kernel.shapes, **self.ruled.refined.shapes()}

    def of(self, factor: Factor) -> set[Dim]:
        return {self.same.get(dim, dim) for dim in factor.dims}

    def add(self, workspaces: list[Workspace], analysis: Analysis) -> None:
        """Note where the dims of workspaces come from."""
        for workspace in workspaces:
            name, shape = workspace.buffer.name, list(workspace.buffer.shape)
            for dim, factor in enumerate(workspace.factors):
                if factor is None and self.ruled.kernel.reading.over_tiles:
                    factor = _walked_by(workspace.mins[dim], analysis)
                if factor is not None:
                    self.same[(name, dim)] = min(self.of(factor))
                    shape[dim] = global_size(factor, self.shapes)
            self.shapes[name] = tuple(shape)


def _walked_by(position: tirx.PrimExpr, analysis: Analysis) -> Factor | None:
    """The factor of which a grid's variable is a coordinate: such a dim of a workspace is that of a tile, too."""
    return next((f for f in analysis.factors if isinstance(position, tirx.Var) and f.roles.get(position) == 1), None)


def global_size(factor: Factor, shapes: Mapping[str, Shape]) -> tirx.PrimExpr:
    """The size of the whole dim that a factor walks, or walks a tile of."""
    param, dim = factor.dims[0]
    return shapes[param][dim]
