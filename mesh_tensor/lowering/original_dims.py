"""A kernel that was lowered with dims taken apart (rules.granularity), seen with the dims that its author gave them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice

from tvm import tirx

from mesh_tensor.base.blocks import Margins, whole_blocks
from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import made_once
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment
from mesh_tensor.plan.tir_rule import typical_size
from mesh_tensor.rules.kernel.computed_places import in_order
from mesh_tensor.rules.kernel.conditions_apart import conditions_apart
from mesh_tensor.rules.kernel.distribution import distributed
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.fission import in_two_loops
from mesh_tensor.rules.kernel.flat_programs import in_whole_rows
from mesh_tensor.rules.kernel.granularity import Refined, refined
from mesh_tensor.rules.kernel.normalize import ANALYSES
from mesh_tensor.rules.kernel.one_branch import one_branch
from mesh_tensor.rules.kernel.packed_rows import row_by_row
from mesh_tensor.rules.kernel.padding_apart import padding_apart
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.rules.kernel.reused_buffers import with_own_buffers
from mesh_tensor.rules.kernel.rounds import in_rounds
from mesh_tensor.rules.kernel.sharding_rule import Analysis, analyse, may_read_windows
from mesh_tensor.tir.rewrite import reshaped, with_other_dims

from .splits import Split
from .stages import Annotated, Ruled


def rule(kernel: Annotated) -> Ruled:
    """The kernel with its rule: with blocks walked in order, and dims taken apart, where that lets axes split what is
    asked to be split, else as it is."""
    refined, analysis = _refined(kernel)
    if kernel.reading.over_tiles:
        analysis = analysis.over_tiles()
    whole = dict.fromkeys(refined.inner_dims(), "groups can be split, but not what is in a group")
    analysis = without_windows_of_groups(refined, analysis)
    return Ruled(kernel, refined, analysis, asked_of_refined(refined, kernel.asked), whole)


def without_windows_of_groups(made: Refined, analysis: Analysis) -> Analysis:
    """The analysis of a kernel, or a part of it, in which dims that are taken apart are read whole: a window of groups,
    or of what is in each, is none of the dim."""
    apart = [(param, made.outer(param, dim) + at) for param, dim in made.groups for at in (0, 1)]
    windows = {dim: read for dim, read in analysis.windows.items() if dim not in apart}
    return analysis if len(windows) == len(analysis.windows) else replace(analysis, windows=windows)


def _refined(kernel: Annotated) -> tuple[Refined, Analysis]:
    made, analysis = Refined(kernel.func, {}), analyse(kernel.func)
    if kernel.reading.over_tiles:
        return made, analysis
    split = [(name, dim) for name, sharding in kernel.asked.items() for dim, axes in enumerate(sharding.dims) if axes]
    by_data = _by_data(kernel, analysis, split)
    if (
        any(_is_scanned(analysis, dim) for dim in split)
        and (said_of_each := _conditions_apart(kernel.func)) is not None
    ):
        after = analyse(said_of_each)
        if not any(_is_scanned(after, dim) for dim in split):
            made, analysis = Refined(said_of_each, {}), after
    if any(_depends_on_blocks(analysis, dim) for dim in split) and (one := _one_branch(made.func)) is not None:
        made, analysis = Refined(one, {}), analyse(one)
    whole = {dim for dim in split if analysis.reason_whole(*dim)} | by_data
    near = {dim for dim in whole if _is_near(kernel, analysis, dim)}
    func = made.func
    for divides in (_divides, _margins_cost_less) if whole else ():
        for found in _ways(func, tuple(sorted(whole)), tuple(sorted(whole - near))):
            after = analyse(found.func)
            still = {dim for dim in split if _reason(found, after, dim)}
            still |= {(param, dim) for param, dim in by_data if (param, found.outer(param, dim)) in after.lookups}
            lost = near & still - {dim for dim in still if _reads_windows(found, after, dim)}
            if still < whole and not lost and divides(found, after, kernel.asked, kernel.mesh):
                made, analysis, whole = found, after, still
            if not whole:
                break
        if not whole - near:
            break
    return made, _in_windows(made, analysis, kernel)


def _by_data(kernel: Annotated, analysis: Analysis, split: Sequence[Dim]) -> set[Dim]:
    """The dims that data index of tensors that are read, and of results, if the same axes are to split them all: what
    is looked up would be completed on all devices, although it may only be needed where the result is."""
    found = {dim for dim in split if dim in analysis.lookups}
    alike = len({kernel.asked[name].dims[dim] for name, dim in found}) == 1
    return found if alike and len({analysis.written(name) for name, _ in found}) == 2 else set()


def _is_near(kernel: Annotated, analysis: Analysis, dim: Dim) -> bool:
    """Whether a dim is read in windows smaller than what the devices on which it is asked to lie lack, everywhere or by
    a factor that their axes may split."""
    if dim not in analysis.windows:
        return False
    param, at = dim
    axes = set(kernel.asked[param].dims[at])
    factor, reaches = analysis.windows[dim]
    others = () if factor is None else factor.dims
    may_be_split = factor is None or any(
        name not in kernel.asked or axes & set(kernel.asked[name].dims[d]) for name, d in others
    )
    devices = math.prod(kernel.mesh.size(axis) for axis in axes)
    return may_be_split and reaches.margin < reaches.extent - reaches.extent // devices


def _in_windows(made: Refined, analysis: Analysis, kernel: Annotated) -> Analysis:
    """The analysis in which windows are read of dims that axes are asked to split beside a dim of a result, if these
    are smaller than the dims: keys of which every query sees those near it."""
    near: dict[Dim, tuple[int, list[Dim]]] = {}
    for axis in kernel.mesh:
        asked = [(name, made.outer(name, d)) for name, s in kernel.asked.items() if (d := s.dim_of(axis)) is not None]
        results = [dim for dim in asked if analysis.written(dim[0]) and analysis.factor_of(*dim)]
        split = [None, *(analysis.factor_of(*dim) for dim in results)]
        beside = [dim for dim in asked if not analysis.written(dim[0]) and analysis.factor_of(*dim) not in split]
        near |= dict.fromkeys(beside if results else (), (kernel.mesh.size(axis), results))
    dims = tuple(sorted(near))
    if not dims or not may_read_windows(made.func, dims):
        return analysis
    after = analyse(made.func, dims)
    smaller = [
        dim
        for dim, (devices, results) in near.items()
        if (read := after.windows.get(dim)) and read[0] is not None
        if read[0] in [after.factor_of(*result) for result in results]
        if read[1].margin < read[1].extent - read[1].extent // devices
    ]
    return after if len(smaller) == len(near) else analysis


class _Ways:
    """Ways to write a kernel, each made when it is first asked for."""

    def __init__(self, make: Callable[[], Iterator[Refined]]) -> None:
        self._make, self._made = make, list[Refined]()
        self._left: Iterator[Refined] = make()

    def __iter__(self) -> Iterator[Refined]:
        for at in count():
            if at == len(self._made) and not self._has_another():
                return
            yield self._made[at]

    def _has_another(self) -> bool:
        try:
            found = next(self._left, None)
        except BaseException:  # which whoever asks next is told too
            self._left = islice(self._make(), len(self._made), None)
            raise
        if found is not None:
            self._made.append(found)
        return found is not None


@made_once(ANALYSES)
def _ways(func: tirx.PrimFunc, whole: tuple[Dim, ...], computed: tuple[Dim, ...]) -> _Ways:
    """Other ways to write a kernel, in which more of the dims in `whole` can perhaps be split; `computed`: those of
    which blocks may be walked in another order. They are the same ones for all layouts, and so is what they are."""

    def made() -> Iterator[Refined]:
        yield from refined(func, whole)
        ordered = in_order(func, computed) if computed else None
        if ordered is not None:
            yield Refined(ordered, {})
            yield from refined(ordered, whole)
        rows = row_by_row(func, computed)
        if rows is not None:
            yield Refined(rows, {})
        apart = distributed(read_kernel(func))
        if apart is not None:
            yield Refined(apart, {})
            yield from refined(apart, whole)
        said_of_each = conditions_apart(read_kernel(func))
        if said_of_each is not None:
            yield Refined(said_of_each, {})
        rows_apart = in_whole_rows(read_kernel(func))
        if rows_apart is not None:
            yield Refined(rows_apart, {})
            yield from refined(rows_apart, whole)
        two_loops = in_two_loops(read_kernel(func))
        if two_loops is not None:
            yield Refined(two_loops, {})
        rounds = in_rounds(read_kernel(func))
        if rounds is not None:
            yield Refined(rounds, {})
        analysis = analyse(func)
        counted = padding_apart(analysis)
        if counted is not None:
            yield Refined(counted, {})
        own = with_own_buffers(analysis.kernel, analysis.coordinates)
        if own is not None:
            yield Refined(own, {})
            yield from _ways(own, whole, computed)

    return _Ways(made)


def _reason(made: Refined, analysis: Analysis, dim: Dim) -> str | None:
    param, at = dim
    return analysis.reason_whole(param, made.outer(param, at))


def _is_scanned(analysis: Analysis, dim: Dim) -> bool:
    """Whether what is carried along a dim has to be handed on."""
    factor = analysis.factor_of(*dim)
    return factor is not None and bool(analysis.reductions[factor].scans)


def _depends_on_blocks(analysis: Analysis, dim: Dim) -> bool:
    """Whether a dim can't be split, or in whole blocks only."""
    factor = analysis.factor_of(*dim)
    return factor is None or factor.blocked is not None or factor.aligned is not None


