"""A kernel in local view: its tensors, each in one layout, its kernels and collectives in order; and what was decided,
for people. `local_parts` makes every part of a kernel the one that a single device runs, with its splits.

What is written depends on what the axes split, not on the layouts that were asked for: it is written once for all that
come to the same (`_Choice`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tvm import tirx

from mesh_tensor.base.decisions import Decisions, columns
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import made_once
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment
from mesh_tensor.redistribution.plan import Move
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.kernel.factors import Blocked, Factor, tile_extent
from mesh_tensor.rules.kernel.normalize import ANALYSES
from mesh_tensor.rules.kernel.padded_blocks import widen
from mesh_tensor.rules.kernel.sharding_rule import Analysis, ShardingRule
from mesh_tensor.tir.nodes import int_or

from .localize import localize
from .original_dims import put_together, uneven_groups
from .parts import global_size
from .splits import DeviceCoordinates, Split, make_split
from .stages import LocalPart, LocalParts, Part, Parts, Unsplittable
from .view import Reading, check_local_layouts


def make_local(cut: Parts) -> LocalParts | Unsplittable:
    """The parts in local view. Refused where a kernel over tiles would need them in another layout, or nothing is split
    and the kernel can't be written all the same."""
    kernel, made = cut.ruled.kernel, []
    for index, part in enumerate(cut.parts):
        if kernel.reading.over_tiles:
            check_local_layouts(kernel.name, part.assignment, kernel.asked)
        local = _local_part(cut, part, f"{kernel.name}_{index}" if len(cut.parts) > 1 else kernel.name)
        if isinstance(local, Unsplittable):
            return local
        made.append(local)
    return LocalParts(cut, tuple(made))


def _local_part(cut: Parts, part: Part, name: str) -> LocalPart | Unsplittable:
    mesh, needed = cut.ruled.kernel.mesh, {} if cut.ruled.kernel.reading.over_tiles else part.assignment.needed
    decided = tuple(part.assignment.axes.items()), tuple(part.assignment.blocks.items()), tuple(needed.items())
    made = _written(_Choice(part.analysis, mesh, *decided, name, cut))
    return made if isinstance(made, Unsplittable) else LocalPart(part, *made)


@dataclass(frozen=True)
class _Choice:
    """What a part in local view depends on: what axes split of which analysis, in tiles of which whole blocks, and the
    layouts of what it takes. The `cut` that it is of goes with the analysis."""

    analysis: Analysis
    mesh: Mesh
    axes: tuple[tuple[str, Factor | None], ...]
    blocks: tuple[tuple[Factor, int], ...]
    needed: tuple[tuple[str, Sharding], ...]
    name: str
    cut: Parts = field(compare=False)


@made_once(ANALYSES)
def _written(choice: _Choice) -> tuple[tirx.PrimFunc, tuple[str, ...], tuple[Split, ...]] | Unsplittable:
    """The local kernel, the axes that it wants to know, and its splits: the same ones for all layouts for which the
    axes split the same."""
    ruled, analysis = choice.cut.ruled, choice.analysis
    coordinates = DeviceCoordinates(choice.mesh)
    splits = _splits(choice, coordinates)
    for split in splits:
        if why := uneven_groups(ruled.refined, analysis, split):
            return Unsplittable(split.factor, why)
    try:
        local, axes = localize(analysis, splits, coordinates, choice.name, dict(choice.needed))
        return widen(put_together(local, ruled.refined), analysis.kernel.func), axes, splits
    except Blocked as error:
        if not splits:
            refuse(f"kernel {ruled.kernel.name!r} can't be lowered", why=str(error), fix="simplify the kernel")
        return Unsplittable(error.factor or splits[-1].factor, str(error))


def _splits(choice: _Choice, coordinates: DeviceCoordinates) -> tuple[Split, ...]:
    analyzer, over_tiles = choice.analysis.kernel.analyzer, choice.cut.ruled.kernel.reading.over_tiles
    blocks = dict(choice.blocks)
    return tuple(
        make_split(
            factor,
            axes,
            coordinates,
            analyzer,
            global_size(factor, choice.cut.shapes),
            over_tiles,
            blocks.get(factor, 1),
        )
        for factor in choice.analysis.factors
        if (axes := tuple(axis for axis, split in choice.axes if split is factor))
    )


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


@dataclass(frozen=True)
class InTurns:
    """A loop of which the devices along `axes` make `states` one after the other, the last one first if `backward`."""

    loop: str
    states: tuple[str, ...]
    axes: tuple[str, ...]
    backward: bool

    def __str__(self) -> str:
        states, axes = ", ".join(self.states), ", ".join(self.axes)
        first, next_ = ("last", "before") if self.backward else ("first", "after")
        return (
            f"along {axes}, from the {first} device on, each makes {states} in its part of loop {self.loop} and hands"
            f" on how that ends to the one {next_} it, which waits for it; all else in the loop all devices do at once"
        )


@dataclass(frozen=True, eq=False)
class Lowered(LocalView):
    """A kernel in local view. `reading`: in which view it was written; `in_turns`: what devices wait for."""

    func: tirx.PrimFunc
    rule: ShardingRule
    assignment: Assignment
    whole: Mapping[Dim, str]
    reading: Reading
    in_turns: tuple[InTurns, ...]

    def decisions(self) -> Decisions:
        """What was decided, for people."""
        return decisions_of(self)


def decisions_of(lowered: Lowered) -> Decisions:
    """In which view the kernel was read and why; factors and what splits them; what devices take turns for; what could
    not be split."""
    head = (f"kernel {lowered.name} on {lowered.mesh}", f"rule: {lowered.rule}", str(lowered.reading))
    whole = [f"  {buffer} dim {dim}: {reason}" for (buffer, dim), reason in lowered.whole.items()]
    notes = (("asked to be split, but needed whole", *whole),) if whole else ()
    turns = (("devices take turns", *(f"  {loop}" for loop in lowered.in_turns)),) if lowered.in_turns else ()
    return Decisions(head, (("factors", *_factors(lowered)), *turns), notes, asked=lowered.asked)


def _factors(lowered: Lowered) -> list[str]:
    rows: list[tuple[object, ...]] = [("factor", "size", "combines", "split by", "tile", "because")]
    assignment = lowered.assignment
    by_name = {factor.name: factor for factor in assignment.factors}
    for name, kind in lowered.rule.factors.items():
        axes = assignment.axes_of(by_name[name])
        size = _whole_size(lowered, by_name[name])
        parts = [lowered.mesh.size(axis) for axis in axes]
        tile = tile_extent(assignment.walked(by_name[name], parts, size), parts)
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
