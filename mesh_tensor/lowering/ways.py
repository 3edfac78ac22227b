"""The rule of a kernel, said in that of several ways in which axes can split what they are asked to split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice

from tvm import tirx

from mesh_tensor.base.blocks import Margins
from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import made_once
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.tir_rule import typical_size
from mesh_tensor.rules.kernel.computed_places import in_order
from mesh_tensor.rules.kernel.conditions_apart import conditions_apart
from mesh_tensor.rules.kernel.distribution import distributed
from mesh_tensor.rules.kernel.factor_derivation import Dim
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

from .original_dims import asked_of_refined, has_whole_groups, without_windows_of_groups
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
        if not has_whole_groups(groups, parts):
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
