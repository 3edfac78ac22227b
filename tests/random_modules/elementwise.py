"""Random operators that work element by element."""

from __future__ import annotations

import math

from .scene import EXACT, FLOATS, Scene, Value

_SMOOTH = {"tanh": 1, "sigmoid": 1, "nn.gelu": None, "nn.silu": None, "erf": 1, "sin": 1}


def unary(scene: Scene) -> None:
    """One operand; whole numbers stay so, or don't."""
    a = scene.find(dtypes=(*FLOATS, "int32", "int64"), empty=True)
    if a is None:
        return
    keep = {"negative": a.bound, "abs": a.bound, "nn.relu": a.bound, "square": a.bound**2}
    if not a.is_float:
        del keep["nn.relu"]
    if a.is_float and a.whole:
        keep |= {"round": a.bound, "floor": a.bound, "sign": 1}
    if scene.chance(15):
        low = scene.number(-3, 0)
        scene.bind(f"R.clip({a.name}, {low}, {low + 4})", a.shape, a.dtype, a.whole, 4)
        return
    names = list(keep) if not a.is_float or scene.chance(75 if a.whole else 40) else list(_SMOOTH)
    name = scene.pick(names)
    if name == "nn.gelu" and a.dtype == "float16":
        name = "tanh"
    bound = keep.get(name) or _SMOOTH[name] or a.bound
    if scene.fits(bound, a.dtype, a.whole):
        scene.bind(f"R.{name}({a.name})", a.shape, a.dtype, a.whole and name in keep, bound)


def root(scene: Scene) -> None:
    """sqrt, rsqrt, exp and log of what they take."""
    a = scene.find(dtypes=("float32",))
    if a is None:
        return
    one = 'R.const(1.0, "float32")'
    kind = scene.pick(("sqrt", "rsqrt", "log", "exp"))
    inside = f"R.add(R.abs({a.name}), {one})" if kind != "exp" else f"R.clip({a.name}, -4, 2)"
    scene.bind(f"R.{kind}({inside})", a.shape, a.dtype, False, 8 if kind == "exp" else a.bound + 1)


def binary(scene: Scene) -> None:
    """Two operands, one of them maybe broadcast."""
    a = scene.find(dtypes=(*FLOATS, "int32", "int64"), empty=True)
    b = a and _partner(scene, a)
    if a is None or b is None:
        return
    name = scene.pick(("add", "add", "subtract", "multiply", "multiply", "maximum", "minimum", "divide"))
    bound = {"multiply": a.bound * b.bound, "divide": a.bound}.get(name, a.bound + b.bound)
    whole = a.whole and b.whole and name != "divide"
    shape = _broadcast(a.shape, b.shape)
    if shape is None or not scene.fits(bound, a.dtype, whole, shape):
        return
    left, right = a.name, b.name
    if name == "divide":
        if a.dtype != "float32":
            return
        right = f'R.add(R.abs({right}), R.const(1.0, "float32"))'
    elif scene.chance(50):
        left, right = right, left
    if not left.startswith("R.const") or not right.startswith("R.const"):
        scene.bind(f"R.{name}({left}, {right})", shape, a.dtype, whole, bound)


def compare(scene: Scene) -> None:
    """A comparison of whole numbers: of others, rounding would decide."""
    a = scene.find(dtypes=(*FLOATS, "int32", "int64"), whole=True)
    b = a and _partner(scene, a)
    if a is not None and b is not None and b.whole:
        name = scene.pick(("greater", "less", "greater_equal", "less_equal", "equal", "not_equal"))
        shape = _broadcast(a.shape, b.shape)
        if shape is not None and math.prod(shape) <= EXACT["float16"]:
            scene.bind(f"R.{name}({a.name}, {b.name})", shape, "bool", True, 1)


def logical(scene: Scene) -> None:
    """Operators on bools."""
    a = scene.find(dtypes=("bool",), empty=True)
    b = a and _partner(scene, a)
    if a is None or b is None:
        return
    if scene.chance(30):
        scene.bind(f"R.logical_not({a.name})", a.shape, "bool", True, 1)
        return
    shape = _broadcast(a.shape, b.shape)
    if shape is not None:
        scene.bind(f"R.{scene.pick(('logical_and', 'logical_or'))}({a.name}, {b.name})", shape, "bool", True, 1)


def where(scene: Scene) -> None:
    """A choice, of operands that may be broadcast."""
    a = scene.find(dtypes=(*FLOATS, "int32", "int64"), empty=True)
    b = a and _partner(scene, a)
    if a is None or b is None:
        return
    masks = [v for v in scene.values if v.dtype == "bool" and _broadcast(v.shape, a.shape)]
    mask = scene.pick(masks) if masks and scene.chance(80) else scene.operand(_part(scene, a.shape), "bool")
    shape = mask and _broadcast(a.shape, b.shape)
    shape = shape and _broadcast(mask.shape, shape)
    if shape and scene.fits(1, a.dtype, True, shape):
        whole = a.whole and b.whole
        scene.bind(f"R.where({mask.name}, {a.name}, {b.name})", shape, a.dtype, whole, max(a.bound, b.bound))


def cast(scene: Scene) -> None:
    """To another dtype that holds the values."""
    a = scene.find(empty=True)
    if a is None:
        return
    wanted = [d for d in EXACT if d not in (a.dtype, "bool") and a.bound <= EXACT[d] and (a.whole or d in FLOATS)]
    if wanted:
        dtype = scene.pick(wanted)
        scene.bind(f'R.astype({a.name}, dtype="{dtype}")', a.shape, dtype, a.whole, a.bound)


def _partner(scene: Scene, a: Value) -> Value | None:
    """A second operand of the same dtype whose shape goes with that of `a`."""
    same = [v for v in scene.values if v.dtype == a.dtype and _broadcast(a.shape, v.shape)]
    if same and scene.chance(60):
        return scene.pick(same[-5:])
    return scene.operand(_part(scene, a.shape), a.dtype)


def _part(scene: Scene, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, or one that is broadcast to it."""
    if scene.chance(35):
        return shape
    part = tuple(1 if scene.chance(35) else size for size in shape)
    return part[scene.number(0, len(part)) :]


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    shape = []
    for d in range(-max(len(a), len(b)), 0):
        m, n = (s[d] if -d <= len(s) else 1 for s in (a, b))
        if m != n and 1 not in (m, n):
            return None
        shape.append(n if m == 1 else m)
    return tuple(shape)
