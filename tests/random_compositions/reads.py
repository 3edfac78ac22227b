"""What one position reads: elements at itself, in groups, packed, in a window, at the other end, looked up in a
table, staged."""

from __future__ import annotations

from .scene import Scene

READS = (
    *["plain"] * 5,
    "groups",
    "groups",
    "members",
    "packed",
    "window",
    "window",
    "margin",
    "clamped",
    "roll",
    "strided",
    "table",
    "table",
    "earlier",
    "earlier",
    "position",
    "turned",
    "staged window",
)

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16")


def value(scene: Scene, dims: str, depth: int = 1) -> str:
    """A float32 of what is read at a position of the open dims."""
    first = _read(scene, dims)
    for _ in range(scene.pick((0, 0, 1, 1, 2)) if depth else 0):
        other = _read(scene, dims)
        op = scene.pick(("+", "+", "-", "*", "max", "min"))
        first = f"T.{op}({first}, {other})" if op in ("max", "min") else f"({first} {op} {other})"
    if depth and scene.chance(15):
        first = f"T.if_then_else({test(scene, dims)}, {first}, {scene.pick(('0.0', '-1.0', '2.0'))})"
    return first


def test(scene: Scene, dims: str) -> str:
    """A condition on positions, or on data."""
    dim = scene.pick(dims)
    at, size = scene.at(dim), scene.dims[dim].size
    options = [f"{at} < {scene.number(1, size)}", f"({at}) % 2 == 0", f"{at} >= {scene.number(0, size - 1)}"]
    if len(dims) > 1:
        options += [f"{scene.at(dims[0])} >= {scene.at(dims[1])}"] * 2
    options.append(f"{scene.places[dim]} % 2 == 0")
    return scene.pick(options)


def _some(scene: Scene, dims: str, must: str = "") -> str:
    """Some of the dims, in some order."""
    found = [d for d in dims if d in must or scene.chance(60)] or [scene.pick(dims)]
    if scene.chance(25):
        scene.random.shuffle(found)
    return "".join(found)


def _read(scene: Scene, dims: str) -> str:
    kind = "earlier" if scene.complete and scene.chance(30) else scene.kind(READS)
    dim = scene.pick(dims)
    at, size = scene.at(dim), scene.dims[dim].size
    if kind == "position":
        return f'T.cast({at}, "float32")'
    if kind == "earlier":
        known = [
            p
            for p in scene.made
            if p.dims and all(d in dims for d in p.dims) and p.dtype == "float32" and p.role == "done"
        ]
        states = [(name, over) for name, over in scene.complete if all(d in dims for d in over)]
        if states and (not known or scene.chance(60)):
            return scene.element(*scene.pick(states))
        if known:
            param = scene.pick(known)
            return f"{param.name}[{', '.join(scene.at(d) for d in param.dims)}]"
        kind = "plain"
    around = _some(scene, dims, dim)
    if kind == "table":
        rows = scene.number(2, 13)
        ids = scene.param("ids", [size], [dim], "int32", below=rows)
        rest = [d for d in around if d != dim]
        table = scene.param("Tab", [rows, *(scene.dims[d].size for d in rest)], ["v", *rest])
        return f"{table}[{', '.join([f'{ids}[{at}]', *(scene.at(d) for d in rest)])}]"
    shift = scene.number(1, 4)
    index, length, guard = at, size, ""
    if kind == "groups":
        group = scene.pick((2, 2, 3, 4, scene.dims[dim].block, 2 * scene.dims[dim].block))
        index, length = f"({at}) // {group}", -(-size // group)
        if group == scene.dims[dim].block and scene.chance(50):
            index = scene.places[dim]
    elif kind == "members":
        group = scene.pick((2, 3, scene.dims[dim].block))
        index, length = f"({at}) % {group}", group
    elif kind == "packed":
        name = scene.param(
            "P",
            [-(-scene.dims[d].size // 2) if d == dim else scene.dims[d].size for d in around],
            around,
            "uint8",
            below=256,
        )
        places = ", ".join(f"({at}) // 2" if d == dim else scene.at(d) for d in around)
        return f'T.cast((T.cast({name}[{places}], "int32") >> ((({at}) % 2) * 4)) & 15, "float32")'
    elif kind == "window":
        index, length = f"{at} + {shift}", size + scene.pick((shift, shift, 0))
    elif kind == "margin":
        side = scene.chance(50)
        index = f"{at} - {shift}" if side else f"{at} + {shift}"
        guard = f"{at} >= {shift}" if side else f"{at} < {size - shift}"
    elif kind == "clamped":
        index = scene.pick((f"T.max({at} - {shift}, 0)", f"T.min({at} + {shift}, {size - 1})"))
    elif kind == "roll":
        index = f"({at} + {scene.pick((shift, size - 1))}) % {size}"
    elif kind == "strided":
        step = scene.pick((2, 3))
        index, length = f"({at}) * {step} + {scene.pick((0, 1, shift))}", size * step + scene.pick((0, shift))
    elif kind == "turned":
        index = f"{size - 1} - ({at})"
    elif kind == "staged window":
        return _staged(scene, dim, shift)
    dtype = scene.pick(NARROW) if scene.chance(15) else "float32"
    name = scene.param("A", [length if d == dim else scene.dims[d].size for d in around], around, dtype)
    text = f"{name}[{', '.join(index if d == dim else scene.at(d) for d in around)}]"
    text = text if dtype == "float32" else f'T.cast({text}, "float32")'
    return f"T.if_then_else({guard}, {text}, 0.0)" if guard else text


def _staged(scene: Scene, dim: str, shift: int) -> str:
    """Of a block that was copied with its margin, before the loops over elements."""
    block, size = scene.dims[dim].block, scene.dims[dim].size
    rows = scene.buffer_of("rows", (block + shift,), scope="shared")
    name = scene.param("A", [size + shift], [dim])
    start = scene.start(dim)
    scene.emit(f"T.copy({name}[{start} : {start} + {block + shift}], {rows})")
    element = "0" if block == 1 else {"m": "i", "k": "q", "n": "j"}[dim]
    return scene.pick((f"{rows}[{element} + {shift}]", f"({rows}[{element}] + {rows}[{element} + 1])"))
