"""Loops over the elements of tiles: names for the positions along each axis, and the headers of the loops around."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .scene import Axis, Scene

_VARS = ("i", "j", "k", "l", "i4", "i5", "i6")
_TWO_LEVELS = re.compile(r"\((\w+) \* (\d+) \+ (\w+)\)")


def element_names(scene: Scene, axes: Sequence[Axis], *, whole: bool = False) -> dict[Axis, str]:
    """What stands for the position along each axis: mostly a loop variable, else an expression of one or two. `whole`:
    one loop may walk two axes at once."""
    names = {axis: "0" if axis.length == 1 else _VARS[n] for n, axis in enumerate(axes)}
    free = [axis for axis in axes if axis.length > 1]
    if whole and len(free) == 2 and scene.chance(3):
        columns = free[1].length
        return {**names, free[0]: f"(e // {columns})", free[1]: f"(e % {columns})"}
    for axis in free:
        if axis.length % 2 == 0 and axis.length > 2 and scene.chance(4):
            name = names[axis]
            names[axis] = f"({name}{name} * {scene.pick((2, axis.length // 2))} + {name})"
    return names


def element_loops(scene: Scene, axes: Sequence[Axis], names: dict[Axis, str], serial: Sequence[Axis] = ()) -> list[str]:
    """Headers of the loops over the elements of `axes`; those in `serial` have to go in order and are outermost."""
    fused = [axis for axis in axes if names[axis].startswith("(e ")]
    if fused:
        loop = "T.serial" if serial else "T.Parallel"
        return [f"for e in {loop}({fused[0].length * fused[1].length})"]
    ordered = [variable for axis in serial for variable in _variables(axis, names[axis])]
    free = [variable for axis in axes if axis not in serial for variable in _variables(axis, names[axis])]
    if ordered and free and scene.chance(15):
        ordered, free = [*ordered, *free], []
    elif free and scene.chance(15):
        ordered.append(free.pop(0))
    headers = [f"for {name} in {_serial(scene)}({extent})" for name, extent in ordered]
    if free:
        loop = scene.pick(("T.Parallel", "T.Parallel", "T.grid")) if len(free) > 1 else "T.Parallel"
        extents = ", ".join(str(extent) for _, extent in free)
        headers.append(f"for {', '.join(name for name, _ in free)} in {loop}({extents})")
    return headers


def _serial(scene: Scene) -> str:
    return "T.unroll" if scene.chance(5) else "T.serial"


def _variables(axis: Axis, name: str) -> list[tuple[str, int]]:
    """The loop variables in a name, with their extents."""
    if name == "0":
        return []
    levels = _TWO_LEVELS.fullmatch(name)
    if levels is None:
        return [(name, axis.length)]
    inner = int(levels[2])
    return [(levels[1], axis.length // inner), (levels[3], inner)]
