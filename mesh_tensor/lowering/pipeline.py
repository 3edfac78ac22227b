"""The lowering of one annotated kernel, from its annotations to a list of local kernels and collectives.

annotated   read        the mesh, how every buffer lies on it, and the view that the kernel is written in
ruled       rule        factors, reductions, what can't be split
propagated  decide      what every axis splits
cut         cut_up      at collectives in the middle of the kernel; both parts are ruled and decided
local       make_local  tiles, offsets, masks
explicit    explicit    every layout change becomes a collective

A pass gives a record, or says what no axis can split after all: then the kernel is decided again with that whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tvm import tirx

from mesh_tensor.annotations.annotate import read_annotations
from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh, check_countable
from mesh_tensor.base.recent import made_once
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.prices import prices_on
from mesh_tensor.plan.tir_rule import Sizes
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.kernel.normalize import ANALYSES, normalize
from mesh_tensor.rules.kernel.statements import buffer_params, without_binds
from mesh_tensor.rules.kernel.whole_numbers import without_overflow
from mesh_tensor.tir.grids import grids_of
from mesh_tensor.tir.nodes import function_name, loads

from .apart import lower_apart, moving
from .decide import decide, split_at
from .grids import LoweredGrids, lower_grids
from .layouts import explicit
from .local_view import Lowered, make_local
from .parts import cut_up
from .stages import Annotated, LocalPart, LocalParts, Part, Parts, Ruled, Unsplittable
from .verify import enabled, explicit_problems, local_problems, raise_on
from .view import over_tiles, read_view, refuse_views_of_tiles
from .ways import rule


def read(func: tirx.PrimFunc, view: str, machine: Machine | None = None) -> Annotated:
    """The kernel as its annotations state it, written over whole tensors or over tiles (`view`: auto, global, local);
    it is decided by what is cheap on the machine. Refused: no or invalid annotations, a mesh of too many devices, an
    unknown view, or one that doesn't fit the kernel's loops."""
    mesh, annotations = read_annotations(func)
    check_countable(mesh)
    asked = {name: annotation.sharding for name, annotation in annotations.items()}
    refuse_views_of_tiles(func, asked, view)
    plain = normalize(func)
    shapes = {param: tuple(buffer.shape) for param, buffer in buffer_params(plain).items()}
    reading = read_view(plain, asked, view)
    if reading.over_tiles:
        asked = {name: asked.get(name) or Sharding.make(mesh, len(shape)) for name, shape in shapes.items()}
        plain = over_tiles(plain, asked)
    return Annotated(function_name(func), mesh, plain, asked, shapes, reading, prices_on(mesh, machine))


def lower_kernel(
    func: tirx.PrimFunc,
    *,
    strict: bool = False,
    view: str = "auto",
    split: Mapping[str, Dim] | None = None,
    machine: Machine | None = None,
) -> Lowered | LoweredGrids:
    """Lower an annotated kernel, written over whole tensors or over tiles (`view`: auto, global, local); or several in
    one function, which run one after the other; or the parts of one that have nothing to do with each other, where
    less moves then.

    `split`: what the axes split of a single kernel, if that was decided before: axis -> a dim that the factor walks;
    the other axes split nothing. `machine`: what is cheap on it, else; None: on this project's CPU ranks.

    Raises:
        MeshTensorError: no or invalid annotations, no TileLang kernel, or, with `strict`, layouts that need a gather.
    """
    grids = grids_of(check_kernel(func))
    lower = partial(_lower_one, strict=strict, view=view, split=None, machine=machine)
    if len(grids.funcs) > 1:
        return lower_grids(func, grids, lower)
    try:
        whole = lower(func, split=split)
    except MeshTensorError:
        mesh, _ = read_annotations(func)
        apart = None if view == "local" else lower_apart(func, lower, prices_on(mesh, machine), math.inf)
        if apart is None:
            raise
        return apart
    prices = prices_on(whole.mesh, machine)
    least = 0 if whole.reading.over_tiles else moving(whole, prices)
    return (lower_apart(func, lower, prices, least) if least else None) or whole


def _lower_one(
    func: tirx.PrimFunc, *, strict: bool, view: str, split: Mapping[str, Dim] | None, machine: Machine | None
) -> Lowered:
    with without_overflow(func):
        ruled = verified(rule(verified(read(func, view, machine))))
        return verified(explicit(_localized(ruled, strict, split)))


@dataclass(frozen=True)
class KernelLowering:
    """Lowers kernels that are written in a view, and says what the axes split of them at which sizes.

    A split is (axis, a dim that the factor which it splits walks), for each axis that splits something. `machine`: as
    in `lower_kernel`."""

    view: str = "auto"
    machine: Machine | None = None

    def __call__(
        self, func: tirx.PrimFunc, strict: bool, split: tuple[tuple[str, Dim], ...] | None = None
    ) -> Lowered | LoweredGrids:
        """The kernel, lowered with that split, or with the one that costs least; once for who asks again soon, for
        another target or other options."""
        return _lowered(self, func, strict, split, enabled())

    def splits(self, func: tirx.PrimFunc, strict: bool) -> Callable[[Sizes], tuple[tuple[str, Dim], ...]]:
        """What costs least, by the sizes of symbols; of several kernels in one function it is decided once."""
        if len(grids_of(func).funcs) > 1:
            return lambda sizes: ()
        ruled = verified(rule(verified(read(func, self.view, self.machine))))
        return lambda sizes: tuple(split_at(ruled, sizes, strict=strict).items())


@made_once(4)
def _lowered(
    lowering: KernelLowering,
    func: tirx.PrimFunc,
    strict: bool,
    split: tuple[tuple[str, Dim], ...] | None,
    is_verified: bool,  # what is made is the same, but not what may be raised
) -> Lowered | LoweredGrids:
    given = None if split is None else dict(split)
    return lower_kernel(func, strict=strict, view=lowering.view, split=given, machine=lowering.machine)


def _localized(ruled: Ruled, strict: bool, split: Mapping[str, Dim] | None) -> LocalParts:
    """The kernel's parts in local view. Every round keeps more dims whole, so there are at most as many as dims."""
    whole = dict(ruled.whole)
    while True:
        part = verified(decide(ruled, whole, strict=strict, split=split))
        parts = verified(cut_up(ruled, part, whole))
        local = parts if isinstance(parts, Unsplittable) else verified(make_local(parts))
        if not isinstance(local, Unsplittable):
            return local
        new = dict.fromkeys(local.factor.dims, local.reason)
        if new.keys() <= whole.keys():
            refuse(f"kernel {ruled.kernel.name!r} can't be lowered", why=local.reason, fix="simplify the kernel")
        whole |= new


