"""Views in random kernels: some accesses to a buffer go through another shape of its memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

from .spec import Block, KernelSpec, Line

_PERCENT_OF_ACCESSES = 40
_WAYS = ("one more", "one more", "apart", "apart", "flat")


def with_views(kernel: KernelSpec, random: Random) -> KernelSpec:
    """The kernel with some of its accesses through views. What is outside a parameter stays outside of the view, or is
    only read: it still holds that no two programs store different values to one element."""
    shapes: dict[str, tuple[int, ...]] = {p.name: p.shape for p in kernel.params}
    shapes |= {b.name: b.shape for b in kernel.buffers}
    writable = {p.name for p in kernel.params if p.role != "in"}
    chosen = [name for name in shapes if random.random() < 0.5]
    views: dict[str, str] = {}

    def through(name: str, indices: list[str], block: bool) -> str | None:
        """An access to an element or a block, through a view."""
        if not _chance(random):
            return None
        if block:
            made = (1, *shapes[name]), ["0", *indices]
        else:
            made = _view(random.choice(_WAYS), shapes[name], indices, random, flat=name not in writable)
        if made is None:
            return None
        shape, places = made
        view = views.setdefault(f"T.{random.choice(('reshape', 'view'))}({name}, {shape})", f"view{len(views)}")
        return f"{view}[{', '.join(places)}]"

    def rewrite(text: str) -> str:
        for name in chosen:
            block = "T.copy(" in text or "T.atomic" in text
            text = _replaced(text, name, lambda indices, n=name, b=block: through(n, indices, b))
        return text

    body = tuple(_mapped(line, rewrite) for line in kernel.body)
    declared = tuple(f"{name} = {made}" for made, name in views.items())
    return replace(kernel, body=(*declared, *body))


def _chance(random: Random) -> bool:
    return random.randrange(100) < _PERCENT_OF_ACCESSES


def _view(
    way: str, shape: tuple[int, ...], indices: list[str], random: Random, *, flat: bool
) -> tuple[tuple[int, ...], list[str]] | None:
    """Another shape of the same memory, and the indices in it of an element."""
    if way == "one more":
        at = random.randrange(len(shape) + 1)
        return (*shape[:at], 1, *shape[at:]), [*indices[:at], "0", *indices[at:]]
    if way == "apart":
        dims = [(dim, part) for dim, size in enumerate(shape) for part in range(2, size) if size % part == 0]
        if not dims:
            return None
        dim, part = random.choice(dims)
        apart = (shape[dim] // part, part)
        places = [f"({indices[dim]}) // {part}", f"({indices[dim]}) % {part}"]
        return (*shape[:dim], *apart, *shape[dim + 1 :]), [*indices[:dim], *places, *indices[dim + 1 :]]
    if not flat or len(shape) < 2:
        return None
    position = "0"
    for size, index in zip(shape, indices, strict=True):
        position = f"({position}) * {size} + ({index})" if position != "0" else f"({index})"
    return (math.prod(shape),), [position]


def _replaced(text: str, name: str, through: Callable[[list[str]], str | None]) -> str:
    """The text with some `name[...]` replaced."""
    result, position = "", 0
    for match in re.finditer(rf"\b{re.escape(name)}\[", text):
        if match.start() < position:
            continue
        end = _closing(text, match.end())
        inside = text[match.end() : end]
        made = through(_split(inside))
        result += text[position : match.start()] + (made or text[match.start() : end + 1])
        position = end + 1
    return result + text[position:]


def _closing(text: str, start: int) -> int:
    """Where the bracket is closed that is open before `start`."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"[": 1, "]": -1}.get(text[position], 0)
        if not depth:
            return position
    raise ValueError(text)


def _split(text: str) -> list[str]:
    """The parts between the commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _mapped(line: Line, rewrite: Callable[[str], str]) -> Line:
    if isinstance(line, str):
        return rewrite(line)
    return Block(rewrite(line.header), tuple(_mapped(inner, rewrite) for inner in line.body))
