"""Blocks of values on chip, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .reads import test, value
from .scene import Scene

LOWEST = ("-T.infinity('float32')", "-T.infinity('float32')", "-1024.0")


@dataclass(eq=False)
class Carried:
    """A state over the dims `over`: `start` before the loop, `step` in it, `end` after it, and the buffers that it
    leaves."""

    over: str
    left: list[str]
    start: Callable[[], None]
    step: Callable[[], None]
    end: Callable[[], None] = lambda: None


def block(scene: Scene, over: str, neutral: str = "0.0") -> str:
    """The loop's block of values, on chip; what is past the end of k is mostly neutral."""
    dims = f"{over}k"
    x = scene.buffer("x", dims)
    dim = scene.dims["k"]
    copied = scene.chance(20)
    if copied:
        name = scene.param(
            "A", [scene.dims[d].size for d in dims], dims, scene.pick(("float32", "float32", "float16", "bfloat16"))
        )
        scene.emit(f"T.copy({name}[{', '.join(scene.start(d) for d in dims)}], {x})")
    elif len(dims) == 2 and scene.chance(12):
        copied = True
        turned, staged = dims[::-1], scene.buffer("staged", dims[::-1], scope="shared")
        name = scene.param("A", [scene.dims[d].size for d in turned], turned)
        scene.emit(f"T.copy({name}[{', '.join(scene.start(d) for d in turned)}], {staged})")
        scene.emit(f"T.transpose({staged}, {x})")
    lines_before = len(scene.lines)
    text = scene.element(x, dims) if copied else value(scene, dims)
    lets = scene.lines[lines_before:]
    del scene.lines[lines_before:]
    guarded = dim.size % dim.block and scene.chance(80)
    if guarded:
        text = f"T.if_then_else({scene.at('k')} < {dim.size}, {text}, {neutral})"
    scene.lines += lets
    if not copied or guarded:
        with scene.block(*scene.loops(dims)):
            scene.emit(f"{scene.element(x, dims)} = {text}")
    if neutral != "0.0" and scene.chance(25):
        limit = test(scene, dims)
        with scene.block(*scene.loops(dims)):
            scene.emit(f"{scene.element(x, dims)} = T.if_then_else({limit}, {scene.element(x, dims)}, {neutral})")
    return x


def reduced(scene: Scene, op: str, x: str, out: str, over: str, clear: bool) -> None:
    if over and scene.chance(75):
        scene.emit(f"T.reduce_{op}({x}, {out}, dim={len(over)}{'' if clear else ', clear=False'})")
        return
    if clear:
        start = {"sum": "0.0", "max": "-T.infinity('float32')", "min": "T.infinity('float32')"}[op]
        scene.emit(f"T.fill({out}, {start})")
    total, element = scene.element(out, over), scene.element(x, f"{over}k")
    with scene.block(*scene.loops(f"{over}k", serial="k")):
        scene.emit(f"{total} = {total} + {element}" if op == "sum" else f"{total} = T.{op}({total}, {element})")


def filled(scene: Scene, buffer: str, dims: str) -> None:
    if scene.chance(30):
        name = scene.param("A", [scene.dims[d].size for d in dims], dims, scene.dtype_of(buffer))
        scene.emit(f"T.copy({name}[{', '.join(scene.start(d) for d in dims)}], {buffer})")
        return
    text = value(scene, dims)
    if scene.dims["k"].size % scene.dims["k"].block:
        text = f"T.if_then_else({scene.at('k')} < {scene.dims['k'].size}, {text}, 0.0)"
    with scene.block(*scene.loops(dims)):
        scene.emit(f"{scene.element(buffer, dims)} = {text}")


def any_order(scene: Scene, dims: str) -> str:
    return "".join(scene.random.sample(dims, len(dims)))


def kept_text(scene: Scene, name: str, text: str) -> str:
    return f"{name}[{', '.join(scene.at(d) for d in scene.params[name].dims)}] = {text}"
