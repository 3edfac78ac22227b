"""Which view a kernel is written in: over whole tensors, or, with `get_tile_shape` sizing its grid, over tiles
already."""

from __future__ import annotations

from tvm import arith, tirx

from ..errors import refuse
from ..frontend import TILES_ATTR
from ..rules.coverage import why_not_covered
from ..rules.other_dims import reshaped
from ..rules.reader import read_kernel
from ..rules.statements import Access, Kernel, Statement, buffer_params
from ..sharding import Sharding
from .rewrite import exchange_buffers

VIEWS = ("auto", "global", "local")


def is_local_view(func: tirx.PrimFunc, asked: dict[str, Sharding], view: str) -> bool:
    """Whether the kernel walks tiles.

    With `view="auto"`, a kernel that asked for tile shapes and whose loops walk the split dims' tiles from end to end,
    and none of the whole dims, is written over tiles. Where they walk both (a block as large as the dim), both views
    mean the same.

    Raises:
        MeshTensorError: `view` is unknown, or some split dims are walked tile by tile and others are not.
    """
    if view not in VIEWS:
        refuse(f"view {view!r} is unknown", fix=f"use one of {', '.join(VIEWS)}")
    asked_for_tiles = func.attrs is not None and TILES_ATTR in func.attrs
    if view == "global" or (view == "auto" and not asked_for_tiles):
        return False
    kernel = read_kernel(func)
    walked: dict[str, list[str]] = {"whole": [], "tile": [], "neither": []}
    for statement in kernel.statements:
        for access in statement.accesses:
            sharding = asked.get(access.buffer.name)
            if sharding is not None and kernel.is_param(access.buffer):
                _note(access, statement, sharding, kernel, walked)
    if view == "auto" and not walked["tile"]:
        return False
    others = list(dict.fromkeys([*walked["whole"], *walked["neither"]]))
    if others:
        tiled = ", ".join(dict.fromkeys(walked["tile"])) or "none"
        refuse(
            f"dims walked tile by tile: {tiled}; walked otherwise: {', '.join(others)}",
            why="a kernel is written over whole tensors, or over the tiles of all split dims (get_tile_shape)",
            fix="size all loops over split dims the same way, or say view='global'",
        )
    return True


def _note(
    access: Access, statement: Statement, sharding: Sharding, kernel: Kernel, walked: dict[str, list[str]]
) -> None:
    tile_shape = sharding.tile_shape(tuple(access.buffer.shape))
    for dim, (size, tile) in enumerate(zip(access.buffer.shape, tile_shape, strict=True)):
        if sharding.num_shards(dim) == 1:
            continue
        whole = why_not_covered(access.forms[dim], size, statement, kernel.analyzer) is None
        tiled = why_not_covered(access.forms[dim], tile, statement, kernel.analyzer) is None
        if not (whole and tiled):
            walked["whole" if whole else "tile" if tiled else "neither"].append(f"{access.buffer.name}[{dim}]")


def over_tiles(func: tirx.PrimFunc, asked: dict[str, Sharding]) -> tirx.PrimFunc:
    """The function with its annotated parameters as tiles."""
    analyzer = arith.Analyzer()
    mapping = {}
    for name, buffer in buffer_params(func).items():
        if name in asked:
            tile = asked[name].tile_shape(tuple(buffer.shape))
            mapping[buffer] = reshaped(
                buffer, [analyzer.simplify(s) if isinstance(s, tirx.PrimExpr) else s for s in tile]
            )
    buffer_map = {p: mapping.get(b, b) for p, b in func.buffer_map.items()}
    return tirx.PrimFunc(func.params, exchange_buffers(func.body, mapping), func.ret_type, buffer_map)


def check_local_layouts(name: str, layouts: dict[str, Sharding], asked: dict[str, Sharding]) -> None:
    """A kernel over tiles reads its tiles as they lie: nothing can be gathered before it.

    Raises:
        MeshTensorError: lists the buffers that the kernel uses in another layout than annotated.
    """
    problems = [
        f"buffer {param!r} is annotated '{asked[param]}', but the kernel uses it as '{layout}'"
        for param, layout in layouts.items()
        if param in asked and any(layout.dim_of(a) != asked[param].dim_of(a) for a in layout.mesh.axis_names)
    ]
    if problems:
        refuse(
            problems,
            where=f"kernel {name!r}, written over tiles",
            fix="annotate what the kernel does, or write it over whole tensors",
        )
