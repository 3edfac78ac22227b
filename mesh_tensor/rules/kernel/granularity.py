"""Granularity: dims of which one is walked in groups of another's: key heads by `by // 2`, scales by blocks of 128.

A dim of which blocks are walked together, but not position by position (in chunks of which every position meets every
other), is taken apart into blocks and what is in one, too.

Where a loop walks dim h of a parameter in steps of g, and dim k of another one by one, and h is g times as long as k, h
is taken apart into `h // g` and `h % g`: the same memory, as rows are contiguous. What walks k then walks `h // g`, so
the two are one factor, and an axis can split both at the borders of groups. Where a loop walks two dims in blocks of
different lengths, both are taken apart. The rest of the compiler sees plain dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations

from tvm import ir, tirx

from mesh_tensor.tir.double_loops import unfuse
from mesh_tensor.tir.effects import thread_indices
from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.nodes import int_or, is_const, loads
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import reshaped, with_other_dims
from mesh_tensor.tir.tile_ops import Copy
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .factor_derivation import Dim
from .reader import read_kernel
from .statements import Kernel, Statement

#: From a parameter's dim that is taken apart to how long its groups are.
Groups = Mapping[Dim, int]


@dataclass(frozen=True)
class Refined:
    """A kernel with dims taken apart."""

    func: tirx.PrimFunc
    groups: Groups

    def outer(self, param: str, dim: int) -> int:
        """Where a parameter's dim, or that of its groups, is among the refined ones."""
        return dim + sum(name == param and other < dim for name, other in self.groups)

    def original(self, param: str, refined: int) -> int:
        """The parameter's dim that a refined one is a part of."""
        dim = refined
        while self.outer(param, dim) > refined:
            dim -= 1
        return dim

    def shapes(self) -> dict[str, tuple]:
        """The refined shapes of the parameters with dims taken apart."""
        names = {param for param, _ in self.groups}
        buffers = self.func.buffer_map.values()
        return {str(buffer.name): tuple(buffer.shape) for buffer in buffers if buffer.name in names}

    def by_dim(self, param: str, values: Sequence) -> list[list]:
        """Values of a parameter's refined dims, those of one dim together."""
        found: list[list] = []
        for at, value in enumerate(values):
            if self.original(param, at) == len(found):
                found.append([])
            found[-1].append(value)
        return found

    def inner_dims(self) -> list[Dim]:
        """The refined dims that are places in groups."""
        return [(param, self.outer(param, dim) + 1) for param, dim in self.groups]


def refined(func: tirx.PrimFunc, whole: Sequence[Dim]) -> Iterator[Refined]:
    """The kernel, in which dims are taken apart so that those in `whole`, which can't be split, may perhaps be, in the
    ways in which that can be done. Parameters' views, and prints, are told in the dims that parameters have."""
    params = {buffer.data for buffer in func.buffer_map.values()}
    if any(owner.data in params for owner in left_views(func).values()) or prints(func.body):
        return
    func = unfuse(func, alone=True)
    yield from _taken_apart(func, whole)
    within = unfuse(func, alone=True, within=True)
    if not within.same_as(func):
        yield Refined(within, {})
        yield from _taken_apart(within, whole)


def _taken_apart(func: tirx.PrimFunc, whole: Sequence[Dim]) -> Iterator[Refined]:
    """The kernel in the ways in which its dims can be taken apart, its loops as they are."""
    kernel = read_kernel(func)
    tried: list[Groups] = [{}]
    for found in (_groups(kernel, whole), _blocks(kernel, whole), _programs(kernel, whole)):
        groups = {dim: length for dim, length in found.items() if (_size(kernel, dim) or 1) % length == 0}
        if groups in tried:
            continue
        tried.append(groups)
        made = _Refiner(kernel, groups).run()
        if made is not None:
            yield Refined(made, groups)


def _groups(kernel: Kernel, whole: Sequence[Dim]) -> dict[Dim, int]:
    """The dims that are walked in groups of others, of which one is in `whole`; nothing if they disagree."""
    walked = _walked(kernel)
    groups: dict[Dim, set[int]] = {}
    for fine, fine_forms in walked.items():
        for coarse, coarse_forms in walked.items():
            ratio = _ratio(_size(kernel, fine), _size(kernel, coarse))
            if ratio is None or not (fine in whole or coarse in whole):
                continue
            if any(_is_in_groups(a, b, ratio) for a in fine_forms for b in coarse_forms):
                groups.setdefault(fine, set()).add(ratio)
    if any(len(ratios) > 1 for ratios in groups.values()):
        return {}
    found = {dim: ratio for dim, (ratio,) in groups.items()}
    return {**_strides(kernel, whole, walked), **_chunks(kernel, whole, walked), **found}


