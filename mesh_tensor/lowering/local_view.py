"""A kernel in local view: its tensors, each in one layout, its kernels and collectives in order; and what was decided,
for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import tirx

from mesh_tensor.base.decisions import Decisions, columns
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment
from mesh_tensor.redistribution.plan import Move
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.kernel.factors import Factor, tile_extent
from mesh_tensor.rules.kernel.sharding_rule import Analysis, ShardingRule
from mesh_tensor.tir.nodes import int_or

from .splits import Split
from .view import Reading


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor in one layout. `shape` is global (symbolic sizes stay so). Tensors with the same `storage` share
    memory."""

    name: str
    shape: tuple[tirx.PrimExpr, ...]
    dtype: str
    sharding: Sharding
    storage: str


@dataclass(frozen=True, eq=False)
class LocalKernel:
    """A local kernel: buffer parameters get the tensors `args`, then come scalars, then the coordinates on `axes`.

    `splits`: what it was made with. `written_locally`: its author wrote it over tiles. `refined`: `analysis` is of
    parameters with dims taken apart."""

    func: tirx.PrimFunc
    args: tuple[str, ...]
    axes: tuple[str, ...]
    writes: tuple[str, ...]
    analysis: Analysis
    assignment: Assignment
    splits: tuple[Split, ...]
    written_locally: bool = False
    refined: bool = False

    makes = ()

    @property
    def uses(self) -> tuple[str, ...]:
        """The tensors that it reads and writes."""
        return self.args

    def renamed(self, names: Mapping[str, str]) -> LocalKernel:
        """The same on tensors of other names."""
        args, writes = tuple(names[arg] for arg in self.args), tuple(names[arg] for arg in self.writes)
        return replace(self, args=args, writes=writes)


@dataclass(frozen=True, eq=False)
class Collective:
    """A layout change of one tensor: `move` turns `src` into `dst`."""

    move: Move
    src: str
    dst: str
    reason: str

    axes = makes = ()

    @property
    def uses(self) -> tuple[str, ...]:
        """The tensors that it reads and writes."""
        return (self.src, self.dst)

    def renamed(self, names: Mapping[str, str]) -> Collective:
        """The same on tensors of other names."""
        return replace(self, src=names[self.src], dst=names[self.dst])


@dataclass(frozen=True, eq=False)
class LocalView(ABC):
    """What a device runs, and what its Program is made of: `steps` run in order over `tensors`; `parameters` are the
    function's own, in order, each with the tensor it comes in (None if only written) and the one it leaves in (None if
    only read). Of those `kept`, nothing looks at what comes in, but some of it may stay."""

    name: str
    mesh: Mesh
    parameters: tuple[tuple[str, str | None, str | None], ...]
    scalars: tuple[tirx.Var, ...]
    tensors: Mapping[str, Tensor]
    steps: tuple[LocalKernel | Collective, ...]
    asked: Mapping[str, Sharding]
    kept: frozenset[str]

    @property
    def kernels(self) -> tuple[LocalKernel, ...]:
        """The steps that run kernels."""
        return tuple(step for step in self.steps if isinstance(step, LocalKernel))

    @abstractmethod
    def decisions(self) -> Decisions:
        """What was decided, for people."""


@dataclass(frozen=True, eq=False)
class Lowered(LocalView):
    """A kernel in local view. `reading`: in which view it was written."""

    func: tirx.PrimFunc
    rule: ShardingRule
    assignment: Assignment
    whole: Mapping[Dim, str]
    reading: Reading

    def decisions(self) -> Decisions:
        """What was decided, for people."""
        return decisions_of(self)


def decisions_of(lowered: Lowered) -> Decisions:
    """In which view the kernel was read and why; factors and what splits them; what could not be split."""
    head = (f"kernel {lowered.name} on {lowered.mesh}", f"rule: {lowered.rule}", str(lowered.reading))
    whole = [f"  {buffer} dim {dim}: {reason}" for (buffer, dim), reason in lowered.whole.items()]
    notes = (("asked to be split, but needed whole", *whole),) if whole else ()
    return Decisions(head, (("factors", *_factors(lowered)),), notes, asked=lowered.asked)


def _factors(lowered: Lowered) -> list[str]:
    rows: list[tuple[object, ...]] = [("factor", "size", "combines", "split by", "tile", "because")]
    assignment = lowered.assignment
    by_name = {factor.name: factor for factor in assignment.factors}
    for name, kind in lowered.rule.factors.items():
        axes = assignment.axes_of(by_name[name])
        size = _whole_size(lowered, by_name[name])
        tile = tile_extent(size, [lowered.mesh.size(a) for a in axes])
        why = "; ".join(dict.fromkeys(assignment.reasons[a] for a in axes)) or "no axis uses it"
        rows.append((name, int_or(size, size), kind.split(":")[0], ", ".join(axes) or "-", int_or(tile, tile), why))
    unused = [axis for axis, factor in assignment.axes.items() if factor is None]
    return [*columns(rows), *(f"  axis {axis} splits nothing: {assignment.reasons[axis]}" for axis in unused)]


def _whole_size(lowered: Lowered, factor: Factor) -> tirx.PrimExpr:
    """The size of the dim that a factor walks, or walks a tile of."""
    if not lowered.reading.over_tiles:
        return factor.size
    tensors = {name: given or left for name, given, left in lowered.parameters}
    param, dim = factor.dims[0]
    tensor = tensors.get(param)
    return factor.size if tensor is None else lowered.tensors[tensor].shape[dim]
