"""Redistribution: which collectives bring a tensor from one layout to another on its mesh, and what they move.

Every step changes the tensor inside the groups of its axes. Tiles are nested, so an axis can leave a dim alone only if
no other axis splits that dim further; where that stands in the way, devices exchange boxes directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mesh_tensor.base.collectives import BETWEEN, COLLECTIVES
from mesh_tensor.base.decisions import columns
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.sharding import Partial, Placement, Replicate, Shard, Sharding

from .boxes import ORDER, PARTIAL, WHOLE, State, boxes_of, dim_at, place_of
from .search import Search, exchange, halo


@dataclass(frozen=True)
class Move:
    """One collective: the name of its kind, and the layout after it."""

    kind: str
    axes: tuple[str, ...]
    after: Sharding
    op: str | None = None
    src_dim: int | None = None
    dst_dim: int | None = None


@dataclass(frozen=True)
class RedistributionPlan:
    """How a tensor of `shape` goes from layout `src` to `dst`: `moves`, in order. `str()` shows it.

    >>> from mesh_tensor import Mesh
    >>> mesh = Mesh({"x": 2, "y": 2})
    >>> src, dst = (Sharding.parse(mesh, 2, text) for text in ("P[sum], S[0]", "S[1], S[0]"))
    >>> print(RedistributionPlan.make((8, 8), "float32", 4, src, dst))
    (8, 8) float32, 'P[sum], S[0]' -> 'S[1], S[0]' on Mesh({"x": 2, "y": 2}): 64 bytes per device
      step                 over  layout after  bytes per device
      reduce_scatter(sum)  x     S[1], S[0]    64
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    src: Sharding
    dst: Sharding
    moves: tuple[Move, ...]

    @staticmethod
    def make(shape: Sequence[int], dtype: str, itemsize: int, src: Sharding, dst: Sharding) -> RedistributionPlan:
        """The cheapest plan for a tensor of elements of `itemsize` bytes; both layouts are of one mesh and rank."""
        return RedistributionPlan(tuple(shape), dtype, itemsize, src, dst, plan_moves(src, dst, shape))

    @property
    def bytes_per_move(self) -> tuple[int, ...]:
        """What the busiest device receives, move by move."""
        befores = (self.src, *(move.after for move in self.moves))
        return tuple(
            self.itemsize * elements_received(move.kind, self.shape, before, move.after, move.axes)
            for before, move in zip(befores, self.moves, strict=False)
        )

    @property
    def bytes(self) -> int:
        """What the busiest device of every move receives, in total."""
        return sum(self.bytes_per_move)

    @property
    def stages(self) -> tuple[Sharding, ...]:
        """The layouts that fix the result's bits: between two of them at most one move reduces. From `src` to `dst`;
        only `src` where that is `dst`."""
        found, reduced, before = [self.src], False, self.src
        for move in self.moves:
            if COLLECTIVES[move.kind].reduces:
                if reduced:
                    found.append(before)
                reduced = True
            before = move.after
        return (*found, self.dst) if self.moves else (self.src,)

    def __str__(self) -> str:
        head = f"{self.shape} {self.dtype}, '{self.src}' -> '{self.dst}' on {self.src.mesh}"
        if not self.moves:
            return f"{head}: nothing to do"
        rows = [("step", "over", "layout after", "bytes per device")]
        for move, size in zip(self.moves, self.bytes_per_move, strict=True):
            kind = f"{move.kind}({move.op})" if move.op else move.kind
            rows.append((kind, ", ".join(move.axes), str(move.after), f"{size:,}"))
        return "\n".join([f"{head}: {self.bytes:,} bytes per device", *columns(rows)])


def plan_moves(src: Sharding, dst: Sharding, shape: Sequence[int]) -> tuple[Move, ...]:
    """The moves that turn layout `src` into `dst` with the fewest bytes, then the fewest collectives, then the fewest
    messages. They never receive more than gathering everything and slicing would."""
    if (src.mesh, src.ndim) != (dst.mesh, dst.ndim):
        refuse(
            f"no redistribution leads from {src!r} to {dst!r}",
            why="they are not layouts of one tensor on one mesh",
            fix="make both shardings on the tensor's mesh, for its number of dims",
        )
    assert not src.windows, f"nothing leads from windows: {src}"
    if src == dst:
        return ()
    if src.blocks:
        return _from_blocks(src, dst, tuple(shape))
    return _to_parts(src, dst, tuple(shape)) if dst.windows or dst.blocks else _planned(src, dst, tuple(shape))


