"""Rows at loaded places: what one device writes of a row that it has, into a place of the rows' reader or of the data's
own; products that sum over the same rows of two tables."""

from __future__ import annotations

from .orders import grid
from .reads import value
from .scene import Dim, Scene

PLACES = ("loaded", "loaded", "by a table", "best", "counted", "shifted")
WRITES = ("stored", "stored", "scaled", "in a condition", "twice", "added", "kept")
PRODUCTS = ("same rows", "same rows", "same rows", "other rows", "one guard", "scaled")


def written_by_one(scene: Scene) -> None:
    """`Y[m, n] = Tab[place, n]`, with a place per row, or per program, that is kept on chip."""
    rows = scene.pick((2, 3, 5, 8, 13))
    with grid(scene, "mn"):
        block, dim = scene.dims["n"], scene.dims["m"]
        at = scene.buffer("at", "m", "int32")
        _places(scene, at, rows)
        table = scene.param("Tab", [rows, block.size], ["v", "n"])
        kind = scene.kind(WRITES)
        text = f"{table}[{scene.element(at, 'm')}, {scene.at('n')}]"
        headers = [*scene.loops("mn"), *(f"if {scene.at(d)} < {scene.dims[d].size}" for d in "mn")]
        if kind == "in a condition":
            mask = scene.param("mask", [dim.size], ["m"], "int32", below=2)
            headers.append(f"if {mask}[{scene.at('m')}] != 0")
        name = scene.output("mn", role="inout" if kind in ("in a condition", "added") else "out")
        place = f"{name}[{scene.at('m')}, {scene.at('n')}]"
        if kind == "scaled":
            text = f"{text} * {value(scene, 'mn', 0)}"
        elif kind == "kept":
            held = scene.buffer("held", "mn")
            with scene.block(*scene.loops("mn")):
                scene.emit(f"{scene.element(held, 'mn')} = {text}")
            text = scene.element(held, "mn")
        with scene.block(*headers):
            if kind == "twice":
                scene.emit(f"{place} = 1.0")
            scene.emit(f"T.atomic_add({place}, {text})" if kind == "added" else f"{place} = {text}")


def _places(scene: Scene, at: str, rows: int) -> None:
    """A place in the table for every row of the block."""
    kind, place = scene.kind(PLACES), scene.element(at, "m")
    ids = scene.param("ids", [scene.dims["m"].size], ["m"], "int32", below=rows)
    found = f"{ids}[{scene.at('m')}]"
    if kind == "by a table":
        names = scene.param("ids", [rows], ["v"], "int32", below=rows)
        found = f"{names}[{found}]"
    elif kind == "shifted":
        found = f"({found} + {scene.at('m')}) % {rows}"
    with scene.block(*scene.loops("m")):
        scene.emit(f"{place} = {found}")
    if kind == "counted":
        mask = scene.param("mask", [scene.dims["k"].size], ["k"], "int32", below=2)
        with scene.block(f"for e in T.serial({scene.dims['k'].size})", *scene.loops("m")):
            scene.emit(f"{place} = ({place} + {mask}[e]) % {rows}")
    elif kind == "best":
        scores = scene.param("A", [scene.dims["m"].size, rows], ["m", "v"])
        top = scene.buffer("top", "m", scope="fragment")
        scene.emit(f"T.fill({top}, 0.0)")
        score = f"{scores}[{scene.at('m')}, e]"
        with scene.block(f"for e in T.serial({rows})", *scene.loops("m"), f"if {score} > {scene.element(top, 'm')}"):
            scene.emit(f"{scene.element(top, 'm')} = {score}", f"{place} = e")


def row_products(scene: Scene) -> None:
    """`Y[g] = A[rows of g].T @ D[rows of g]`, block by block of rows from a loaded place on."""
    kind, length, step = scene.kind(PRODUCTS), scene.pick((5, 8, 12, 16)), scene.pick((2, 4))
    blocks = scene.pick((1, 2, 3))
    with grid(scene, "m"):
        groups = scene.dims["m"]
        scene.dims["m"] = Dim("m", groups.blocks, 1)
        n, k = scene.pick((2, 4, 5)), scene.pick((2, 4))
        starts = scene.param("starts", [groups.blocks], ["m"], "int32", below=length)
        counts = scene.param("counts", [groups.blocks], ["m"], "int32", below=blocks + 1)
        g = scene.places["m"]
        a, d = (scene.buffer_of(name, (step, width), scope="shared") for name, width in (("a", k), ("d", n)))
        total = scene.buffer_of("acc", (k, n), scope="fragment")
        tables = [scene.param("A", [length, width], ["v", name]) for name, width in (("p", k), ("q", n))]
        scene.emit(f"T.clear({total})")
        with scene.block(f"for ko in T.serial({scene.pick((f'{counts}[{g}]', str(blocks)))})"):
            for number, (table, tile, width) in enumerate(zip(tables, (a, d), (k, n), strict=True)):
                row = f"{starts}[{g}] + ko * {step} + i"
                if kind == "other rows" and number:
                    row = f"{starts}[{g}] + ko * {step} + {step - 1} - i"
                text = f"{table}[{row}, j]"
                if kind == "scaled" and number:
                    text = f'{text} * T.cast({row}, "float32")'
                if kind != "one guard" or not number:
                    text = f"T.if_then_else({row} < {length}, {text}, 0.0)"
                with scene.block(f"for i, j in T.Parallel({step}, {width})"):
                    scene.emit(f"{tile}[i, j] = {text}")
            scene.emit(f"T.gemm({a}, {d}, {total}, transpose_A=True)")
        name = scene.param("Y", [groups.blocks, k, n], ["m", "p", "q"], "float32", "out")
        scene.emit(f"T.copy({total}, {name}[{g}, 0, 0])")
        scene.dims["m"] = groups
