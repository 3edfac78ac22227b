"""Programs that hold all of k on chip, of a block of rows: rounds of reductions that go on with what came of the last
one; constants in a buffer that holds blocks of tensors before or later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .orders import grid
from .reads import test, value
from .scene import Dim, Scene

ROUNDS = ("masked", "masked", "divided", "shifted", "in turns", "summed", "early")
USES = ("counted", "left", "left", "stored", "blocks", "whole", "asked")


@contextmanager
def _rows(scene: Scene) -> Iterator[None]:
    """A grid over blocks of m, with all of k in one block."""
    blocks = scene.dims["k"]
    with grid(scene, "m"):
        scene.dims["k"] = Dim("k", blocks.size, blocks.size)
        scene.places["k"] = "0"
        yield
    scene.dims["k"] = blocks


def rounds(scene: Scene) -> None:
    """`for r: top = reduce(x); x = f(x, top)`, with what each round leaves, or the last one, as results."""
    count, kind, op = scene.pick((1, 2, 2, 3, 4)), scene.kind(ROUNDS), scene.pick(("max", "max", "min", "sum"))
    with _rows(scene):
        x, top = scene.buffer("x", "mk"), scene.buffer("top", "m", scope="fragment")
        total = scene.buffer("total", "m", scope="fragment")
        element, of_row = scene.element(x, "mk"), scene.element(top, "m")
        text = value(scene, "mk")
        with scene.block(*scene.loops("mk")):
            scene.emit(f"{element} = {text}")
        scene.emit(f"T.clear({total})", f"T.clear({top})")
        each = ""
        if scene.chance(60):
            each = scene.param("Y", [scene.dims["m"].size, count], ["m", "round"], "float32", "out")
        with scene.block(f"for r in T.{scene.pick(('serial', 'serial', 'unroll'))}({count})"):
            if kind == "early":
                _update(scene, "shifted", element, of_row if each else scene.element(total, "m"), x)
            scene.emit(f"T.reduce_{op}({x}, {top}, dim=1)")
            _update(scene, kind, element, of_row, x)
            with scene.block(*scene.loops("m")):
                scene.emit(f"{scene.element(total, 'm')} = {scene.element(total, 'm')} * 0.5 + {of_row}")
                if each:
                    with scene.block(f"if {scene.at('m')} < {scene.dims['m'].size}"):
                        scene.emit(f"{each}[{scene.at('m')}, r] = {of_row}")
        results = [("mk", element), ("m", scene.element(total, "m"))]
        for dims, left in results if not each else [scene.pick(results)]:
            _stored(scene, dims, left)


def _update(scene: Scene, kind: str, element: str, of_row: str, x: str) -> None:
    """What a round makes of all, with what it found."""
    text = {
        "masked": f"T.if_then_else({element} == {of_row}, {scene.pick(('-8.0', '0.0'))}, {element})",
        "divided": f"{element} / (T.abs({of_row}) + 1.0)",
        "in turns": f"{element} - {of_row} * 0.5",
        "summed": f"T.max({element}, {of_row} * 0.25)",
    }.get(kind, f"{element} - {of_row}")
    if scene.twist("by round"):
        text = f'{text} * T.cast(r, "float32")'
    with scene.block(*scene.loops("mk")):
        scene.emit(f"{element} = {text}")
    if kind == "in turns":
        columns = scene.buffer("columns", "k", scope="fragment")
        scene.emit(f"T.reduce_max({x}, {columns}, dim=0)")
        with scene.block(*scene.loops("mk")):
            scene.emit(f"{element} = {element} - {scene.element(columns, 'k')} * 0.5")


def reused(scene: Scene) -> None:
    """A buffer of constants, which something is made of or nothing, and blocks of tensors in it later, or before."""
    blocks = scene.dims["k"]
    with _rows(scene):
        row, total = scene.buffer("row", "mk"), scene.buffer("total", "m", scope="fragment")
        scene.emit(f"T.fill({total}, 0.5)")
        uses = [scene.kind(USES) for _ in range(scene.pick((1, 2, 2, 3)))]
        for use in uses if uses[0] != "blocks" else ["left", *uses]:
            _use(scene, use, row, total, blocks)
        _stored(scene, "m", scene.element(total, "m"))
        if scene.chance(70):
            _stored(scene, "mk", scene.element(row, "mk"))


def _use(scene: Scene, use: str, row: str, total: str, blocks: Dim) -> None:
    element, sums = scene.element(row, "mk"), scene.element(total, "m")
    if use in ("counted", "left", "stored", "asked"):
        scene.emit(f"T.fill({row}, {scene.pick(('0.0', '0.0', '1.0', '-2.0'))})")
    elif use == "whole":
        text = value(scene, "mk")
        with scene.block(*scene.loops("mk")):
            scene.emit(f"{element} = {text}")
    else:
        _by_blocks(scene, row, blocks)
    if use == "stored":
        _stored(scene, "mk", element)
    elif use == "asked":
        with scene.block(f"if {scene.element(row, 'mk', m='0', k='0')} > 0.0"):
            scene.emit(f"T.fill({total}, 2.0)")
    elif use != "left" or scene.chance(25):
        part = scene.buffer("part", "m", scope="fragment")
        scene.emit(f"T.reduce_{scene.pick(('sum', 'max'))}({row}, {part}, dim=1)")
        with scene.block(*scene.loops("m")):
            scene.emit(f"{sums} = {sums} * 0.5 + {scene.element(part, 'm')}")


def _by_blocks(scene: Scene, row: str, blocks: Dim) -> None:
    """Blocks of k into their places, in a loop; not all of them, or only some elements, now and then."""
    whole, at = scene.dims["k"], scene.places["k"]
    var = scene.name("ko")
    scene.dims["k"], scene.places["k"] = blocks, var
    place = scene.at("k")
    twist = scene.twist("not all", "some elements")
    with scene.block(f"for {var} in T.serial({max(1, blocks.blocks - (twist == 'not all'))})"):
        text = value(scene, "mk")
        guards = [f"if {place} < {blocks.size}"] if blocks.size % blocks.block else []
        guards += [f"if {test(scene, 'mk')}"] if twist == "some elements" else []
        with scene.block(*scene.loops("mk"), *guards):
            scene.emit(f"{scene.element(row, 'mk', k=place)} = {text}")
    scene.dims["k"], scene.places["k"] = whole, at


def _stored(scene: Scene, dims: str, text: str) -> None:
    name = scene.output(dims)
    headers = scene.loops(dims)
    if scene.dims["m"].size % scene.dims["m"].block:
        headers.append(f"if {scene.at('m')} < {scene.dims['m'].size}")
    with scene.block(*headers):
        scene.emit(f"{name}[{', '.join(scene.at(d) for d in dims)}] = {text}")