Record = TypeVar("Record")


def verified(record: Record) -> Record:
    """The record, of which all holds that its stage promises. Raises a VerificationError that lists what does not, if
    every lowering is to be checked."""
    check = _CHECKS.get(type(record))
    if check is not None and enabled():
        raise_on(list(check(record)), f"the record {type(record).__name__}")
    return record


def _annotated(record: Annotated) -> Iterator[str]:
    """Every named buffer is a parameter; ranks and axes agree."""
    for name, sharding in record.asked.items():
        if name not in record.shapes or sharding.ndim != len(record.shapes[name]) or sharding.mesh != record.mesh:
            yield f"{name} is annotated {sharding}, which is no layout of it on {record.mesh}"


def _ruled(record: Ruled) -> Iterator[str]:
    """Every access to a parameter is explained by a factor, or by data where the statement walks none, or its dim is
    marked as needing replication."""
    analysis = record.analysis
    owners: dict[tuple[str, int], str] = {}
    for factor in analysis.factors:
        for dim in factor.dims:
            if dim in owners:
                yield f"{dim[0]} dim {dim[1]} is of the factors {owners[dim]} and {factor.name}"
            owners[dim] = factor.name
    for statement in analysis.kernel.statements:
        for access in statement.accesses:
            name = access.buffer.name
            for at in range(len(access.indices)) if analysis.kernel.is_param(access.buffer) else ():
                if (name, at) in analysis.lookups:
                    continue
                if (
                    analysis.coordinates.of_access(access, at) is not None
                    or analysis.reason_whole(name, at) is not None
                ):
                    continue
                elsewhere = analysis.factor_of(name, at) in analysis.coordinates.of_statement(statement)
                if elsewhere or not loads(without_binds(access.indices[at], analysis.kernel)):
                    yield f"{name} dim {at} can be split, but index {access.indices[at]} walks no factor"


def _decided(part: Part) -> Iterator[str]:
    """An axis splits a factor that may be split, or nothing; every parameter has a placement."""
    analysis, assignment = part.analysis, part.assignment
    for axis, factor in assignment.axes.items():
        if factor is not None and (factor not in analysis.factors or factor.blocked is not None):
            yield f"axis {axis} splits {factor.name}: {factor.blocked or 'it is none of the factors'}"
    for param in analysis.kernel.params:
        if analysis.written(param) != (param in assignment.produced):
            yield f"parameter {param} is written, or is left in a layout, but not both"
        if param not in assignment.produced and param not in assignment.needed:
            yield f"parameter {param} has no placement"


def _cut(record: Parts) -> Iterator[str]:
    """No split factor's result is needed complete inside a part; what a part takes over was left by an earlier one."""
    mesh, left = record.ruled.kernel.mesh, set(record.ruled.kernel.shapes)
    for part in record.parts:
        name = function_name(part.analysis.kernel.func)
        yield from _decided(part)
        for factor, reduction in part.analysis.reductions.items():
            if reduction.cut is not None and any(mesh.size(axis) > 1 for axis in part.assignment.axes_of(factor)):
                yield f"kernel {name} needs what is reduced over {factor.name} in the middle"
        yield from (f"kernel {name} takes {p}, which nothing left" for p in part.assignment.needed if p not in left)
        left.update(part.assignment.produced)


def _local(record: LocalParts) -> Iterator[str]:
    """No access leaves its tile; no global extent bounds a loop over a split factor."""
    kernel = record.cut.ruled.kernel
    for local in record.parts:
        for problem in _of_part(_Made(local.func, local, kernel.mesh, kernel.reading.over_tiles)):
            yield f"{function_name(local.func)}: {problem}"


@dataclass(frozen=True)
class _Made:
    """A part in local view; two with the same function were made of the same choice."""

    func: tirx.PrimFunc
    local: LocalPart = field(compare=False)
    mesh: Mesh = field(compare=False)
    over_tiles: bool = field(compare=False)


@made_once(ANALYSES)
def _of_part(made: _Made) -> list[str]:
    local, over_tiles = made.local, made.over_tiles
    known = local.part.analysis, local.part.assignment, made.mesh
    return local_problems(made.func, *known, over_tiles=over_tiles, axes=local.axes)


_CHECKS: dict[type, Callable[[Any], Any]] = {
    Annotated: _annotated,
    Ruled: _ruled,
    Part: _decided,
    Parts: _cut,
    LocalParts: _local,
    Lowered: explicit_problems,
}
