"""Which view a kernel is written in: over whole tensors, or, with `get_tile_shape` sizing its grid, over tiles
already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tvm import tirx

from mesh_tensor.annotations.annotate import TILES_ATTR
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment
from mesh_tensor.rules.kernel.factors import why_not_covered
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.rules.kernel.statements import Access, Kernel, Statement, buffer_params
from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.memory import memories, named
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import exchange_buffers, reshaped
from mesh_tensor.tir.tile_position import fill, helpers_in, text_of
from mesh_tensor.tir.view_map import ViewMap

VIEWS = ("auto", "global", "local")


@dataclass(frozen=True)
class Reading:
    """How a kernel was read, and why."""

    over_tiles: bool
    why: str

    def __str__(self) -> str:
        return f"read as written over {'tiles' if self.over_tiles else 'whole tensors'}: {self.why}"


@dataclass
class _Walks:
    """The split dims that the kernel's loops walk whole, tile by tile, either way (a block as large as the dim), or
    from end to end of neither (`short`), and those that no loops walk (`otherwise`); the last two with the reason.

    `positions` are the variables of loops that walk a dim either way, `values` expressions in which one is more than an
    index: the position in a tile there, or that in the tensor."""

    whole: list[str] = field(default_factory=list)
    tile: list[str] = field(default_factory=list)
    either: list[str] = field(default_factory=list)
    short: dict[str, str] = field(default_factory=dict)
    otherwise: dict[str, str] = field(default_factory=dict)
    positions: set[tirx.Var] = field(default_factory=set)
    values: list[str] = field(default_factory=list)


def read_view(func: tirx.PrimFunc, asked: dict[str, Sharding], view: str) -> Reading:
    """Whether the kernel walks tiles.

    With `view="auto"`, a kernel that asked for tiles and whose loops walk the split dims' tiles from end to end, and
    none of the whole dims, is written over tiles. Where they walk both (a block as large as the dim), both views mean
    the same if positions are indices and nothing else; else it is written over the tiles that it asked for.

    Raises:
        MeshTensorError: `view` is unknown; some split dims are walked tile by tile and others are not; or a kernel that
            asked for tiles walks neither tiles nor whole dims from end to end, or is said to be over whole tensors.
    """
    if view not in VIEWS:
        refuse(f"view {view!r} is unknown", fix=f"use one of {', '.join(VIEWS)}")
    _check_tiles(func, asked)
    helpers = list(dict.fromkeys(str(helper) for helper in helpers_in(func.body)))
    asked_for_tiles = bool(helpers) or (func.attrs is not None and TILES_ATTR in func.attrs)
    if not asked_for_tiles and view != "local":
        return Reading(False, "it asks for no tiles" if view == "auto" else "view='global'")
    walks = _walks(func, asked)
    reading = (_global if view == "global" else _local if view == "local" else _either)(walks, helpers)
    if not reading.over_tiles and helpers:
        refuse(
            f"{', '.join(helpers)}: the kernel is {reading}",
            why="positions are those of the whole tensor there, and every device adds where its tile starts",
            fix="use the position itself, or size all loops over split dims with get_tile_shape",
        )
    return reading


def _check_tiles(func: tirx.PrimFunc, asked: dict[str, Sharding]) -> None:
    """The tiles that the author asked for are those of the annotations: a kernel may have been annotated anew."""
    tiles = func.attrs[TILES_ATTR] if func.attrs is not None and TILES_ATTR in func.attrs else {}
    analyzer, problems = Prover(), []
    for name, buffer in buffer_params(func).items():
        if buffer.data in tiles:
            now = asked[name].tile_shape(buffer.shape) if name in asked else buffer.shape
            then = tiles[buffer.data]
            if not all(analyzer.can_prove_equal(a, b) for a, b in zip(then, now, strict=True)):
                problems.append(f"get_tile_shape({name}) was {_shape(then)}, but as annotated tiles are {_shape(now)}")
    if problems:
        refuse(
            problems,
            why="a kernel over tiles is written for one mesh and its layouts",
            fix="annotate it as where it asked, or make it anew with the mesh_tensor_functions of this mesh",
        )


def _shape(shape: Sequence) -> str:
    simplify = Prover().simplify
    return " x ".join(str(simplify(size) if isinstance(size, tirx.PrimExpr) else size) for size in shape)


def _global(walks: _Walks, helpers: list[str]) -> Reading:
    tiled = list(dict.fromkeys([*walks.tile, *walks.short]))
    if tiled:
        refuse(
            f"view='global', but the kernel asks for tiles and walks no whole dims: {', '.join(tiled)}",
            why=_reasons(walks) or "its loops walk tiles, and everything past the first tile would be left out",
            fix="say view='local' (or nothing), or size its loops by the whole tensors",
        )
    return Reading(False, "view='global'")


def _local(walks: _Walks, helpers: list[str]) -> Reading:
    if walks.whole or walks.short or walks.otherwise:
        _refuse_mixed(walks)
    return Reading(True, "view='local'")


def _either(walks: _Walks, helpers: list[str]) -> Reading:
    if walks.tile:
        if walks.whole or walks.short or walks.otherwise:
            _refuse_mixed(walks)
        return Reading(True, f"it asks for tiles, and its loops walk the tiles of {', '.join(walks.tile)}")
    if walks.short or (walks.otherwise and not walks.whole):
        _refuse_mixed(walks)
    if walks.whole:
        return Reading(False, f"it asks for tiles, but its loops walk all of {', '.join(walks.whole)}")
    if helpers:
        return Reading(True, f"it asks for {helpers[0]}")
    if walks.values:
        return Reading(True, f"it asks for tiles, and positions count in {walks.values[0]}; if not, say view='global'")
    return Reading(False, "a tile is no less than what its blocks walk: both views mean the same")


def _refuse_mixed(walks: _Walks) -> NoReturn:
    others = list(dict.fromkeys([*walks.whole, *walks.short, *walks.otherwise]))
    why = "a kernel is written over whole tensors, or over the tiles of all split dims (get_tile_shape)"
    reasons = _reasons(walks)
    refuse(
        f"dims walked tile by tile: {', '.join(walks.tile) or 'none'}; walked otherwise: {', '.join(others)}",
        why=f"{why}; {reasons}" if reasons else why,
        fix="size all loops over split dims the same way, with blocks enough to cover them (T.ceildiv); a kernel over "
        "whole tensors uses no tile helpers, or says view='global'",
    )


def _reasons(walks: _Walks) -> str:
    return "; ".join({**walks.short, **walks.otherwise}.values())


def _walks(func: tirx.PrimFunc, asked: dict[str, Sharding]) -> _Walks:
    kernel, walks = read_kernel(func), _Walks()
    for statement in kernel.statements:
        for access in statement.accesses:
            sharding = asked.get(access.buffer.name)
            if sharding is not None and kernel.is_param(access.buffer):
                _note(access, statement, sharding, kernel, walks)
    for statement in kernel.statements:
        for expr in (*statement.values, *statement.conditions, *statement.bounds):
            if vars_of([expr], kernel.binds) & walks.positions:
                walks.values.append(text_of(expr))
    for names in (walks.whole, walks.tile, walks.either):
        names[:] = dict.fromkeys(names)
    return walks


def refuse_views_of_tiles(func: tirx.PrimFunc, asked: dict[str, Sharding], view: str) -> None:
    """In a kernel over tiles a view is one of the tile, whose rows are shorter than the tensor's where a dim after the
    first one is split: the same view of the tensor is not that. Refused where there are such views, by name."""
    if view == "global" or (view == "auto" and not (func.attrs is not None and TILES_ATTR in func.attrs)):
        return
    facts = [
        f"buffer {named(buffer)} is a view of {memory.owner.name!r}, whose dim {dim} is split"
        for memory in memories(func).values()
        if memory.is_param and str(memory.owner.name) in asked
        for buffer in memory.views
        for dim in ViewMap(buffer, memory.owner, Prover()).mixed_dims
        if asked[str(memory.owner.name)].num_shards(dim) > 1
    ]
    if facts:
        refuse(
            facts,
            why="the tile's rows are not the tensor's: a view of the one is none of the other",
            fix="index the parameter itself, split its first dim only, or write the kernel over whole tensors and say "
            "view='global'",
        )


def _note(access: Access, statement: Statement, sharding: Sharding, kernel: Kernel, walks: _Walks) -> None:
    tile_shape = sharding.tile_shape(tuple(access.buffer.shape))
    for dim, (size, tile) in enumerate(zip(access.buffer.shape, tile_shape, strict=True)):
        if sharding.num_shards(dim) == 1:
            continue
        name, index = f"{access.buffer.name}[{dim}]", access.forms[dim]
        form = None if index is None else Linear(index.terms)  # what is shifted is another pass's concern
        not_tile = why_not_covered(form, tile, statement, kernel.analyzer)
        whole = why_not_covered(form, size, statement, kernel.analyzer) is None
        if whole or not_tile is None:
            (walks.tile if not whole else walks.either if not_tile is None else walks.whole).append(name)
            if whole and not_tile is None and form is not None:
                walks.positions.update(form.terms)
        elif form is not None and form.terms and form.terms.keys() <= statement.vars:
            walks.short.setdefault(name, f"{name}, a tile of {tile} in a dim of {size}: {_why(form, not_tile)}")
        else:
            walks.otherwise.setdefault(name, f"{name} has index {text_of(access.indices[dim])}: {not_tile}")


def _why(form: Linear, reason: str) -> str:
    return f"{reason} (its index is {' + '.join(f'{v} * {c}' if c != 1 else v.name for v, c in form.ordered)})"


def over_tiles(func: tirx.PrimFunc, asked: dict[str, Sharding]) -> tirx.PrimFunc:
    """The function with its annotated parameters as tiles, and with what the tile helpers are worth."""
    analyzer = Prover()
    mapping = {}
    params = buffer_params(func)
    for name, buffer in params.items():
        if name in asked:
            tile = asked[name].tile_shape(tuple(buffer.shape))
            mapping[buffer] = reshaped(
                buffer, [analyzer.simplify(s) if isinstance(s, tirx.PrimExpr) else s for s in tile]
            )
    _check_helpers(func, asked)
    buffer_map = {p: mapping.get(b, b) for p, b in func.buffer_map.items()}
    body = fill(func.body, asked, {name: tuple(buffer.shape) for name, buffer in params.items()})
    return tirx.PrimFunc(func.params, exchange_buffers(body, mapping), func.ret_type, buffer_map)


def _check_helpers(func: tirx.PrimFunc, asked: dict[str, Sharding]) -> None:
    """A kernel may have been annotated anew since its author asked."""
    helpers = helpers_in(func.body)
    mesh = next(iter(asked.values())).mesh if asked else None
    problems = [f"{h}: the mesh {mesh} has no such axis" for h in helpers if h.axis and h.axis not in (mesh or ())]
    problems += [f"{h}: the buffer is not annotated" for h in helpers if h.buffer is not None and h.buffer not in asked]
    if problems:
        refuse(list(dict.fromkeys(problems)), fix="annotate the kernel for the mesh and with the buffers it asks about")


def check_local_layouts(name: str, assignment: Assignment, asked: Mapping[str, Sharding]) -> None:
    """A kernel over tiles takes and leaves its tiles as they lie: nothing can be gathered before it, or split after it.
    The refusal lists the buffers that the kernel uses in another layout than annotated."""
    for layouts in (assignment.needed, assignment.produced):
        problems = []
        for param, layout in layouts.items():
            axes = [axis for axis in layout.mesh.axis_names if layout.mesh.size(axis) > 1]
            axes = [a for a in axes if param in asked and layout.dim_of(a) != asked[param].dim_of(a)]
            if axes:
                why = "; ".join(_why_otherwise(param, asked[param].dim_of(axis), axis, assignment) for axis in axes)
                problems.append(
                    f"buffer {param!r} is annotated '{asked[param]}', but the kernel uses it as '{layout}': {why}"
                )
        if problems:
            refuse(
                problems,
                where=f"kernel {name!r}, written over tiles",
                fix="annotate what the kernel does (a buffer that is not annotated is replicated), or write it over "
                "whole tensors",
            )


def _why_otherwise(param: str, dim: int | None, axis: str, assignment: Assignment) -> str:
    """Why the axis does not split that dim: what of the kernel needs it whole, or what the axis splits instead."""
    reason = None if dim is None else assignment.whole.get((param, dim))
    if reason is not None:
        return f"dim {dim} is needed whole on axis {axis!r}: {reason}"
    factor = assignment.axes[axis]
    splits = "nothing" if factor is None else f"factor {factor.name}"
    return f"axis {axis!r} splits {splits} ({assignment.reasons[axis]})"
