"""States that are handed on in order: linear recurrences, running extremes, the best of all, chunks of linear
attention; and what only looks like them."""

from __future__ import annotations

from .blocks import Carried, any_order, block, kept_text, reduced
from .reads import test, value
from .scene import Scene


def linear(scene: Scene, over: str) -> Carried:
    """`state = a * state + b`, block by block or position by position, maybe by another buffer, and what it is on
    the way."""
    state = scene.buffer("state", over)
    by_position = scene.chance(50)
    kept = scene.output(any_order(scene, f"{over}k")) if by_position and scene.chance(60) else ""
    at = scene.element(state, over)
    before = scene.chance(40)
    twist = scene.twist("clip", "square", "condition", "set back", "product")
    other = scene.element(scene.buffer("other", over), over) if scene.chance(25) else ""

    def update(b: str, dims: str) -> str:
        a = scene.pick(
            (
                "0.5",
                "0.5",
                "(-0.5)",
                "1.0",
                value(scene, dims, 0) + " * 0.25",
                f"T.if_then_else({test(scene, dims)}, 0.5, 1.0)",
            )
        )
        return scene.pick((f"{at} * {a} + {b}", f"{b} + {a} * {at}", f"{at} * {a} - {b}", f"({at} + {b}) * {a}"))

    def step() -> None:
        dims = f"{over}k"
        if not by_position:
            x, part = block(scene, over), scene.buffer("part", over)
            reduced(scene, "sum", x, part, over, True)
            text = (
                update(scene.element(part, over), over or "k") if over else f"{at} * 0.5 + {scene.element(part, over)}"
            )
            with scene.block(*scene.loops(over)):
                scene.emit(f"{at} = {text}")
            return
        text = update(value(scene, dims), dims)
        if twist == "clip":
            text = f"T.min({text}, 2.0)"
        elif twist == "product":
            text = f"{at} * {value(scene, dims, 0)}"
        elif twist == "square":
            text = f"{at} * {at} * 0.1 + {text}"
        headers = scene.loops(dims, serial="k")
        if twist == "condition":
            headers.append(f"if {test(scene, dims)}")
        elif scene.dims["k"].size % scene.dims["k"].block and scene.chance(70):
            headers.append(f"if {scene.at('k')} < {scene.dims['k'].size}")
        with scene.block(*headers):
            if twist == "set back":
                with scene.block(f"if {test(scene, dims)}"):
                    scene.emit(f"{at} = 0.0")
            keep = kept and kept_text(scene, kept, at)
            if keep and before:
                scene.emit(keep)
            if other:
                first, last = scene.pick(
                    ((text, other), ("1.0", f"{text} - {other}"), (f"{at} * 0.5", f"{other} + {text}"))
                )
                scene.emit(f"{other} = {first}", f"{at} = {last}")
            else:
                scene.emit(f"{at} = {text}")
            if keep and not before:
                scene.emit(keep)

    return Carried(over, [state], lambda: scene.emit(f"T.fill({state}, {scene.pick(('0.0', '1.0'))})"), step)


def running(scene: Scene, over: str) -> Carried:
    """A running maximum or minimum, and what it is on the way."""
    state = scene.buffer("state", over)
    op, at = scene.pick(("max", "min")), scene.element(state, over)
    kept = scene.output(any_order(scene, f"{over}k")) if scene.chance(70) else ""

    def step() -> None:
        dims = f"{over}k"
        text = value(scene, dims)
        with scene.block(*scene.loops(dims, serial="k")):
            scene.emit(f"{at} = T.{op}({at}, {text})")
            if kept:
                scene.emit(kept_text(scene, kept, at))

    return Carried(over, [state], lambda: scene.emit(f"T.fill({state}, {scene.pick(('0.0', '-5.0', '5.0'))})"), step)


