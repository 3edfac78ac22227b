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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.plan.tir_rule import Sizes
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.tir.grids import grids_of

from .decide import decide, split_at
from .grids import LoweredGrids, lower_grids
from .layouts import Lowered, explicit
from .localize import make_local
from .original_dims import rule
from .parts import cut_up
from .read import read
from .stages import LocalParts, Ruled, Unsplittable
from .verify_stages import verified

__all__ = ["Lowered", "lower_kernel"]


def lower_kernel(
    func: tirx.PrimFunc,
    *,
    strict: bool = False,
    view: str = "auto",
    split: Mapping[str, Dim] | None = None,
    machine: Machine | None = None,
) -> Lowered | LoweredGrids:
    """Lower an annotated kernel, written over whole tensors or over tiles (`view`: auto, global, local); or several in
    one function, which run one after the other.

    `split`: what the axes split of a single kernel, if that was decided before: axis -> a dim that the factor walks;
    the other axes split nothing. `machine`: what is cheap on it, else; None: on this project's CPU ranks.

    Raises:
        MeshTensorError: no or invalid annotations, no TileLang kernel, or, with `strict`, layouts that need a gather.
    """
    grids = grids_of(check_kernel(func))
    if len(grids.funcs) > 1:
        return lower_grids(func, grids, partial(_lower_one, strict=strict, view=view, split=None, machine=machine))
    return _lower_one(func, strict=strict, view=view, split=split, machine=machine)


def _lower_one(
    func: tirx.PrimFunc, *, strict: bool, view: str, split: Mapping[str, Dim] | None, machine: Machine | None
) -> Lowered:
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
        """The kernel, lowered with that split, or with the one that costs least."""
        given = None if split is None else dict(split)
        return lower_kernel(func, strict=strict, view=self.view, split=given, machine=self.machine)

    def splits(self, func: tirx.PrimFunc, strict: bool) -> Callable[[Sizes], tuple[tuple[str, Dim], ...]]:
        """What costs least, by the sizes of symbols; of several kernels in one function it is decided once."""
        if len(grids_of(func).funcs) > 1:
            return lambda sizes: ()
        ruled = verified(rule(verified(read(func, self.view, self.machine))))
        return lambda sizes: tuple(split_at(ruled, sizes, strict=strict).items())


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
