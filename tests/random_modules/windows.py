"""Random operators that read around a place, and that read or write where data says."""

from __future__ import annotations

import json
import math

from .moves import same_elements
from .scene import Scene, Value


def shift(scene: Scene) -> None:
    """A roll, or what neighbours differ by."""
    a = scene.find(ndim=1)
    if a is None or 0 in a.shape:
        return
    d = scene.number(0, a.ndim - 1)
    if scene.chance(60):
        dims = scene.some(range(a.ndim), 1, 2)
        shifts = [scene.number(-a.shape[dim] - 1, a.shape[dim] + 1) for dim in dims]
        same_elements(scene, a, _of_torch("roll.default", a, [shifts, dims], a.shape), a.shape)
    elif a.shape[d] > 1 and a.dtype != "bool":
        far = scene.number(1, a.shape[d] - 1)
        shape = [size - far if dim == d else size for dim, size in enumerate(a.shape)]
        parts = [
            same_elements(scene, a, f"R.strided_slice({a.name}, axes=[{d}], begin=[{low}], end=[{high}])", shape)
            for low, high in ((far, a.shape[d]), (0, a.shape[d] - far))
        ]
        if None not in parts and scene.fits(2 * a.bound, a.dtype, a.whole, shape):
            text = f"R.subtract({', '.join(part.name for part in parts if part)})"
            scene.bind(text, shape, a.dtype, a.whole, 2 * a.bound)


def unfold(scene: Scene) -> None:
    """Windows become a dim."""
    a = scene.find(ndim=1)
    if a is None or a.ndim > 3 or 0 in a.shape:
        return
    d = scene.number(0, a.ndim - 1)
    size, step = scene.number(1, a.shape[d]), scene.number(1, 3)
    shape = [(n - size) // step + 1 if dim == d else n for dim, n in enumerate(a.shape)]
    same_elements(scene, a, _of_torch("unfold.default", a, [d, size, step], (*shape, size)), (*shape, size))


def convolution(scene: Scene) -> None:
    """A convolution, or the largest of windows, over lines or images: what there is, or a new image."""
    a = scene.find(dtypes=("float32",), ndim=3)
    if a is None or a.ndim > 4 or 0 in a.shape:
        if scene.name != "main" or len(scene.params) > 5:
            return
        a = scene.parameter(
            (scene.number(1, 2), scene.number(1, 3), *(scene.size() for _ in range(scene.number(1, 2))))
        )
    spatial = a.shape[2:]
    kernel = [scene.number(1, min(4, size)) for size in spatial]
    strides = [scene.number(1, 2) for _ in spatial]
    padding = [scene.number(0, size // 2) for size in kernel]
    out = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(spatial, kernel, strides, padding, strict=True)]
    options = f"strides={strides}, padding={padding * 2}"
    if scene.chance(40):
        text = f"R.nn.max_pool{len(spatial)}d({a.name}, pool_size={kernel}, {options})"
        same_elements(scene, a, text, (*a.shape[:2], *out))
        return
    shape = (a.shape[0], scene.number(1, 3), *out)
    weight = scene.operand((shape[1], a.shape[1], *kernel), "float32")
    if weight is None:
        return
    whole, bound = a.whole and weight.whole, a.bound * weight.bound * math.prod((a.shape[1], *kernel))
    if scene.fits(bound, a.dtype, whole, shape):
        scene.bind(f"R.nn.conv{len(spatial)}d({a.name}, {weight.name}, {options})", shape, a.dtype, whole, bound)


def pad(scene: Scene) -> None:
    """With numbers around, or going on at the other end."""
    a = scene.find(dtypes=("float32",), ndim=1)
    if a is None or 0 in a.shape:
        return
    widths = [scene.number(0, 3) * scene.chance(60) for _ in range(2 * a.ndim)]
    shape = [n + low + high for n, low, high in zip(a.shape, widths[::2], widths[1::2], strict=True)]
    value = scene.pick((0.0, 0.0, 2.0, -1.0))
    same_elements(scene, a, f'R.nn.pad({a.name}, pad_width={widths}, pad_mode="constant", pad_value={value})', shape)


def slice_scatter(scene: Scene) -> None:
    a = scene.find(ndim=1)
    if a is None or 0 in a.shape:
        return
    d = scene.number(0, a.ndim - 1)
    begin = scene.number(0, a.shape[d] - 1)
    end, step = scene.number(begin + 1, a.shape[d]), scene.pick((1, 1, 2))
    shape = [-(-(end - begin) // step) if dim == d else n for dim, n in enumerate(a.shape)]
    source = scene.operand(shape, a.dtype)
    if source is not None:
        text = f"R.slice_scatter({a.name}, {source.name}, {begin}, {end}, {step}, axis={d})"
        scene.bind(text, a.shape, a.dtype, a.whole and source.whole, max(a.bound, source.bound))


def looked_up(scene: Scene) -> None:
    """Elements along a dim, from where a parameter says."""
    found = _with_index(scene)
    if found is not None:
        a, d, shape, index = found
        same_elements(scene, a, f"R.gather_elements({a.name}, {index}, axis={d})", shape)


def scattered(scene: Scene) -> None:
    """Elements along a dim, to where a parameter says: added, or the largest kept."""
    found = _with_index(scene)
    if found is None:
        return
    a, d, shape, index = found
    updates = scene.operand(shape, a.dtype)
    if updates is None or a.dtype == "bool":
        return
    how = scene.pick(("add", "max"))
    bound = a.bound + shape[d] * updates.bound if how == "add" else max(a.bound, updates.bound)
    whole = a.whole and updates.whole
    if scene.fits(bound, a.dtype, whole, a.shape):
        text = f'R.scatter_elements({a.name}, {index}, {updates.name}, axis={d}, reduction="{how}")'
        scene.bind(text, a.shape, a.dtype, whole, bound)


def _with_index(scene: Scene) -> tuple[Value, int, list[int], str] | None:
    """A tensor, a dim of it, and a new parameter of places there, of some shape."""
    a = scene.find(ndim=1)
    if a is None or scene.name != "main" or len(scene.params) > 5 or 0 in a.shape:
        return None
    d = scene.number(0, a.ndim - 1)
    shape = [scene.number(1, 5) if dim == d else n for dim, n in enumerate(a.shape)]
    return a, d, shape, scene.parameter(shape, "int64", below=a.shape[d]).name


def _of_torch(name: str, a: Value, args: list, shape) -> str:
    """A call of torch's own operator."""
    text = json.dumps([[{"tensor": 0}, *args], {}])
    info = f'R.Tensor({tuple(shape)}, dtype="{a.dtype}")'
    return f"R.call_pure_packed(\"aten.{name}\", {a.name}, R.str('{text}'), sinfo_args=({info},))"
