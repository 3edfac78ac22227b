"""States that devices combine: reductions, products, online softmaxes, logarithms of sums; and what only looks like
them."""

from __future__ import annotations

from .blocks import LOWEST, Carried, block, filled, reduced
from .reads import value
from .scene import Scene


def plain(scene: Scene, over: str) -> Carried:
    op = scene.pick(("sum", "sum", "max", "min"))
    total = scene.buffer("total", over)
    neutral = {"sum": "0.0", "max": scene.pick(LOWEST), "min": "T.infinity('float32')"}[op]
    first = neutral if scene.chance(80) else "0.5"
    return Carried(
        over,
        [total],
        lambda: scene.emit(f"T.fill({total}, {first})"),
        lambda: reduced(scene, op, block(scene, over, neutral), total, over, False),
    )


def by_a_reducer(scene: Scene, over: str) -> Carried:
    """A reduction that is finalized after the loop."""
    op = scene.pick(("sum", "sum", "max", "min"))
    neutral = {"sum": "0.0", "max": "-T.infinity('float32')", "min": "T.infinity('float32')"}[op]
    parts, total = scene.reducer("parts", over, op), scene.buffer("total", over, scope="fragment")
    first = scene.pick(("", "", ", 0.5"))

    def step() -> None:
        x = block(scene, over, neutral)
        with scene.block(*scene.loops(f"{over}k")):
            scene.emit(f"T.reducer_update({scene.element(parts, over)}, {scene.element(x, f'{over}k')})")

    def end() -> None:
        scene.emit(f"T.finalize_reducer({parts}, {total})")

    return Carried(over, [total], lambda: scene.emit(f"T.reducer_init({parts}{first})"), step, end)


def integers(scene: Scene, over: str) -> Carried:
    """Whole numbers, in a narrow dtype now and then."""
    total = scene.buffer("count", over, scene.pick(("int32", "int32", "int8", "int16")))
    dtype = next(b.dtype for b in scene.buffers if b.name == total)

    def step() -> None:
        x = block(scene, over)
        text, element = scene.element(total, over), scene.element(x, f"{over}k")
        with scene.block(*scene.loops(f"{over}k", serial="k")):
            scene.emit(f'{text} = {text} + T.if_then_else({element} > 0.0, T.cast(1, "{dtype}"), T.cast(0, "{dtype}"))')

    return Carried(over, [total], lambda: scene.emit(f"T.fill({total}, 0)"), step)


def bits(scene: Scene, over: str) -> Carried:
    """All bits of whole numbers, those of any, or those of an odd number of them."""
    op, sign, first = scene.pick((("or", "|", "0"), ("and", "&", "-1"), ("xor", "^", "0")))
    dims, total = f"{over}k", scene.buffer("bits", over, "int32")
    name = scene.param("ints", [scene.dims[d].size for d in dims], dims, "int32", below=1 << 20)
    first = first if scene.chance(80) else "5"

    def step() -> None:
        x = scene.buffer("x", dims, "int32")
        scene.emit(f"T.copy({name}[{', '.join(scene.start(d) for d in dims)}], {x})")
        if over and scene.chance(60):
            scene.emit(f"T.reduce_bit{op}({x}, {total}, dim={len(over)}, clear=False)")
            return
        element = scene.element(total, over)
        with scene.block(*scene.loops(dims, serial="k")):
            scene.emit(f"{element} = {element} {sign} {scene.element(x, dims)}")

    return Carried(over, [total], lambda: scene.emit(f"T.fill({total}, {first})"), step)


def product(scene: Scene, over: str) -> Carried:
    """`acc[m, n] += a[m, k] @ b[k, n]`."""
    acc = scene.buffer("acc", "mn")
    dtype = scene.pick(("float32", "float32", "float16"))
    multiply, clears = scene.pick(("gemm", "gemm", "wgmma_gemm")), scene.chance(25)

    def step() -> None:
        operands = []
        for dims in ("mk", "kn"):
            operands.append(scene.buffer("p", dims, dtype, scope="shared"))
            filled(scene, operands[-1], dims)
        first = f", clear_accum={scene.places['k']} == {scene.pick((0, 0, 1))}" if clears else ""
        scene.emit(f"T.{multiply}({operands[0]}, {operands[1]}, {acc}{first})")

    return Carried("mn", [acc], lambda: scene.emit(f"T.fill({acc}, {scene.pick(('0.0', '0.0', '1.0'))})"), step)


def promoted(scene: Scene, over: str) -> Carried:
    """Sums that are added to others every so many blocks."""
    total, recent = scene.buffer("total", over), scene.buffer("recent", over)
    every, twist = scene.pick((1, 2, 2, 2, 3, 4)), scene.twist("shifted", "kept", "early")
    left = scene.pick(([total], [total], [total, recent]))

    def sometimes() -> None:
        place = 0 if twist == "shifted" else every - 1
        with scene.block(f"if ({scene.places['k']}) % {every} == {place}"):
            with scene.block(*scene.loops(over)):
                scene.emit(
                    f"{scene.element(total, over)} = {scene.element(total, over)} + {scene.element(recent, over)}"
                )
            if twist != "kept":
                scene.emit(f"T.clear({recent})")

    def step() -> None:
        if twist == "early":
            sometimes()
        reduced(scene, "sum", block(scene, over), recent, over, False)
        if twist != "early":
            sometimes()

    return Carried(over, left, lambda: scene.emit(f"T.clear({recent})", f"T.clear({total})"), step)