def _from_blocks(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> tuple[Move, ...]:
    """What is partial is completed as it lies; then every device gets its part from whoever has it."""
    ending = [(axis, op) for axis, op in src.partial if dst.partial_op(axis) != op]
    kept = tuple([pair for pair in src.partial if pair not in ending])
    now, moves = src, list[Move]()
    if ending:
        now = Sharding(src.mesh, src.ndim, src.dims, kept, (), src.blocks)
        moves.append(Move(BETWEEN[Partial, Replicate].name, tuple([axis for axis, _ in ending]), now, ending[0][1]))
    if now == dst:
        return tuple(moves)
    there = Sharding(dst.mesh, dst.ndim, dst.dims, kept, dst.windows, dst.blocks)
    moves.append(direct_move(now, there))
    if there != dst:
        joining = tuple([axis for axis, _ in dst.partial if (axis, dst.partial_op(axis)) not in kept])
        moves.append(Move(BETWEEN[Replicate, Partial].name, joining, dst, dst.partial[0][1]))
    return tuple(moves)


def _to_parts(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> tuple[Move, ...]:
    """What is partial is completed in tiles first, those that there are where all get the same window; then every
    device gets its window, or its blocks, from whoever has them."""
    alike = not dst.partial and not dst.blocks and not any(window.stride for _, window in dst.windows)
    tiles = src.complete if alike else dst.plain
    moves = _planned(src, tiles, shape) if src.partial != dst.partial else ()
    return (*moves, direct_move(moves[-1].after if moves else src, dst))


@lru_cache(maxsize=4096)
def _planned(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> tuple[Move, ...]:
    src.tile_shape(shape)  # refuses a shape of another rank
    kept = frozenset(axis for axis, op in src.partial if dst.partial_op(axis) == op)
    joining = tuple(axis for axis, _ in dst.partial if axis not in kept)
    start = _state(src, whole=kept)  # whatever is done is done to every kept axis' parts alike
    goal = _state(dst, whole=kept.union(joining))
    edges = Search(boxes_of(src.mesh, shape), start, goal).path()
    op = src.partial[0][1] if src.partial else None
    names, moves, before = src.mesh.axis_names, [], src
    for edge in edges:
        axes = tuple(names[axis] for axis in edge.axes)
        before = _apply(before, axes, edge.after)
        reduced = op if COLLECTIVES[edge.kind].reduces else None
        moves.append(Move(edge.kind, axes, before, reduced, edge.src_dim, edge.dst_dim))
    if joining:
        moves.append(Move(BETWEEN[Replicate, Partial].name, joining, dst, dst.partial[0][1]))
    return tuple(moves)


def elements_received(kind: str, shape: Sequence[int], before: Sharding, after: Sharding, axes: Sequence[str]) -> int:
    """The elements that the busiest device receives in one collective over `axes`. Padding is not sent, except that
    reductions are counted over whole tiles."""
    return _elements_received(kind, tuple(shape), before, after, tuple(axes))


@lru_cache(maxsize=4096)
def _elements_received(
    kind: str, shape: tuple[int, ...], before: Sharding, after: Sharding, axes: tuple[str, ...]
) -> int:
    numbers = [before.mesh.axis_names.index(axis) for axis in axes]
    boxes = boxes_of(before.mesh, shape, after.windows, before.blocks, after.blocks)
    return boxes.received(COLLECTIVES[kind], _state(before), _state(after), numbers)


def direct_move(before: Sharding, after: Sharding) -> Move:
    """The direct way between two layouts that differ in nothing partial."""
    if after.windows or before.blocks or after.blocks:
        of_parts = [*after.windows, *before.blocks, *after.blocks]
        edge = halo(_state(before), _state(after), {dim for dim, _ in of_parts})
    else:
        edge = exchange(boxes_of(before.mesh, (1,) * before.ndim), _state(before), _state(after))
    return Move(edge.kind, tuple(before.mesh.axis_names[axis] for axis in edge.axes), after)


def illegal_move(src: Sharding, move: Move) -> list[str]:
    """Why a collective can't make `move.after` of `src` inside the groups of its axes; nothing if it can."""
    after, kind = move.after, COLLECTIVES.get(move.kind)
    if kind is None:
        return [f"there is no such collective; use one of {listing(tuple(COLLECTIVES))}"]
    found = [] if move.axes else ["it is over no axis"]
    found += [
        f"axis {axis} changes from {src.placement(axis)} to {after.placement(axis)}"
        for axis in src.mesh
        if axis not in move.axes and _alone(src.placement(axis)) != _alone(after.placement(axis))
    ]
    for place, (mine, its) in enumerate(zip(src.dims, after.dims, strict=True)):
        if [axis for axis in mine if axis not in move.axes] != [axis for axis in its if axis not in move.axes]:
            found.append(f"dim {place} is split by {mine} before, and by {its} after it")
    if kind.is_direct:
        return found + _illegal_direct_move(src, move)
    expected = kind.placements(move.op, move.src_dim, move.dst_dim)
    for axis in move.axes:
        before, now = _alone(src.placement(axis)), _alone(after.placement(axis))
        if (before, now) != expected:
            found.append(f"axis {axis} goes from {before} to {now}, and not from {expected[0]} to {expected[1]}")
    for layout, dim in ((src, move.src_dim), (after, move.dst_dim)):
        if dim is not None and layout.dims[dim][-len(move.axes) :] != move.axes:
            found.append(f"axes {move.axes} are not the innermost of dim {dim} in {layout}")
    return found


def _illegal_direct_move(src: Sharding, move: Move) -> list[str]:
    """Boxes go where they are needed: over all the axes that this takes, and as they are."""
    if src.partial != move.after.partial:
        return [f"it goes from {src} to {move.after}, which changes what is partial"]
    expected = direct_move(src, move.after)
    if (move.kind, move.axes) != (expected.kind, expected.axes):
        return [f"from {src} to {move.after} leads the {expected.kind} over {', '.join(expected.axes)}"]
    return []


@lru_cache(maxsize=4096)
def _state(sharding: Sharding, whole: frozenset[str] = frozenset()) -> State:
    """The search's state; the axes `whole` count as replicated."""
    return tuple(
        place_of(p.dim, p.minor)
        if isinstance(p, Shard)
        else WHOLE
        if isinstance(p, Replicate) or axis in whole
        else PARTIAL
        for axis, p in sharding.placements().items()
    )


def _apply(before: Sharding, axes: tuple[str, ...], after: State) -> Sharding:
    new: dict[str, Placement] = {}
    for axis, place in zip(before.mesh, after, strict=True):
        if place >= 0:
            new[axis] = Shard(dim_at(place), place // ORDER)
        elif axis in axes:
            new[axis] = Replicate()
    return Sharding.of(before.mesh, before.ndim, before.placements() | new)


def _alone(placement: Placement) -> Placement:
    """What an axis does, whatever splits the dim before it."""
    return Shard(placement.dim) if isinstance(placement, Shard) else placement