_one_branch = made_once(ANALYSES)(lambda func: one_branch(read_kernel(func)))
_conditions_apart = made_once(ANALYSES)(lambda func: conditions_apart(read_kernel(func)))


def _reads_windows(made: Refined, analysis: Analysis, dim: Dim) -> bool:
    """Whether windows are read of a dim, which is not taken apart."""
    param, at = dim
    return dim not in made.groups and analysis.read_from(param, made.outer(param, at)) is not None


def _divides(made: Refined, analysis: Analysis, asked: Mapping[str, Sharding], mesh: Mesh) -> bool:
    """Whether all axes that may split a dim that is taken apart split it at the borders of groups."""
    return all(groups % math.prod(parts) == 0 for _, _, groups, parts in _groups_split(made, analysis, asked, mesh))


def _margins_cost_less(made: Refined, analysis: Analysis, asked: Mapping[str, Sharding], mesh: Mesh) -> bool:
    """Whether what devices lack of tiles of whole groups, and of theirs of the results, is no more than all that they
    lack of what is read."""
    moved = gathered = 0.0
    for param, dim, groups, parts in _groups_split(made, analysis, asked, mesh):
        if not _has_whole_groups(groups, parts):
            return False
        length = made.groups[(param, dim)]
        margins = Margins.of(groups * length, math.prod(parts), length)
        buffer = analysis.kernel.params[param]
        nbytes = math.prod(typical_size(size, {}) for size in buffer.shape) * itemsize(buffer.dtype)
        is_read, is_written = analysis.read(param), analysis.written(param)
        moved += nbytes * (is_read * margins.of_inputs + is_written * margins.of_results)
        gathered += nbytes * is_read * margins.gathered
    return moved <= gathered