def _strides(kernel: Kernel, whole: Sequence[Dim], walked: Mapping[Dim, list[Linear]]) -> dict[Dim, int]:
    """The dims that are walked in steps only; one iteration may take several places: `x[2 * k] + x[2 * k + 1]`."""
    steps = {
        dim: math.gcd(*(step for form in walked[dim] for step in form.terms.values())) for dim in whole if dim in walked
    }
    return {dim: step for dim, step in steps.items() if step > 1 and _size(kernel, dim)}


def _chunks(kernel: Kernel, whole: Sequence[Dim], walked: Mapping[Dim, list[Linear]]) -> dict[Dim, int]:
    """The dims of which blocks are walked together, but not what is in a block: every position of a chunk meets every
    other."""
    of_dim = {dim: _steps(kernel, forms) for dim, forms in walked.items() if _size(kernel, dim)}
    wanted = set[tuple[tirx.Var, int]]().union(*(of_dim.get(dim, set()) for dim in whole))
    return {dim: step for dim, steps in of_dim.items() if len(found := steps & wanted) == 1 for _, step in found}


def _steps(kernel: Kernel, forms: Sequence[Linear]) -> set[tuple[tirx.Var, int]]:
    """The loops over blocks that all coordinates in a dim have, each with how long its blocks are."""
    found: list[set[tuple[tirx.Var, int]]] = []
    for form in forms:
        (outer, step), *inner = form.ordered
        extents = [kernel.loops[v].extent if v in kernel.loops else None for v, _ in inner]
        known = [int(extent) for extent in extents if isinstance(extent, tirx.IntImm)]
        reach = sum(c * (extent - 1) for (_, c), extent in zip(inner, known, strict=False))
        fits = outer in kernel.loops and len(known) == len(inner) and 0 <= form.const < step - reach
        found.append({(outer, step)} if fits and step > 1 else set())
    return set.intersection(*found)


def _blocks(kernel: Kernel, whole: Sequence[Dim]) -> dict[Dim, int]:
    """The dims that loops walk together with others in blocks, as 16 numbers and the 8 bytes that hold them, of which
    one is in `whole`: each in blocks of its own. Where there are several lengths, in the longest."""
    walked = _walked(kernel)
    found: dict[Dim, int] = {}
    for a, b in combinations(walked, 2):
        if a not in whole and b not in whole:
            continue
        for lengths in (_shared(x, y) for x in walked[a] for y in walked[b]):
            if lengths is not None and _same_count(_size(kernel, a), lengths[0], _size(kernel, b), lengths[1]):
                for dim, length in zip((a, b), lengths, strict=True):
                    found[dim] = max(found.get(dim, 1), length)
    return {dim: length for dim, length in found.items() if length > 1}


def _programs(kernel: Kernel, whole: Sequence[Dim]) -> dict[Dim, int]:
    """The dims of which every program of the grid has a block, whatever places of it; none of those of a loop of the
    grid that walks nothing in `whole`."""
    analyzer, found = _ranges(kernel), dict[Dim, int]()
    for loop in kernel.grid:
        walked = [(name, dim) for name, buffer in kernel.params.items() for dim in range(len(buffer.shape))]
        lengths = {dim: _ratio(_size(kernel, dim), int_or(loop.extent, None)) for dim in walked}
        dims = {dim: n for dim, n in lengths.items() if n and _is_in_blocks(kernel, dim, n, loop.var, analyzer)}
        found |= dims if not dims.keys().isdisjoint(whole) else {}
    return found


def _is_in_blocks(kernel: Kernel, dim: Dim, length: int, program: tirx.Var, analyzer: Prover) -> bool:
    """Whether all places of a dim at which something is accessed are in the program's block of it."""
    accesses = (access for statement in kernel.statements for access in statement.accesses)
    places = [a.indices[dim[1]] for a in accesses if a.buffer.same_as(kernel.params[dim[0]])]
    return bool(places) and all(analyzer.can_prove_equal(tirx.floordiv(at, length), program) for at in places)


def _same_count(a: int | None, block: int, b: int | None, other: int) -> bool:
    return a is not None and b is not None and a % block == 0 and b % other == 0 and a // block == b // other


def _shared(a: Linear, b: Linear) -> tuple[int, int] | None:
    """How long the blocks of two dims are that loops walk together; None if they walk none."""
    shared = [var for var in a.terms if var in b.terms]
    if not shared or a.const or b.const:
        return None
    lengths = min(a.terms[var] for var in shared), min(b.terms[var] for var in shared)
    proportional = all(a.terms[var] * lengths[1] == b.terms[var] * lengths[0] for var in shared)
    inside = all(
        0 < step < length
        for form, length in zip((a, b), lengths, strict=True)
        for var, step in form.terms.items()
        if var not in shared
    )
    return lengths if proportional and inside and min(lengths) > 0 else None


def _walked(kernel: Kernel) -> dict[Dim, list[Linear]]:
    """The coordinates in which parameters' dims are walked, on chip, too, where a buffer holds all of one."""
    found: dict[Dim, list[Linear]] = {}
    copies, single = _copies(kernel), _single(kernel)
    for statement in kernel.statements:
        for access in statement.accesses:
            for dim, form in enumerate(access.forms):
                of = (access.buffer.name, dim) if kernel.is_param(access.buffer) else copies.get((access.buffer, dim))
                if of is not None and form is not None and (walked := _without(single, form)).terms:
                    found.setdefault(of, []).append(walked)
    return found


