"""Random operators that move elements."""

from __future__ import annotations

import math

from .scene import Scene, Value


def permute_dims(scene: Scene) -> None:
    a = scene.find(ndim=2, empty=True)
    if a is not None:
        order = list(range(a.ndim))
        scene.random.shuffle(order)
        same_elements(scene, a, f"R.permute_dims({a.name}, axes={order})", [a.shape[d] for d in order])


def reshape(scene: Scene) -> None:
    """Dims are merged, taken apart, or both; sometimes with no dims in common."""
    a = scene.find(ndim=1)
    if a is None:
        return
    shape = list(a.shape)
    for _ in range(scene.number(1, 3)):
        d = scene.number(0, len(shape) - 1)
        if len(shape) > 1 and d + 1 < len(shape) and scene.chance(50):
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        elif len(shape) < 5:
            low = scene.pick([n for n in range(1, shape[d] + 1) if shape[d] % n == 0])
            shape[d : d + 1] = [low, shape[d] // low]
    if scene.chance(15):
        scene.random.shuffle(shape)
    same_elements(scene, a, f"R.reshape({a.name}, R.shape({shape}))", shape)


def expand_or_squeeze(scene: Scene) -> None:
    a = scene.find(empty=True)
    if a is None:
        return
    ones = [d for d, size in enumerate(a.shape) if size == 1]
    if ones and scene.chance(60):
        gone = sorted(scene.some(ones, 1, 2))
        shape = [size for d, size in enumerate(a.shape) if d not in gone]
        same_elements(scene, a, f"R.squeeze({a.name}, axis={gone})", shape)
    elif a.ndim < 4:
        d = scene.number(0, a.ndim)
        same_elements(scene, a, f"R.expand_dims({a.name}, axis={d})", [*a.shape[:d], 1, *a.shape[d:]])


def broadcast_to(scene: Scene) -> None:
    a = scene.find(ndim=1, empty=True)
    if a is not None:
        shape = [scene.size() if size == 1 else size for size in a.shape]
        shape = [scene.size()] * (len(shape) < 4 and scene.chance(50)) + shape
        same_elements(scene, a, f"R.broadcast_to({a.name}, R.shape({shape}))", shape)


def concat(scene: Scene) -> None:
    a = scene.find(ndim=1, empty=True)
    if a is None:
        return
    axis = scene.number(0, a.ndim - 1)
    rest = (*a.shape[:axis], *a.shape[axis + 1 :])
    fit = [
        v
        for v in scene.values
        if v.dtype == a.dtype and v.ndim == a.ndim and (*v.shape[:axis], *v.shape[axis + 1 :]) == rest
    ]
    parts = [a, *(scene.pick(fit) for _ in range(scene.number(1, 2)))]
    scene.random.shuffle(parts)
    shape = [*a.shape[:axis], sum(v.shape[axis] for v in parts), *a.shape[axis + 1 :]]
    whole, bound = all(v.whole for v in parts), max(v.bound for v in parts)
    if scene.fits(bound, a.dtype, whole, shape):
        axis -= a.ndim * scene.chance(30)
        scene.bind(
            f"R.concat(({', '.join(v.name for v in parts)}), axis={axis})", shape, a.dtype, whole, bound
        )  # fmt: skip


def split(scene: Scene) -> None:
    """Into equal parts, or at places; some of the parts are used."""
    a = scene.find(ndim=1)
    if a is None:
        return
    axis = scene.number(0, a.ndim - 1)
    size = a.shape[axis]
    even = [n for n in range(2, size + 1) if size % n == 0 and n < 6]
    if even and scene.chance(60):
        n = scene.pick(even)
        places, text = [size // n * i for i in range(1, n)], str(n)
    else:
        places = sorted(scene.some(range(1, size), 1, 2))
        text = str(places)
    if not places:
        return
    name = scene.fresh()
    scene.line(f"{name} = R.split({a.name}, {text}, axis={axis})")
    ends = [0, *places, size]
    for index in scene.some(range(len(ends) - 1), 1, 3):
        shape = [*a.shape[:axis], ends[index + 1] - ends[index], *a.shape[axis + 1 :]]
        same_elements(scene, a, f"{name}[{index}]", shape)


def strided_slice(scene: Scene) -> None:
    a = scene.find(ndim=1)
    if a is None:
        return
    shape, axes, begins, ends, steps = list(a.shape), [], [], [], []
    for d in sorted(scene.some(range(a.ndim), 1, 2)):
        begin = scene.number(0, a.shape[d] - 1)
        end, step = scene.number(begin + 1, a.shape[d]), scene.pick((1, 1, 2))
        if scene.chance(15):
            end = begin + 1
        if scene.chance(25):
            begin, end, step = 0, a.shape[d], 1
        axes.append(d)
        begins.append(begin)
        ends.append(end)
        steps.append(step)
        shape[d] = -(-(end - begin) // step)
    same_elements(
        scene, a, f"R.strided_slice({a.name}, axes={axes}, begin={begins}, end={ends}, strides={steps})", shape
    )


def take(scene: Scene) -> None:
    """Rows of a table; the indices are a parameter or a constant."""
    a = scene.find(ndim=1)
    if a is None or scene.name != "main":
        return
    axis = scene.number(0, a.ndim - 1)
    shape = scene.shape(1, 2)
    made = [*a.shape[:axis], *shape, *a.shape[axis + 1 :]]
    if math.prod(made) <= 1024 and len(made) < 5:
        index = scene.parameter(shape, scene.pick(("int32", "int64")), below=a.shape[axis])
        same_elements(scene, a, f"R.take({a.name}, {index.name}, axis={axis})", made)


def others(scene: Scene) -> None:
    """Less common ones."""
    a = scene.find(ndim=1, empty=True)
    if a is None:
        return
    axis, times = scene.number(0, a.ndim - 1), scene.number(2, 3)
    longer = [size * times if d == axis else size for d, size in enumerate(a.shape)]
    kind = scene.pick(("flip", "repeat", "tile", "triu", "tril", "stack", "pad"))
    if kind == "flip":
        same_elements(scene, a, f"R.flip({a.name}, axis={axis})", a.shape)
    elif kind == "repeat":
        same_elements(scene, a, f"R.repeat({a.name}, {times}, axis={axis})", longer)
    elif kind == "tile":
        repeats = [times if d == axis else 1 for d in range(a.ndim)]
        same_elements(scene, a, f"R.tile({a.name}, {repeats})", longer)
    elif kind == "stack":
        same_elements(scene, a, f"R.stack(({a.name}, {a.name}), axis={axis})", [*a.shape[:axis], 2, *a.shape[axis:]])
    elif kind == "pad" and a.is_float:
        widths = [w for d in range(a.ndim) for w in ((1, 2) if d == axis else (0, 0))]
        shape = [size + 3 * (d == axis) for d, size in enumerate(a.shape)]
        same_elements(scene, a, f"R.nn.pad({a.name}, pad_width={widths})", shape)
    elif kind in ("triu", "tril") and a.ndim > 1 and a.dtype != "bool":
        same_elements(scene, a, f"R.{kind}({a.name}, {scene.number(-1, 1)})", a.shape)


def same_elements(scene: Scene, a: Value, text: str, shape) -> Value | None:
    """Bind elements of `a` in another shape."""
    if (math.prod(shape) or not a.elements) and scene.fits(a.bound, a.dtype, a.whole, shape):
        return scene.bind(text, shape, a.dtype, a.whole, a.bound)
    return None
