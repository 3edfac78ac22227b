"""What the passes of the lowering hand on to each other: one frozen record per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm import tirx

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment
from mesh_tensor.plan.prices import PRICES, Prices
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.kernel.factors import Factor
from mesh_tensor.rules.kernel.granularity import Refined
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Loop

from .splits import Split
from .view import Reading

#: Sizes of dims, symbolic ones too.
Shape = tuple[tirx.PrimExpr, ...]


@dataclass(frozen=True, eq=False)
class Annotated:
    """A kernel as it is stated: `func` is normalized, and over tiles if `reading` says that it was written so. `asked`
    are the annotated layouts of its parameters, `shapes` those of the whole tensors; `prices` is what it is decided
    by."""

    name: str
    mesh: Mesh
    func: tirx.PrimFunc
    asked: Mapping[str, Sharding]
    shapes: Mapping[str, Shape]
    reading: Reading
    prices: Prices = PRICES


@dataclass(frozen=True, eq=False)
class Ruled:
    """The kernel with its sharding rule: `analysis` is of `refined`, in which dims may be taken apart, and so is
    `asked`. `whole`: dims that no axis may split, whatever the rule says, with the reason."""

    kernel: Annotated
    refined: Refined
    analysis: Analysis
    asked: Mapping[str, Sharding]
    whole: Mapping[Dim, str]


@dataclass(frozen=True, eq=False)
class HandedOn:
    """The loops that carry what a workspace holds, and the axes that split them."""

    loops: tuple[Loop, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """A kernel of its own, and what every axis splits of it. `handed_on`: the workspaces that it may have of which
    every device has its own place of the first dim, while axes split the loops that carry what is in them."""

    analysis: Analysis
    assignment: Assignment
    handed_on: Mapping[str, HandedOn] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Parts:
    """The kernel, cut where collectives go: its parts in order, and the global shapes of its parameters and of the
    workspaces between the parts. `decided`: what every axis splits of the kernel as its author sees it."""

    ruled: Ruled
    decided: Assignment
    parts: tuple[Part, ...]
    shapes: Mapping[str, Shape]


@dataclass(frozen=True, eq=False)
class LocalPart:
    """A part in local view: the kernel that one device runs, the axes whose coordinates it takes, and the splits that
    it was made with."""

    part: Part
    func: tirx.PrimFunc
    axes: tuple[str, ...]
    splits: tuple[Split, ...]


@dataclass(frozen=True, eq=False)
class LocalParts:
    """All parts in local view."""

    cut: Parts
    parts: tuple[LocalPart, ...]


@dataclass(frozen=True, eq=False)
class Unsplittable:
    """What a pass found out of a factor that an axis was to split: it can't, for this reason."""

    factor: Factor
    reason: str
