"""In which order the programs of a grid, and the steps of a loop, go through the blocks of a dim."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from .scene import Scene

GRIDS = (
    "plain",
    "plain",
    "plain",
    "reversed grid",
    "fused grid",
    "grouped grid",
    "persistent grid",
    "one program",
    "shuffled grid",
)
LOOPS = (
    *["serial"] * 6,
    "pipelined",
    "reversed",
    "reversed",
    "rotated",
    "shuffled",
    "halves",
    "causal",
    "from the row on",
    "rotated from the row",
    "back from the row",
    "on from the row",
    "named by a table",
    "between numbers of a table",
    "unrolled",
    "downwards",
    "every other",
    "not from the start",
)


@contextmanager
def grid(scene: Scene, dims: str) -> Iterator[None]:
    """A grid over the blocks of some dims; what is emitted inside is one program's."""
    kind = scene.kind(GRIDS)
    sizes = {d: scene.dims[d].blocks for d in dims}
    buffers, scene.buffers = scene.buffers, []
    outer, scene.lines = scene.lines, []
    inner: list[str] = []
    if not dims:
        extents, names = ["1"], ["bx"]
    elif kind == "one program":
        extents, names = ["1"], ["bx"]
        inner = [f"for s{d} in T.serial({sizes[d]})" for d in dims]
        scene.places = {d: f"s{d}" for d in dims}
    elif kind == "fused grid" and len(dims) == 2:
        extents, names = [str(math.prod(sizes.values()))], ["pid"]
        scene.places = _apart(dims, sizes, "pid")
    elif kind == "grouped grid" and len(dims) == 2:
        extents, names = [str(math.prod(sizes.values()))], ["pid"]
        scene.places = _grouped(scene, dims, sizes)
    elif kind == "persistent grid":
        blocks, programs = math.prod(sizes.values()), scene.number(1, 4)
        extents, names = [str(programs)], ["pid"]
        place = scene.pick((f"(wave * {programs} + pid)", f"(pid * {-(-blocks // programs)} + wave)"))
        inner = [f"for wave in T.serial({-(-blocks // programs)})", f"if {place} < {blocks}"]
        if scene.chance(50):
            scene.emit(f"index = {place}")
            inner[1], place = f"if index < {blocks}", "index"
        scene.places = _apart(dims, sizes, place)
    else:
        extents, names = [str(sizes[d]) for d in dims], [f"b{d}" for d in dims]
        scene.places = {d: _place(scene, kind, f"b{d}", sizes[d]) for d in dims}
    let, scene.lines = scene.lines, []
    yield
    body, scene.lines = scene.lines, []
    variables = names[0] if len(names) == 1 else f"({', '.join(names)})"
    with scene.block(f"with T.Kernel({', '.join(extents)}, threads=32) as {variables}"):
        scene.emit(*(buffer.declared() for buffer in scene.buffers))
        if let and inner:
            with scene.block(inner[0]):
                scene.lines += let
                with scene.block(*inner[1:]):
                    scene.lines += body
        elif inner:
            with scene.block(*inner):
                scene.lines += body
        else:
            scene.lines += let + body
    scene.lines, scene.buffers = outer + scene.lines, buffers
    scene.places = {}


def _place(scene: Scene, kind: str, var: str, blocks: int) -> str:
    if kind == "reversed grid" and blocks > 1:
        return f"({blocks - 1} - {var})"
    if kind == "shuffled grid" and blocks > 1:
        step = scene.pick([n for n in range(1, blocks + 1) if math.gcd(n, blocks) == 1])
        return f"(({var} * {step} + {scene.number(0, blocks - 1)}) % {blocks})"
    return var


def _apart(dims: str, sizes: dict[str, int], index: str) -> dict[str, str]:
    if len(dims) == 1:
        return {dims: index}
    last = sizes[dims[1]]
    return {dims[0]: f"({index} // {last})", dims[1]: f"({index} % {last})"}


