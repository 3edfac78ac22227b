"""The cut stage: a kernel becomes several where a split factor's result is needed complete in the middle of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tvm import tirx

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.kernel.factors import Blocked, Factor
from mesh_tensor.rules.kernel.scans import Scan
from mesh_tensor.rules.kernel.sharding_rule import Analysis, analyse
from mesh_tensor.rules.kernel.statements import TOGETHER_ATTR, Loop

from .combine import combine, live_states
from .cut import Workspace, cut
from .decide import decide_part
from .original_dims import with_original_dims
from .scan import resume
from .stages import HandedOn, Part, Parts, Ruled, Shape, Unsplittable
from .turns import take_turns

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
        scan = _scan(current.analysis, factor)
        if scan is not None and scan.top == at and current.analysis.reductions[factor].cut != at:
            try:
                todo[:0] = _resumed(ruled, current, factor, scan, names, whole, f"w{cuts}")
            except Blocked as error:
                return Unsplittable(factor, str(error))
            continue
        scaled = [f for f in _split_factors(ruled, current) if live_states(current.analysis.reductions[f].states, at)]
        try:
            if scaled:
                todo[:0] = _combined(ruled, current, scaled, at, names, whole, f"w{cuts}")
                continue
            first, second, workspaces = cut(current.analysis, at, f"w{cuts}")
            names.add(workspaces)
            halves = [_decided(ruled, half, current, names, whole) for half in (first, second)]
        except Blocked as error:
            return Unsplittable((scaled or [factor])[0], str(error))
        if any(halves[0].analysis.read(workspace.buffer.name) for workspace in workspaces):
            return Unsplittable(factor, "not all of what is live at the cut is certainly saved")
        todo[:0] = halves
    return Parts(ruled, with_original_dims(ruled.refined, part.assignment), tuple(done), names.shapes)


def _first_cut(ruled: Ruled, part: Part) -> tuple[int, Factor] | None:
    """The top-level statement before which the part is cut first, and the factor for which it is."""
    cuts: dict[int, Factor] = {}
    for factor in _split_factors(ruled, part):
        if (scan := _scan(part.analysis, factor)) is not None:
            cuts.setdefault(scan.top, factor)
        if (at := part.analysis.reductions[factor].cut) is not None:
            cuts[at] = factor
    return min(cuts.items(), key=lambda cut: cut[0]) if cuts else None


def _split_factors(ruled: Ruled, part: Part) -> list[Factor]:
    """The factors that are split over more than one device."""
    size, axes_of = ruled.kernel.mesh.size, part.assignment.axes_of
    return [f for f in part.analysis.reductions if any(size(axis) > 1 for axis in axes_of(f))]


def _scan(analysis: Analysis, factor: Factor) -> Scan | None:
    """What a loop over the factor carries in order, if devices don't resume it already."""
    scan = analysis.reductions[factor].scan
    return None if scan is None or scan.is_resumed else scan


def _resumed(
    ruled: Ruled, part: Part, factor: Factor, scan: Scan, names: _Names, whole: Mapping[Dim, str], suffix: str
) -> list[Part]:
    """The parts of a kernel with a loop that devices resume from each other.

    Raises Blocked where its state can't be told from the rest."""
    if ruled.kernel.reading.over_tiles:
        raise Blocked("states of a kernel over tiles are not handed on")
    axes = part.assignment.axes_of(factor)
    devices = math.prod(ruled.kernel.mesh.size(axis) for axis in axes)
    if scan.in_turns:
        return _in_turns(ruled, part, scan, devices, axes, names, whole, suffix)
    made = resume(part.analysis, scan, devices, suffix)
    names.add([*made.totals, *made.starts, *made.ends])
    loops = (scan.loop,)
    first = _with_loops(ruled, made.first, part, names, whole, loops, _handed_on(made.totals, loops, axes))
    second = _decided(ruled, made.second, part, names, whole, dict.fromkeys(axes))
    rest_loops = loops if made.starts else ()
    rest = _with_loops(ruled, made.rest, part, names, whole, rest_loops, _handed_on(made.starts, loops, axes))
    return [first, second, rest]


def _in_turns(
    ruled: Ruled,
    part: Part,
    scan: Scan,
    devices: int,
    axes: tuple[str, ...],
    names: _Names,
    whole: Mapping[Dim, str],
    suffix: str,
) -> list[Part]:
    """The parts of a kernel with a loop that devices run one after the other.

    Raises Blocked where its state can't be told from the rest."""
    made, loops, parts = take_turns(part.analysis, scan, devices, suffix), (scan.loop,), list[Part]()
    names.add([*made.workspaces])
    for turn in made.kernels:
        if turn.taken or turn.left and not turn.moves:
            own = _handed_on((*turn.taken, *turn.left), loops, axes)
            parts.append(_with_loops(ruled, turn.func, part, names, whole, loops, own))
            continue
        analysis = analyse(turn.func)
        factor = analysis.factor_of(str(turn.left[0].buffer.name), 0) if turn.left else None
        known = dict.fromkeys(axes, None if factor is None or factor.blocked is not None else factor)
        lying = {name: layout for before in parts for name, layout in before.assignment.produced.items()}
        parts.append(_decided(ruled, turn.func, part, names, whole, known, analysis, lying=lying))
    starts = _handed_on(made.starts, loops, axes)
    rest = _with_loops(ruled, made.rest, part, names, whole, loops if made.starts else (), starts)
    return [*parts, rest]


