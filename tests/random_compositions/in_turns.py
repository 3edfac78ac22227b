"""States of which nothing is known before they are there: registers that move on, copies, numbers that overflow, modes
that data toggle, blocks' running sums; devices take turns for these, or one of them has all."""

from __future__ import annotations

from .blocks import Carried, any_order, block, kept_text
from .reads import test, value
from .scene import Scene


def _each_position(scene: Scene, over: str) -> list[str]:
    """Headers of loops over all positions of a block, in order; past the end of k nothing changes, mostly."""
    dim = scene.dims["k"]
    guarded = dim.size % dim.block and scene.chance(70)
    headers = scene.loops(f"{over}k", serial="k")
    return [*headers, f"if {scene.at('k')} < {dim.size}"] if guarded else headers


def registers(scene: Scene, over: str) -> Carried:
    """The last values, in registers that move on or in a ring."""
    depth, kind = scene.number(1, 3), scene.pick(("shift", "shift", "ring"))
    held = scene.buffer_of("held", (depth, *(scene.dims[d].block for d in over)), scope="shared")
    last = scene.buffer("last", over)
    kept = scene.output(any_order(scene, f"{over}k"))
    twist = scene.twist("some move on")

    def at(number: int | str) -> str:
        inner = scene.element("", over)[1:-1] if over else ""
        return f"{held}[{', '.join([str(number), *([inner] if inner else [])])}]"

    def step() -> None:
        dims = f"{over}k"
        text = value(scene, dims)
        headers = _each_position(scene, over)
        if twist:
            headers.append(f"if {test(scene, dims)}")
        newest = f"({scene.at('k')}) % {depth}" if kind == "ring" else "0"
        oldest = f"({scene.at('k')} + 1) % {depth}" if kind == "ring" else str(depth - 1)
        with scene.block(*headers):
            scene.emit(kept_text(scene, kept, at(oldest)))
            if kind == "shift":
                scene.emit(*(f"{at(n)} = {at(n - 1)}" for n in range(depth - 1, 0, -1)))
            scene.emit(f"{at(newest)} = {text}")

    def end() -> None:
        with scene.block(*scene.loops(over)):
            scene.emit(f"{scene.element(last, over)} = {at(0)} - {at(depth - 1)} * 0.5")

    return Carried(over, [last], lambda: scene.emit(f"T.fill({held}, {scene.pick(('0.0', '7.0'))})"), step, end)


def copied(scene: Scene, over: str) -> Carried:
    """A state that is cut off, and a copy of it that its update uses, too; or what it was an iteration ago."""
    state, copy = scene.buffer("state", over), scene.buffer("copy", over, scene.pick(("float32", "float16")))
    at = scene.element(state, over)
    used = scene.element(copy, over)
    used = used if scene.dtype_of(copy) == "float32" else f'T.cast({used}, "float32")'
    kept = scene.output(any_order(scene, f"{over}k"))
    first, twist = scene.pick(("0.0", "0.5")), scene.twist("lags", "starts otherwise", "now and then", "by element")

    def copies() -> None:
        if twist == "by element":
            dtype = scene.dtype_of(copy)
            with scene.block(*scene.loops(over)):
                scene.emit(f'{scene.element(copy, over)} = T.cast({at}, "{dtype}")')
        else:
            scene.emit(f"T.copy({state}, {copy})")

    def start() -> None:
        scene.emit(f"T.fill({state}, {first})")
        scene.emit(f"T.fill({copy}, {'2.0' if twist == 'starts otherwise' else first})")

    def step() -> None:
        dims = f"{over}k"
        text = value(scene, dims)
        if twist == "lags":
            copies()
        with scene.block(*_each_position(scene, over)):
            scene.emit(f"{at} = T.max(T.min({at} * 0.5 + {used} * 0.25 + {text}, 4.0), -2.0)")
            scene.emit(kept_text(scene, kept, used))
        if twist == "now and then":
            with scene.block(f"if ({scene.places['k']}) % 2 == 1"):
                copies()
        elif twist != "lags":
            copies()

    return Carried(over, [state], start, step)


def generator(scene: Scene, over: str) -> Carried:
    """Whole numbers that overflow."""
    state = scene.buffer("state", over, "int32")
    at, kept = scene.element(state, over), scene.output(any_order(scene, f"{over}k"), "int32")
    bits = scene.param("bits", [scene.dims["k"].size], ["k"], "int32", below=1 << 20)

    def step() -> None:
        with scene.block(*_each_position(scene, over)):
            scene.emit(f"{at} = ({at} * 1664525 + 1013904223) ^ {bits}[{scene.at('k')}]")
            scene.emit(kept_text(scene, kept, at))

    return Carried(over, [state], lambda: scene.emit(f"T.fill({state}, 12345)"), step)


def toggled(scene: Scene, over: str) -> Carried:
    """A mode that data toggle, and what is counted in it."""
    mode, count = scene.buffer("mode", over, "int32"), scene.buffer("count", over, scene.pick(("float32", "int32")))
    on, counted = scene.element(mode, over), scene.element(count, over)
    dtype = scene.dtype_of(count)
    kept = scene.output(any_order(scene, f"{over}k"))

    def step() -> None:
        dims = f"{over}k"
        text = value(scene, dims)
        x = scene.buffer("x", dims)
        element = scene.element(x, dims)
        with scene.block(*scene.loops(dims)):
            scene.emit(f"{element} = {text}")
        with scene.block(*_each_position(scene, over)):
            with scene.block(f"if {element} > 0.5"):
                scene.emit(f"{on} = 1 - {on}")
            with scene.block(f"if {on} != 0"):
                scene.emit(f'{counted} = {counted} + T.cast(1, "{dtype}")')
            scene.emit(kept_text(scene, kept, f"T.if_then_else({on} != 0, {element}, -1.0)"))

    return Carried(over, [mode, count], lambda: scene.emit(f"T.fill({mode}, 0)", f"T.fill({count}, 0)"), step)


def carried_on(scene: Scene, over: str) -> Carried:
    """The running sum of a block, or its maximum, from where the block before ended."""
    carry, op = scene.buffer("carry", over), scene.pick(("cumsum", "cumsum", "cummax"))
    kept = scene.output(any_order(scene, f"{over}k"))
    sign = scene.pick(("+", "+", "-")) if op == "cumsum" else ""
    start = "0.0" if sign else "-8.0"

    def step() -> None:
        dims = f"{over}k"
        x, sums = block(scene, over), scene.buffer("sums", dims, scope="shared")
        scene.emit(f"T.{op}({x}, {sums}, dim={len(over)})")
        here, before = scene.element(sums, dims), scene.element(carry, over)
        with scene.block(*scene.loops(dims)):
            scene.emit(f"{here} = {f'{here} {sign} {before}' if sign else f'T.max({here}, {before})'}")
        headers = scene.loops(dims)
        if scene.dims["k"].size % scene.dims["k"].block:
            headers.append(f"if {scene.at('k')} < {scene.dims['k'].size}")
        with scene.block(*headers):
            scene.emit(kept_text(scene, kept, here))
        with scene.block(*scene.loops(over)):
            last = "0" if scene.dims["k"].block == 1 else str(scene.dims["k"].block - 1)
            scene.emit(f"{before} = {scene.element(sums, dims, k=last)}")

    return Carried(over, [carry], lambda: scene.emit(f"T.fill({carry}, {start})"), step)