def _single(kernel: Kernel) -> set[tirx.Var]:
    """The loops of one iteration, as those over blocks as long as a chunk."""
    return {loop.var for loop in kernel.loops.values() if is_const(loop.min, 0) and is_const(loop.extent, 1)}


def _without(single: Set[tirx.Var], form: Linear) -> Linear:
    """The coordinate without these loops."""
    if single.isdisjoint(form.terms):
        return form
    return Linear({var: step for var, step in form.terms.items() if var not in single}, form.const)


def _copies(kernel: Kernel) -> dict[tuple[tirx.Buffer, int], Dim]:
    """The dims of buffers on chip that hold all of a parameter's dim, place by place."""
    written: dict[tirx.Buffer, list[Statement]] = {}
    for statement in kernel.statements:
        for buffer in (*statement.may_write, *(() if statement.write is None else (statement.write.buffer,))):
            written.setdefault(buffer, []).append(statement)
    found: dict[tuple[tirx.Buffer, int], Dim] = {}
    for buffer, writers in written.items():
        only = writers[0]
        if kernel.is_param(buffer) or len(writers) > 1 or not isinstance(only.tile_op, Copy):
            continue
        for dim, form in enumerate(only.target.forms):
            for at, other in enumerate(only.reads[0].forms):
                size = only.reads[0].buffer.shape[at]
                same = form is not None and form.terms and other is not None and form.same_as(other)
                if same and kernel.is_param(only.reads[0].buffer) and ir.structural_equal(size, buffer.shape[dim]):
                    found[buffer, dim] = (only.reads[0].buffer.name, at)
    return found


def _is_in_groups(fine: Linear, coarse: Linear, ratio: int) -> bool:
    """Whether what walks `coarse` walks `fine` in groups of `ratio`."""
    return (
        not fine.const
        and not coarse.const
        and all(fine.terms.get(var) == step * ratio for var, step in coarse.terms.items())
        and all(step < ratio for var, step in fine.terms.items() if var not in coarse.terms)
    )


def _size(kernel: Kernel, dim: Dim) -> int | None:
    return int_or(kernel.params[dim[0]].shape[dim[1]], None)


def _ratio(fine: int | None, coarse: int | None) -> int | None:
    return None if not fine or not coarse or fine % coarse or fine == coarse else fine // coarse


def _ranges(kernel: Kernel) -> Prover:
    """What proves what holds of the values of loops, of threads and of what is bound to these."""
    analyzer = Prover()
    for loop in kernel.loops.values():
        analyzer.bind(loop.var, ir.Range.from_min_extent(loop.min, loop.extent))
    for var, count in thread_indices(kernel.func).items():
        analyzer.bind(var, ir.Range(0, count))
    for var, value in kernel.binds.items():
        if not loads(value):
            analyzer.bind(var, value)
    return analyzer


class _Refiner:
    def __init__(self, kernel: Kernel, groups: Groups) -> None:
        self._kernel, self._groups = kernel, groups
        self._analyzer = _ranges(kernel)

    def run(self) -> tirx.PrimFunc | None:
        """The kernel with its parameters refined; None if some access of one has no form in the parts of its dims."""
        func, names = self._kernel.func, {name for name, _ in self._groups}
        apart = {buffer: self._buffer(buffer) for buffer in func.buffer_map.values() if buffer.name in names}
        body = with_other_dims(func.body, apart, self._place)
        if body is None:
            return None
        buffers = {param: apart.get(buffer, buffer) for param, buffer in func.buffer_map.items()}
        return tirx.PrimFunc(func.params, body, func.ret_type, buffers, func.attrs)

    def _buffer(self, buffer: tirx.Buffer) -> tirx.Buffer:
        shape: list[object] = []
        for dim, size in enumerate(buffer.shape):
            group = self._groups.get((buffer.name, dim))
            shape += [size] if group is None else [int(size) // group, group]
        return reshaped(buffer, shape)

    def _place(self, buffer: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list] | None:
        places: list[tirx.PrimExpr] = []
        lengths: list[tirx.PrimExpr | int] = []
        for dim, (low, extent) in enumerate(zip(mins, extents, strict=True)):
            group = self._groups.get((buffer.name, dim))
            if group is None:
                places.append(low)
                lengths.append(extent)
                continue
            length = int_or(extent, 0)
            if not length or group % length:
                return None
            simplify = self._analyzer.simplify
            outer, inner = simplify(tirx.floordiv(low, group)), simplify(tirx.floormod(low, group))
            if length > 1 and not self._analyzer.can_prove_equal(tirx.floormod(inner, length), 0):
                return None
            places += [outer, inner]
            lengths += [1, length]
        return places, lengths