def _groups_split(
    made: Refined, analysis: Analysis, asked: Mapping[str, Sharding], mesh: Mesh
) -> Iterator[tuple[str, int, int, list[int]]]:
    """The dims that are taken apart: of which parameter, in how many groups, and into how many parts all axes that may
    split them would split those."""
    for param, dim in made.groups:
        outer = made.outer(param, dim)
        factor = analysis.factor_of(param, outer)
        dims = [(param, outer)] if factor is None else factor.dims
        axes = {axis for name, at in dims if name in asked for axis in asked[name].dims[made.original(name, at)]}
        axes |= set(asked[param].dims[dim]) if param in asked else set()
        yield param, dim, int(analysis.kernel.params[param].shape[outer]), [mesh.size(a) for a in mesh if a in axes]


def _has_whole_groups(groups: int, parts: Sequence[int]) -> bool:
    """Whether tiles of that many groups, split into `parts` one after the other, start where tiles of whole groups do,
    of the dim that is taken apart."""
    walked, tile = whole_blocks(groups, math.prod(parts), 1), groups
    for devices in parts:
        walked, tile = walked // devices, -(-tile // devices)
        if walked != tile:
            return False
    return True


def uneven_groups(made: Refined, analysis: Analysis, split: Split) -> str | None:
    """Why a split's tiles are none of the parameters' own dims, None if they are: a part of the kernel may find more
    dims to be one factor than the whole did."""
    parts = [split.coordinates.mesh.size(axis) for axis in split.axes]
    for param, dim in made.groups:
        outer = made.outer(param, dim)
        if param in analysis.kernel.params and (param, outer) in split.factor.dims:
            groups = int(analysis.kernel.params[param].shape[outer])
            if not _has_whole_groups(groups, parts):
                return f"{param} dim {dim} is walked in {groups} groups, which {', '.join(split.axes)} don't divide"
    return None