def best(scene: Scene, over: str) -> Carried:
    """The best of all positions, with what comes along; ties are many."""
    best, where = scene.buffer("best", over), scene.buffer("where", over, scene.pick(("int32", "float32")))
    dtype = next(b.dtype for b in scene.buffers if b.name == where)
    compare = scene.pick((">", ">", "<", ">=", "<="))
    lowest = ("-T.infinity('float32')", "-1.0") if ">" in compare else ("T.infinity('float32')", "1.0")
    at, index = scene.element(best, over), scene.element(where, over)
    twist = scene.twist("under a condition")

    def start() -> None:
        scene.emit(f"T.fill({best}, {scene.pick(lowest)})", f"T.fill({where}, {scene.pick((0, -1))})")

    def step() -> None:
        dims = f"{over}k"
        x = block(scene, over, lowest[0])
        element = scene.element(x, dims)
        along = f'T.cast({scene.at("k")}, "{dtype}")' if dtype == "int32" or scene.chance(50) else value(scene, dims, 0)
        headers = scene.loops(dims, serial="k")
        if twist:
            headers.append(f"if {test(scene, dims)}")
        swap = scene.chance(30)
        flipped = {">": "<", "<": ">", ">=": "<=", "<=": ">="}[compare]
        condition = f"{at} {flipped} {element}" if swap else f"{element} {compare} {at}"
        with scene.block(*headers, f"if {condition}"):
            scene.emit(
                *scene.pick(((f"{at} = {element}", f"{index} = {along}"), (f"{index} = {along}", f"{at} = {element}")))
            )

    return Carried(over, [best, where], start, step)


def last(scene: Scene, over: str) -> Carried:
    """What the last block leaves, or the first; how often the loop ran; a mean that is kept up to date."""
    state, count = scene.buffer("state", over), scene.buffer_of("n", (1,))
    at = scene.element(state, over)
    kind = scene.pick(("last", "count", "mean", "first"))

    def step() -> None:
        x = block(scene, over)
        part = scene.buffer("part", over)
        reduced(scene, "sum", x, part, over, True)
        one = scene.element(part, over)
        if kind == "mean":
            scene.emit(f"{count}[0] = {count}[0] + 1.0")
        text = {
            "last": one,
            "count": f"{at} + 1.0",
            "mean": f"{at} + ({one} - {at}) / {count}[0]",
            "first": f"T.if_then_else({at} == 7.0, {one}, {at})",
        }[kind]
        with scene.block(*scene.loops(over)):
            scene.emit(f"{at} = {text}")

    def start() -> None:
        scene.emit(f"T.fill({state}, {'7.0' if kind == 'first' else '0.0'})", f"T.clear({count})")

    return Carried(over, [state], start, step)


def chunks(scene: Scene, over: str) -> Carried:
    """Linear attention: `out = (q k^T, causal) v + q h; h += k^T v` in chunks of positions."""
    block, width, deep = scene.dims["k"].block, scene.number(1, 4), scene.number(1, 4)
    size = scene.dims["k"].size
    state = scene.buffer_of("h", (deep, width), scope="fragment")
    q, k, v = (scene.param(n, [size, w], ["k", n], "float32") for n, w in (("Q", deep), ("K", deep), ("V", width)))
    out = scene.output("k") if width == 1 else ""
    if not out:
        out = scene.param("Y", [size, width], ["k", "V"], "float32", "out")
    tiles = [
        scene.buffer_of(n, s, scope="shared")
        for n, s in (("q", (block, deep)), ("kk", (block, deep)), ("v", (block, width)))
    ]
    scores, made = (
        scene.buffer_of("scores", (block, block), scope="fragment"),
        scene.buffer_of("made", (block, width), scope="fragment"),
    )
    mask = scene.pick((">=", ">=", ">", ""))
    decay = scene.pick((1.0, 1.0, 0.5))
    after = scene.chance(20)

    def step() -> None:
        start = scene.start("k")
        for name, tile in zip((q, k, v), tiles, strict=True):
            scene.emit(f"T.copy({name}[{start}, 0], {tile})")
        update = [f"T.gemm({tiles[1]}, {tiles[2]}, {state}, transpose_A=True)"]
        scene.emit(f"T.clear({scores})", f"T.gemm({tiles[0]}, {tiles[1]}, {scores}, transpose_B=True)")
        if mask:
            with scene.block(f"for i, j in T.Parallel({block}, {block})"):
                scene.emit(f"{scores}[i, j] = T.if_then_else(i {mask} j, {scores}[i, j], 0.0)")
        if after:
            scene.emit(*update)
        scene.emit(f"T.clear({made})", f"T.gemm({scores}, {tiles[2]}, {made})", f"T.gemm({tiles[0]}, {state}, {made})")
        if decay != 1.0:
            with scene.block(f"for i, j in T.Parallel({deep}, {width})"):
                scene.emit(f"{state}[i, j] = {state}[i, j] * {decay}")
        if not after:
            scene.emit(*update)
        if width == 1:
            with scene.block(f"for i in T.Parallel({block})"):
                scene.emit(f"{out}[{start} + i] = {made}[i, 0]")
        else:
            scene.emit(f"T.copy({made}, {out}[{start}, 0])")

    return Carried("", [], lambda: scene.emit(f"T.clear({state})"), step)