def _handed_on(workspaces: Iterable[Workspace], loops: tuple[Loop, ...], axes: tuple[str, ...]) -> dict[str, HandedOn]:
    return {str(workspace.buffer.name): HandedOn(loops, axes) for workspace in workspaces}


def _spread(ruled: Ruled, part: Part) -> Part:
    """The part, of whose workspaces that are handed on every device has its own place of the first dim.

    Raises Blocked where its loops are not those of the devices, or what it hands on is not complete."""
    _check_complete(ruled, part)
    for layouts in (part.assignment.needed, part.assignment.produced):
        for name in layouts.keys() & part.handed_on.keys():
            handed_on, layout = part.handed_on[name], layouts[name]
            for loop in handed_on.loops:
                _check_split(ruled, part, loop, handed_on.axes)
            if pending := [axis for axis, _ in layout.partial if axis not in handed_on.axes]:
                raise Blocked(f"{name} is not complete along {', '.join(pending)} where devices hand it on")
            shards = {axis: dim for axis in layout.mesh if (dim := layout.dim_of(axis)) is not None}
            shards |= dict.fromkeys(handed_on.axes, 0)
            layouts[name] = Sharding.make(layout.mesh, layout.ndim, shards, name=name).with_blocks(layout.blocks)
    return part


def _check_complete(ruled: Ruled, part: Part) -> None:
    """Raises Blocked where what devices hand on along some axes waits to be completed along others."""
    for statement in part.analysis.kernel.statements:
        name = "" if statement.write is None else str(statement.write.buffer.name)
        if name not in part.handed_on:
            continue
        read = {part.analysis.coordinates.ranges.of(access) for access in statement.reads}
        for factor in _split_factors(ruled, part):
            others = [axis for axis in part.assignment.axes_of(factor) if axis not in part.handed_on[name].axes]
            if others and not read.isdisjoint(part.analysis.reductions[factor].partial):
                raise Blocked(f"{name} is not complete along {', '.join(others)} where devices hand it on")


def _check_split(ruled: Ruled, part: Part, loop: Loop, axes: Iterable[str]) -> None:
    """Raises Blocked where other axes than these split a loop of the part."""
    size = ruled.kernel.mesh.size
    found = [axis for f in part.analysis.factors if loop.var in f.roles for axis in part.assignment.axes_of(f)]
    if {axis for axis in found if size(axis) > 1} != {axis for axis in axes if size(axis) > 1}:
        raise Blocked(f"what loop {loop.var.name} walks can't be split where its state is carried")


def _combined(
    ruled: Ruled, part: Part, factors: list[Factor], at: int, names: _Names, whole: Mapping[Dim, str], suffix: str
) -> list[Part]:
    """The parts of a kernel that is cut where a state is live: the axes that split its factor split the states of the
    devices between the first and the second.

    Raises Blocked where something can't be carried over."""
    factor, *others = factors
    if others or ruled.kernel.reading.over_tiles:
        why = "of a kernel over tiles" if not others else "that are split along two dims"
        raise Blocked(f"states {why} are not combined")
    axes = part.assignment.axes_of(factor)
    devices = math.prod(ruled.kernel.mesh.size(axis) for axis in axes)
    states = tuple(live_states(part.analysis.reductions[factor].states, at))
    made = combine(part.analysis, states, at, devices, suffix)
    names.add([*made.own, *made.shared])
    loops = tuple(state.loop for state in states)
    first = _with_loops(ruled, made.loop, part, names, whole, loops, _handed_on(made.own, loops, axes))
    analysis = analyse(made.combine)
    factor_of_devices = analysis.factor_of(str(made.own[0].buffer.name), 0)
    middle = _decided(ruled, made.combine, part, names, whole, dict.fromkeys(axes, factor_of_devices), analysis)
    return [first, middle, _decided(ruled, made.rest, part, names, whole)]


