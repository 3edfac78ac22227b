"""The lowering of one annotated kernel, from its annotations to a list of local kernels and collectives.

annotated   read_annotations            the mesh, and how every buffer lies on it
ruled       normalize, analyse          factors, reductions, what can't be split
propagated  Propagation.decide          what every axis splits
(cut)       cut                         at collectives in the middle of the kernel; both parts are ruled again
explicit    Layouts.read / write        every layout change becomes a collective
local       localize                    tiles, offsets, masks
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.annotations.annotate import read_annotations
from mesh_tensor.base.decisions import Decisions
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.kernel_placements import Assignment, Propagation
from mesh_tensor.rules.kernel.factors import Blocked, Factor
from mesh_tensor.rules.kernel.granularity import Refined
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.sharding_rule import Analysis, ShardingRule, analyse, rule_of
from mesh_tensor.rules.kernel.statements import buffer_params
from mesh_tensor.tir.functions import function_name

from . import verify
from .cut import Workspace, cut
from .decisions import decisions_of
from .layouts import Collective, Layouts, LocalKernel, Tensor
from .localize import localize
from .original_dims import asked_of_refined, put_together, refine_for, uneven_groups, with_original_dims
from .splits import DeviceCoordinates, Split, make_split
from .strict import check_strict
from .tile_positions import check_positions
from .tile_stores import check_stores
from .view import Reading, check_local_layouts, over_tiles, read_view, refuse_views_of_tiles

_MOST_PARTS = 16


@dataclass(frozen=True, eq=False)
class Lowered:
    """A kernel in local view. `steps` run in order over `tensors`; `parameters` are the kernel's own, in order, each
    with the tensor it comes in (None if only written) and the one it leaves in (None if only read). Of those `kept`,
    nothing looks at what comes in, but some of it may stay. `reading`: in which view the kernel was written."""

    name: str
    mesh: Mesh
    func: tirx.PrimFunc
    rule: ShardingRule
    parameters: tuple[tuple[str, str | None, str | None], ...]
    scalars: tuple[tirx.Var, ...]
    tensors: dict[str, Tensor]
    steps: tuple[LocalKernel | Collective, ...]
    asked: dict[str, Sharding]
    assignment: Assignment
    whole: dict[tuple[str, int], str]
    kept: frozenset[str]
    reading: Reading

    def decisions(self) -> Decisions:
        """What was decided, for people."""
        return decisions_of(self)


class _Unsplittable(Exception):
    """A factor that turned out not to be splittable in one part of the kernel."""

    def __init__(self, factor: Factor, reason: str):
        super().__init__(reason)
        self.factor, self.reason = factor, reason


@dataclass
class _Part:
    """One kernel of the cut-up function, with its decided assignment."""

    func: tirx.PrimFunc
    analysis: Analysis
    assignment: Assignment
    workspaces: list[Workspace] = field(default_factory=list)


def lower_kernel(func: tirx.PrimFunc, *, strict: bool = False, view: str = "auto") -> Lowered:
    """Lower an annotated kernel, written over whole tensors or over tiles (`view`: auto, global, local).

    Raises:
        MeshTensorError: no or invalid annotations, not one TileLang kernel, or, with `strict`, layouts that need a
        gather.
    """
    mesh, annotations = read_annotations(func)
    asked = {name: annotation.sharding for name, annotation in annotations.items()}
    name = function_name(func)
    refuse_views_of_tiles(func, asked, view)
    plain = normalize(func)
    shapes = {param: tuple(buffer.shape) for param, buffer in buffer_params(plain).items()}
    reading = read_view(plain, asked, view)
    if reading.over_tiles:
        asked = {name: asked.get(name) or Sharding.make(mesh, len(shape)) for name, shape in shapes.items()}
        plain = over_tiles(plain, asked)
    made, analysis = (Refined(plain, {}), None) if reading.over_tiles else refine_for(plain, asked, mesh)
    banned = dict.fromkeys(made.inner_dims(), "groups can be split, but not what is in a group")
    while True:
        try:
            lowered = _Lowering(made, name, mesh, asked, banned, shapes, reading).run(strict, analysis)
            break
        except _Unsplittable as error:
            analysis, new = None, dict.fromkeys(error.factor.dims, error.reason)
            if new.keys() <= banned.keys():
                refuse(f"kernel {name!r} can't be lowered", why=error.reason, fix="simplify the kernel")
            banned |= new
    if verify.enabled():
        verify.verify_lowered(lowered)
    return lowered


class _Lowering:
    def __init__(
        self,
        made: Refined,
        name: str,
        mesh: Mesh,
        asked: dict[str, Sharding],
        banned: dict,
        shapes: dict,
        reading: Reading,
    ):
        self.made, self.func, self.name, self.mesh, self.banned = made, made.func, name, mesh, banned
        self.asked, self.refined_asked = asked, asked_of_refined(made, asked)
        self.original_shapes, self.reading, self.local_view = shapes, reading, reading.over_tiles
        self.shapes = {**shapes, **made.shapes()}
        self.same_dim: dict[tuple[str, int], tuple[str, int]] = {}
        self.count = 0

    def run(self, strict: bool, analysis: Analysis | None) -> Lowered:
        analysis = analysis or analyse(self.func)
        decided = self._propagate(analysis, self.refined_asked)
        whole = with_original_dims(self.made, decided)
        if strict:
            check_strict(self.name, analysis, whole, self.asked, self.mesh)
        if self.local_view:
            self._check_over_tiles(analysis, whole)
        parts = self._cut_up(self.func, analysis, decided)
        shapes = {**self.shapes, **self.original_shapes}
        layouts = Layouts(self.mesh, self.asked, shapes, list(buffer_params(self.func)), self.local_view)
        for index, part in enumerate(parts):
            if self.local_view:
                self._check_layouts(part.assignment)
            suffix = f"_{index}" if len(parts) > 1 else ""
            splits, local, axes = self._localize(part, f"{self.name}{suffix}")
            assignment = with_original_dims(self.made, part.assignment)
            layouts.add_kernel(part.analysis, assignment, splits, local, axes, bool(self.made.groups))
        layouts.finish()
        scalars = tuple(p for p in self.func.params if p not in self.func.buffer_map)
        return Lowered(
            self.name,
            self.mesh,
            self.func,
            rule_of(analysis, self.made),
            layouts.parameters(),
            scalars,
            layouts.tensors,
            tuple(layouts.steps),
            self.asked,
            whole,
            whole.whole,
            frozenset(p for p in analysis.kernel.params if analysis.only_kept(p)),
            self.reading,
        )

    def _check_over_tiles(self, analysis: Analysis, assignment: Assignment) -> None:
        """What is over tiles already can't be made local by any rewrite: it is checked."""
        self._check_layouts(assignment)
        splits = {
            factor: axes
            for factor in analysis.factors
            if (axes := tuple(axis for axis in assignment.axes_of(factor) if self.mesh.size(axis) > 1))
        }
        check_positions(self.name, analysis, splits, self.asked, self.shapes)
        check_stores(self.name, analysis, splits, self.asked)

    def _check_layouts(self, assignment: Assignment) -> None:
        for layouts in (assignment.needed, assignment.produced):
            check_local_layouts(self.name, layouts, self.asked, assignment)

    def _cut_up(self, func: tirx.PrimFunc, analysis: Analysis, assignment: Assignment) -> list[_Part]:
        """Cut where a split factor's result is needed complete in the middle of the kernel."""
        cuts = {
            reduction.cut: factor
            for factor, reduction in analysis.reductions.items()
            if reduction.cut is not None and self._is_split(assignment, factor)
        }
        if not cuts:
            return [_Part(func, analysis, assignment)]
        at = min(cuts)
        self.count += 1
        if self.count > _MOST_PARTS:
            raise _Unsplittable(cuts[at], f"it would cut the kernel into more than {_MOST_PARTS} parts")
        try:
            first, second, workspaces = cut(analysis, at, f"w{self.count}")
        except Blocked as error:
            raise _Unsplittable(cuts[at], str(error)) from None
        for workspace in workspaces:
            shape = list(workspace.buffer.shape)
            for dim, factor in enumerate(workspace.factors):
                if factor is None and self.local_view:
                    factor = self._walked_by(workspace.mins[dim], analysis)
                if factor is not None:
                    self.same_dim[(workspace.buffer.name, dim)] = self._canonical(factor)
                    shape[dim] = self._global_size(factor)
            self.shapes[workspace.buffer.name] = tuple(shape)
        decided = self._decide(first, assignment)
        if any(decided[0].read(workspace.buffer.name) for workspace in workspaces):
            raise _Unsplittable(cuts[at], "not all of what is live at the cut is certainly saved")
        return [*self._cut_up(first, *decided), *self._cut_up(second, *self._decide(second, assignment))]

    def _walked_by(self, position: tirx.PrimExpr, analysis: Analysis) -> Factor | None:
        """The factor of which a grid's variable is a coordinate: such a dim of a workspace is that of a tile, too."""
        return next(
            (f for f in analysis.factors if isinstance(position, tirx.Var) and f.roles.get(position) == 1), None
        )

    def _is_split(self, assignment: Assignment, factor: Factor) -> bool:
        return any(self.mesh.size(axis) > 1 for axis in assignment.axes_of(factor))

    def _canonical(self, factor: Factor) -> tuple[str, int]:
        """One name for a factor in all parts of the kernel: a dim of an original parameter where there is one."""
        return min(self.same_dim.get(dim, dim) for dim in factor.dims)

    def _global_size(self, factor: Factor) -> tirx.PrimExpr:
        """The size of the whole dim that a factor walks, or walks a tile of."""
        param, dim = factor.dims[0]
        return self.shapes[param][dim]

    def _decide(self, func: tirx.PrimFunc, whole: Assignment) -> tuple[Analysis, Assignment]:
        """A part keeps the axes of the factors that it has; axes whose factor is gone are free again."""
        analysis = analyse(func)
        fixed: dict[str, Factor | None] = {}
        for axis, factor in whole.axes.items():
            if factor is None:
                continue
            names = {self.same_dim.get(dim, dim) for dim in factor.dims}
            same = [f for f in analysis.factors if names & {self.same_dim.get(dim, dim) for dim in f.dims}]
            if same:
                fixed[axis] = max(same, key=lambda f: len(f.dims))
        asked = {p: s for p, s in self.refined_asked.items() if p in analysis.kernel.params}
        return analysis, self._propagate(analysis, asked, fixed)

    def _propagate(self, analysis: Analysis, asked: dict[str, Sharding], fixed: dict | None = None) -> Assignment:
        return Propagation(
            analysis, self.mesh, asked, fixed=fixed, banned=self.banned, over_tiles=self.local_view
        ).decide()

    def _localize(self, part: _Part, name: str) -> tuple[tuple[Split, ...], tirx.PrimFunc, tuple[str, ...]]:
        analysis, assignment = part.analysis, part.assignment
        coordinates = DeviceCoordinates(self.mesh)
        splits = tuple(
            make_split(factor, axes, coordinates, analysis.kernel.analyzer, self._global_size(factor), self.local_view)
            for factor in analysis.factors
            if (axes := assignment.axes_of(factor))
        )
        for split in splits:
            if why := uneven_groups(self.made, analysis, split):
                raise _Unsplittable(split.factor, why)
        try:
            local, axes = localize(analysis, splits, coordinates, name)
            return splits, put_together(local, self.made), axes
        except Blocked as error:
            if not splits:
                refuse(f"kernel {self.name!r} can't be lowered", why=str(error), fix="simplify the kernel")
            raise _Unsplittable(error.factor or splits[-1].factor, str(error)) from None