def asked_of_refined(made: Refined, asked: Mapping[str, Sharding]) -> dict[str, Sharding]:
    """What is asked, of the refined parameters: axes split groups."""
    return {name: _moved(made, name, sharding, refine=True) for name, sharding in asked.items()}


def with_original_dims(made: Refined, assignment: Assignment) -> Assignment:
    """What was decided, of the parameters as their author has them."""
    if not made.groups:
        return assignment
    layouts = [
        {name: _moved(made, name, layout, refine=False) for name, layout in given.items()}
        for given in (assignment.needed, assignment.produced)
    ]
    whole = {(name, made.original(name, dim)): reason for (name, dim), reason in assignment.whole.items()}
    return replace(assignment, needed=layouts[0], produced=layouts[1], whole=whole)


def _moved(made: Refined, name: str, layout: Sharding, *, refine: bool) -> Sharding:
    if not any(param == name for param, _ in made.groups):
        return layout
    extra = sum(param == name for param, _ in made.groups)
    move = made.outer if refine else made.original
    shards = {axis: move(name, dim) for axis in layout.mesh if (dim := layout.dim_of(axis)) is not None}
    ndim = layout.ndim + (extra if refine else -extra)
    moved = Sharding.make(layout.mesh, ndim, shards, partial=dict(layout.partial), name=name)
    windows = [(move(name, dim), window) for dim, window in layout.windows]
    blocks = dict(layout.blocks)
    if not refine:
        shape, uneven = made.shapes()[name], dict[int, int]()
        for param, dim in made.groups:
            at = made.outer(param, dim)
            if param == name and (at in blocks or int(shape[at]) % layout.num_shards(at)):
                uneven[at] = made.groups[(param, dim)]
        blocks = {at: blocks.get(at, 1) * uneven.get(at, 1) for at in (*blocks, *uneven)}
    return moved.with_windows(windows).with_blocks([(move(name, dim), n) for dim, n in blocks.items()])


def put_together(func: tirx.PrimFunc, made: Refined) -> tirx.PrimFunc:
    """A local kernel whose parameters have their own dims again.

    Raises `Blocked` (rules.factors) where some access has no form in them."""
    together = {
        buffer: reshaped(buffer, _shape(made, buffer))
        for buffer in func.buffer_map.values()
        if any(param == buffer.name for param, _ in made.groups)
    }
    if not together:
        return func

    def place(buffer: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list] | None:
        return _place(made, buffer, mins, extents)

    body = with_other_dims(func.body, together, place)
    if body is None:
        raise Blocked(f"a region of {', '.join(b.name for b in together)} has no form in the dims that are taken apart")
    buffers = {param: together.get(buffer, buffer) for param, buffer in func.buffer_map.items()}
    return tirx.PrimFunc(func.params, body, func.ret_type, buffers, func.attrs)


def _shape(made: Refined, buffer: tirx.Buffer) -> list:
    return [math.prod(sizes[1:], start=sizes[0]) for sizes in made.by_dim(buffer.name, list(buffer.shape))]


def _place(made: Refined, buffer: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list] | None:
    places, lengths = [], []
    shape = made.by_dim(buffer.name, list(buffer.shape))
    parts = zip(made.by_dim(buffer.name, mins), made.by_dim(buffer.name, extents), shape, strict=True)
    for lows, lens, sizes in parts:
        if len(lows) == 1:
            places.append(lows[0])
            lengths.append(lens[0])
            continue
        if int(lens[0]) != 1 and int(lens[1]) != int(sizes[1]):
            return None
        places.append(lows[0] * sizes[1] + lows[1])
        lengths.append(int(lens[0]) * int(lens[1]))
    return places, lengths