def _with_loops(
    ruled: Ruled,
    func: tirx.PrimFunc,
    whole_part: Part,
    names: _Names,
    whole: Mapping[Dim, str],
    loops: Sequence[Loop],
    handed_on: Mapping[str, HandedOn],
) -> Part:
    """A part with loops that carry a state: the axes that split these in the whole kernel split them here, and no
    others do, whatever names their dims have in either.

    Raises Blocked where there is no such factor any more."""
    analysis, known, blocks = analyse(func), dict[str, Factor | None](), dict[str, int]()
    for loop in loops:
        before = next(f for f in whole_part.analysis.factors if loop.var in f.roles)
        axes = whole_part.assignment.axes_of(before)
        now = next((f for f in analysis.factors if loop.var in f.roles), None)
        if now is None:
            raise Blocked(f"what is carried depends on no element of what loop {loop.var.name} walks")
        known |= dict.fromkeys(axes, now)
        blocks |= dict.fromkeys(axes, whole_part.assignment.blocks.get(before, 1))
        free = decide_part(ruled, analysis, whole, _fixed(whole_part, analysis, names, known)).assignment.axes_of(now)
        known |= dict.fromkeys(axis for axis in free if axis not in axes)
    made = _decided(ruled, func, whole_part, names, whole, known, analysis, handed_on, blocks=blocks)
    for loop in loops:
        now = next(f for f in analysis.factors if loop.var in f.roles)
        _check_split(ruled, made, loop, [axis for axis, factor in known.items() if factor is now])
    return made


def _decided(
    ruled: Ruled,
    func: tirx.PrimFunc,
    whole_part: Part,
    names: _Names,
    whole: Mapping[Dim, str],
    known: Mapping[str, Factor | None] = MappingProxyType({}),
    analysis: Analysis | None = None,
    handed_on: Mapping[str, HandedOn] = MappingProxyType({}),
    lying: Mapping[str, Sharding] = MappingProxyType({}),
    blocks: Mapping[str, int] = MappingProxyType({}),
) -> Part:
    """A part keeps the axes of the factors that it has, and their tiles of whole blocks; axes whose factor is gone are
    free again. `known`: what else axes split, in tiles of which `blocks`; `handed_on`: what else is handed on; `lying`:
    how workspaces lie.

    Raises Blocked where what is handed on can't be."""
    if analysis is None:
        analysis = _together(ruled, analyse(func), whole_part, names)
        if ruled.kernel.reading.over_tiles:
            analysis = analysis.over_tiles()
    kept, fixed = whole_part.assignment, _fixed(whole_part, analysis, names, known)
    same = [axis for axis in fixed if axis not in known and kept.axes.get(axis) in kept.blocks]
    blocks = {axis: kept.blocks[factor] for axis in same if (factor := kept.axes[axis])} | dict(blocks)
    made = decide_part(ruled, analysis, whole, fixed, lying=lying, blocks=blocks)
    return _spread(ruled, replace(made, handed_on={**whole_part.handed_on, **handed_on}))


def _together(ruled: Ruled, analysis: Analysis, whole_part: Part, names: _Names) -> Analysis:
    """The analysis of a part, in which those dims are one factor that a factor of the whole walks which is split; as it
    is, where that can't be split any more."""
    split = [names.of(factor) for factor in _split_factors(ruled, whole_part)]
    groups = [[f for f in analysis.factors if names.of(f) & dims and f.blocked is None] for dims in split]
    dims = [[list(dim) for f in group for dim in f.dims] for group in groups if len(group) > 1]
    if not dims:
        return analysis
    made = analyse(analysis.kernel.func.with_attr(TOGETHER_ATTR, dims))
    found = [[f for f in made.factors if names.of(f) & of] for of in split]
    return made if all(len(same) <= 1 and all(f.blocked is None for f in same) for same in found) else analysis


def _fixed(
    whole_part: Part, analysis: Analysis, names: _Names, known: Mapping[str, Factor | None]
) -> dict[str, Factor | None]:
    """What axes split of a part of a kernel, as far as it is the same that they split of the whole; and `known`."""
    fixed: dict[str, Factor | None] = dict(known)
    for axis, factor in whole_part.assignment.axes.items():
        if axis in fixed:
            continue
        if factor is not None and (same := [f for f in analysis.factors if names.of(f) & names.of(factor)]):
            fixed[axis] = max(same, key=lambda f: len(f.dims))
    return fixed


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

    def add(self, workspaces: Iterable[Workspace]) -> None:
        """Note where the dims of workspaces come from."""
        for workspace in workspaces:
            name, shape = workspace.buffer.name, list(workspace.buffer.shape)
            for dim, factor in enumerate(workspace.factors):
                if factor is not None:
                    self.same[(name, dim)] = min(self.of(factor))
                    shape[dim] = global_size(factor, self.shapes)
            self.shapes[name] = tuple(shape)


def global_size(factor: Factor, shapes: Mapping[str, Shape]) -> tirx.PrimExpr:
    """The size of the whole dim that a factor walks, or walks a tile of."""
    param, dim = factor.dims[0]
    return shapes[param][dim]
