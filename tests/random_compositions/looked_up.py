"""Programs that look up blocks of tables, mostly all at one place: the weights of their expert, and what is made of
them."""

from __future__ import annotations

from .orders import grid
from .reads import value
from .scene import Dim, Scene

PLACES = ("plain", "plain", "named", "moved on", "sought", "sought")
STORES = ("copy", "elements", "elements", "some rows", "added", "added in one", "updated", "both")


def looked_up(scene: Scene) -> None:
    """A grid over blocks of m, of n too, whose programs copy from one or two tables, multiply, and store."""
    rows = scene.pick((1, 2, 3, 5, 8, 13, 40, 60))
    with grid(scene, scene.pick(("m", "mn", "mn"))):
        scene.places.setdefault("n", "0")
        n = scene.dims["n"] = Dim("n", scene.dims["n"].size, scene.dims["n"].block)
        if scene.places["n"] == "0":
            scene.dims["n"] = Dim("n", min(n.size, n.block), n.block)
        ids = scene.param("ids", [scene.dims["m"].blocks], ["one"], "int32", below=rows)
        place = _place(scene, f"{ids}[{scene.places['m']}]", rows)
        tables = [_block(scene, place, rows) for _ in range(scene.pick((1, 1, 2)))]
        if scene.twist("at another place"):
            other = scene.param("ids", [scene.dims["m"].blocks], ["one"], "int32", below=rows)
            tables.append(_block(scene, f"{other}[{scene.places['m']}]", rows))
        total = _product(scene, place, rows) if scene.chance(40) else ""
        _stored(scene, _made(scene, tables, total))


def _place(scene: Scene, found: str, rows: int) -> str:
    kind = scene.kind(PLACES)
    if kind == "plain":
        return found
    if kind == "moved on":
        return f"(({found} + {scene.places['m']}) % {rows})"
    at = scene.name("at")
    if kind == "named":
        scene.emit(f"{at} = {found}")
        return at
    scene.emit(f'{at} = T.alloc_var("int32")', f"{at} = 0")
    with scene.block(f"for e in T.serial({rows})"):
        scene.emit(f"{at} = T.if_then_else({found} == e, e, {at})")
    return at


def _block(scene: Scene, place: str, rows: int) -> str:
    """One table's row of n, on chip."""
    table = scene.param("Tab", [rows, scene.dims["n"].size], ["v", "n"])
    w = scene.buffer("w", "n", scope="shared")
    scene.emit(f"T.copy({table}[{place}, {scene.start('n')}], {w})")
    return w


def _product(scene: Scene, place: str, rows: int) -> str:
    """`A[m, k] @ Tab[place, k, n]`, block by block of k."""
    k, total = scene.dims["k"], scene.buffer("acc", "mn", scope="fragment")
    a, w = (scene.buffer("p", dims, scope="shared") for dims in ("mk", "kn"))
    left = scene.param("A", [scene.dims[d].size for d in "mk"], "mk")
    table = scene.param("Tab", [rows, k.size, scene.dims["n"].size], ["v", "k", "n"])
    scene.emit(f"T.clear({total})")
    with scene.block(f"for ko in T.serial({k.blocks})"):
        scene.emit(
            f"T.copy({left}[{scene.start('m')}, ko * {k.block}], {a})",
            f"T.copy({table}[{place}, ko * {k.block}, {scene.start('n')}], {w})",
            f"T.gemm({a}, {w}, {total})",
        )
    return total


def _made(scene: Scene, tables: list[str], total: str) -> str:
    """A block of what is made of what is looked up."""
    made, loops = scene.buffer("made", "mn", scope="fragment"), scene.loops("mn")
    element, product = scene.element(made, "mn"), scene.element(total, "mn")
    text = f"T.exp(-T.abs({scene.element(tables[0], 'n')}))"
    for w in tables[1:]:
        text = f"({text} {scene.pick('+-*')} {scene.element(w, 'n')})"
    if total:
        text = scene.pick((f"({text} + T.abs({product}))", f"T.max({product}, {text})"))
    if scene.chance(50):
        text = f"({text} {scene.pick('+*')} {value(scene, 'mn', 0)})"
    with scene.block(*loops):
        scene.emit(f"{element} = {text}")
    if scene.chance(20):
        top = scene.buffer("top", "m", scope="fragment")
        scene.emit(f"T.reduce_max({made}, {top}, dim=1)")
        with scene.block(*loops):
            scene.emit(f"{element} -= {scene.element(top, 'm')}")
    return made


def _stored(scene: Scene, made: str) -> None:
    kind = scene.kind(STORES)
    updates = kind in ("added", "added in one", "updated", "some rows")
    name = scene.output("mn", role="inout" if updates else "out")
    element, at = scene.element(made, "mn"), ", ".join(scene.at(d) for d in "mn")
    start = ", ".join(scene.start(d) for d in "mn")
    if kind in ("copy", "both"):
        scene.emit(f"T.copy({made}, {name}[{start}])")
    if kind == "added in one":
        scene.emit(f"T.atomic_add({name}[{start}], {made})")
    if kind in ("copy", "added in one"):
        return
    headers = [*scene.loops("mn"), *(f"if {scene.at(d)} < {scene.dims[d].size}" for d in "mn" if kind != "elements")]
    if kind == "some rows":
        kept = scene.param("kept", [scene.dims["m"].blocks], ["one"], "int32", below=scene.dims["m"].block + 1)
        headers.append(f"if {'0' if scene.dims['m'].block == 1 else 'i'} < {kept}[{scene.places['m']}]")
    with scene.block(*headers):
        if kind == "added":
            scene.emit(f"T.atomic_add({name}[{at}], {element})")
        elif kind == "both":
            scene.emit(f"{scene.output('mn')}[{at}] = {element} * 0.5")
        else:
            scene.emit(f"{name}[{at}] {'+=' if kind == 'updated' else '='} {element}")