def online(scene: Scene, over: str) -> Carried:
    """A running maximum, sums that are scaled to it, now and then a product."""
    lowest = scene.pick(LOWEST)
    m, before, total, part, scale = (
        scene.buffer(n, over, scope="fragment") for n in ("m", "before", "total", "part", "scale")
    )
    weighs = scene.chance(40)
    acc, wide = scene.buffer("acc", over), scene.buffer("weighed", over)
    exp = scene.pick(("exp", "exp2"))

    def at(name: str) -> str:
        return scene.element(name, over)

    twist = scene.twist("half", "late", "no rescale", "stale", "another", "guarded by another")
    guard = scene.pick(("", "", "", "carried", "copied", "powers"))
    low = scene.buffer("low", over, scope="fragment") if guard == "copied" else m
    asked = before if twist == "guarded by another" else m
    of_block, asks = scene.chance(25), scene.chance(35)
    none = scene.pick((f"{at(total)} == 0.0", f"{at(total)} == 0.0", f"{at(acc)} == 0.0"))

    def power(text: str) -> str:
        return f"T.exp({text})" if exp == "exp" else f"T.exp2(({text}) * 1.44269504)"

    def chosen(of: str, text: str) -> str:
        return f"T.if_then_else({at(of)} == {lowest}, 0.0, {text})" if guard == "powers" else text

    def start() -> None:
        scene.emit(f"T.fill({m}, {lowest})", f"T.clear({total})", f"T.clear({acc})")

    def end() -> None:
        acc_of, total_of = f"{at(acc)} / {at(total)}", at(total)
        if asks:
            acc_of = f"T.if_then_else({none}, 0.5, {acc_of})"
            total_of = f"T.if_then_else({none}, 1.0, {total_of})"
        with scene.block(*scene.loops(over)):
            scene.emit(f"{at(wide)} = {at(m)} + T.log({total_of})", f"{at(acc)} = {acc_of}")
            scene.emit(f"{at(total)} = {at(wide)}")

    def step() -> None:
        x = block(scene, over, lowest)
        scene.emit(f"T.copy({m}, {before})")
        if of_block:
            scene.emit(f"T.fill({m}, {lowest})")
        reduced(scene, "max", x, m, over, False)
        other = block(scene, over, lowest) if twist == "another" else x
        loops = scene.loops(over)
        with scene.block(*loops):
            if guard in ("carried", "copied"):
                scene.emit(f"{at(low)} = T.if_then_else({at(asked)} == {lowest}, 0.0, {at(m)})")
            difference = f"{at(before)} - {at(low)}"
            scene.emit(f"{at(scale)} = {'1.0' if twist == 'no rescale' else chosen(before, power(difference))}")
        element, row = scene.element(x, f"{over}k"), at(before if twist == "stale" else low)
        with scene.block(*scene.loops(f"{over}k")):
            text = power(f"{scene.element(other, f'{over}k')} - {row}")
            scene.emit(f"{element} = {chosen(asked, text)}")
        reduced(scene, "sum", x, part, over, True)
        headers = loops if twist != "half" else [*loops, f"if {at(part)} > 1.0"]
        with scene.block(*headers):
            scene.emit(f"{at(total)} = {at(total)} * {at(scale)} + {at(part)}")
        if weighs:
            text = value(scene, "k", 0)
            with scene.block(*scene.loops(f"{over}k")):
                scene.emit(f"{element} = {element} * {text}")
            reduced(scene, "sum", x, wide, over, True)
            with scene.block(*loops):
                scene.emit(f"{at(acc)} = {at(acc)} * {at(scale)} + {at(wide)}")
        if twist == "late":
            with scene.block(*loops):
                scene.emit(f"{at(m)} = T.max({at(m)}, {value(scene, over, 0) if over else '1.0'})")

    left = [total, *([acc] if weighs else [])]
    return Carried(over, left, start, step, end) if scene.chance(40) else Carried(over, [m, *left], start, step)


def logarithm(scene: Scene, over: str) -> Carried:
    """The logarithm of a sum of powers."""
    lse, top, part = (scene.buffer(n, over, scope="fragment") for n in ("lse", "top", "part"))

    def at(name: str) -> str:
        return scene.element(name, over)

    def step() -> None:
        x = block(scene, over, "-9.0")
        reduced(scene, "max", x, top, over, True)
        element = scene.element(x, f"{over}k")
        with scene.block(*scene.loops(f"{over}k")):
            scene.emit(f"{element} = T.exp({element} - {at(top)})")
        reduced(scene, "sum", x, part, over, True)
        with scene.block(*scene.loops(over)):
            scene.emit(f"{at(lse)} = {at(top)} + T.log(T.exp({at(lse)} - {at(top)}) + {at(part)})")

    return Carried(over, [lse], lambda: scene.emit(f"T.fill({lse}, {scene.pick((LOWEST[0], '-9.0'))})"), step)