def _grouped(scene: Scene, dims: str, sizes: dict[str, int]) -> dict[str, str]:
    rows, columns = sizes[dims[0]], sizes[dims[1]]
    group = scene.number(2, 3)
    scene.emit(
        f"first = pid // {group * columns} * {group}",
        f"height = T.min({rows} - first, {group})",
        f"row = first + pid % {group * columns} % height",
        f"column = pid % {group * columns} // height",
    )
    return {dims[0]: "row", dims[1]: "column"}


@contextmanager
def walk(scene: Scene, dim: str) -> Iterator[str]:
    """A loop over the blocks of a dim; its kind is given."""
    kind = scene.kind(LOOPS)
    blocks, var = scene.dims[dim].blocks, scene.name("ko")
    size, block = scene.dims[dim].size, scene.dims[dim].block
    count = scene.pick((str(blocks), f"T.ceildiv({size}, {block})"))
    place, headers = var, [f"for {var} in T.serial({count})"]
    row = scene.places.get("m", "")
    if kind == "pipelined":
        headers = [f"for {var} in T.Pipelined({count}, num_stages=2)"]
    elif kind in ("reversed", "rotated", "shuffled"):
        place = _turned(scene, kind, var, blocks)
    elif kind == "halves":
        headers = [f"for {var} in T.serial({-(-blocks // 2)})", f"for {var}h in T.serial(2)"]
        place = f"({var} * 2 + {var}h)"
        if blocks % 2:
            headers.append(f"if {place} < {blocks}")
    elif kind == "causal" and row:
        headers = scene.pick(
            (
                [f"for {var} in T.serial(T.min({row} + 1, {blocks}))"],
                [f"for {var} in T.serial({blocks})", f"if {var} <= {row}"],
                [f"for {var} in T.serial(T.min({row}, {blocks}))"],
            )
        )
    elif kind == "from the row on" and row:
        headers = scene.pick(
            ([f"for {var} in T.serial({row}, {blocks})"], [f"for {var} in T.serial({blocks})", f"if {var} >= {row}"])
        )
    elif kind == "rotated from the row" and row:
        place = f"(({var} + {row}) % {blocks})"
    elif kind == "back from the row" and row:
        place, headers = f"({row} - {var})", [f"for {var} in T.serial({row} + 1)", f"if {row} - {var} < {blocks}"]
    elif kind == "on from the row" and row:
        place, headers = f"({row} + {var})", [f"for {var} in T.serial(T.max({blocks} - {row}, 0))"]
    elif kind == "named by a table":
        length = scene.number(1, blocks + 1)
        names = scene.param("blocks", [length], ["t"], "int32", below=blocks)
        place, headers = f"{names}[{var}]", [f"for {var} in T.serial({length})"]
    elif kind == "unrolled":
        headers = [f"for {var} in T.unroll({count})"]
    elif kind == "downwards":
        headers = [f"for {var} in T.serial({blocks - 1}, -1, -1)"]
    elif kind == "every other":
        headers = [f"for {var} in T.serial({scene.number(0, 1)}, {blocks}, {scene.number(2, 3)})"]
    elif kind == "not from the start":
        first = scene.number(0, blocks)
        headers = [f"for {var} in T.serial({first}, {scene.number(first, blocks)})"]
    elif kind == "between numbers of a table":
        ends = scene.param("ends", [2], ["t"], "int32", below=blocks + 1)
        headers = [f"for {var} in T.serial({scene.pick(('', '', f'{ends}[1] // 2, '))}{ends}[0])"]
    scene.places[dim] = place
    with scene.block(*headers):
        yield kind
    del scene.places[dim]


def _turned(scene: Scene, kind: str, var: str, blocks: int) -> str:
    if kind == "reversed":
        return f"({blocks - 1} - {var})"
    if kind == "rotated":
        return f"(({var} + {scene.number(0, blocks)}) % {blocks})"
    return _place(scene, "shuffled grid", var, blocks)
