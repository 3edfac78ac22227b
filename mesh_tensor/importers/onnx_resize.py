"""ONNX's Resize as it says where elements are: by rows that are picked, or by products, dim by dim.

TVM's importer knows sizes only: scales that leave a part of an element over, dims before the last two, crops and most
ways to count places it leaves out. What it reads right stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .onnx_nodes import Nodes

_ROUNDED: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda place: np.ceil(place - 0.5),
    "round_prefer_ceil": lambda place: np.floor(place + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
_MOST = 1 << 24  # elements of a matrix


@dataclass(frozen=True)
class _Dim:
    """`size` elements become `made`, each as far from the next as `scale` says; `crop`: where it begins and ends."""

    size: int
    made: int
    scale: float
    crop: tuple[float, float]

    def places(self, how: str) -> np.ndarray:
        """Where the new elements are among the old ones."""
        step, last = np.arange(self.made, dtype=np.float64), self.made - 1
        if how == "align_corners":
            return step * ((self.size - 1) / last) if last else step
        if how == "asymmetric":
            return step / self.scale
        if how == "tf_crop_and_resize":
            start, end = self.crop
            across = (end - start) * (self.size - 1)
            return start * (self.size - 1) + (step * across / last if last else 0.5 * across + step)
        if how == "pytorch_half_pixel" and not last:
            return step
        offset = 0.0
        if how == "half_pixel_symmetric":
            offset = self.size / 2 * (1 - self.made / (self.size * self.scale))
        return offset + (step + 0.5) / self.scale - 0.5

    def matrix(self, places: np.ndarray, mode: str, sharp: float, inside_only: bool) -> np.ndarray:
        """(made, size): how much of every old element is in the new ones."""
        first = np.floor(places).astype(int)
        taps = (0, 1) if mode == "linear" else (-1, 0, 1, 2)
        found = np.zeros((self.made, self.size))
        for tap in taps:
            weight = _weight(np.abs(first + tap - places), mode, sharp)
            at = first + tap
            if inside_only:
                weight = np.where((at >= 0) & (at < self.size), weight, 0)
            np.add.at(found, (np.arange(self.made), at.clip(0, self.size - 1)), weight)
        return found / found.sum(1, keepdims=True) if inside_only else found


def _weight(far: np.ndarray, mode: str, sharp: float) -> np.ndarray:
    """What an element is worth so far away: along a line, or along a cubic that is as `sharp`."""
    if mode == "linear":
        return np.clip(1 - far, 0, None)
    near = ((sharp + 2) * far - (sharp + 3)) * far * far + 1
    return np.where(
        far <= 1, near, np.where(far < 2, ((sharp * far - 5 * sharp) * far + 8 * sharp) * far - 4 * sharp, 0)
    )


def resize(nodes: Nodes) -> bool:
    """The nodes of a Resize or Upsample; not where TVM's importer reads it right, or sizes are open."""
    if nodes.options.get("antialias", 0):
        return False  # which is refused as an option that nothing looks at
    mode = nodes.options.get("mode", b"nearest").decode()
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(mode, mode)
    old = nodes.facts.opset < 11
    how = nodes.options.get("coordinate_transformation_mode", b"asymmetric" if old else b"half_pixel").decode()
    dims, sizes = _dims(nodes, old, how), nodes.facts.sizes(nodes.operand(0))
    if dims is None or sizes is None:
        _check_open(nodes, old, mode, how)
        return False
    changed = {d: dim for d, dim in dims.items() if _changes(dim, how)}
    if not old and _is_usual(nodes, len(sizes), changed, mode, how):
        return False
    _check(nodes, changed, mode, how)
    x = nodes.operand(0)
    for d, dim in changed.items():
        x = _along(nodes, x, dim, d, len(sizes), mode, how)
    for d, dim in changed.items() if how == "tf_crop_and_resize" else ():
        places = dim.places(how)
        inside = ((places >= 0) & (places <= dim.size - 1)).reshape(-1, *[1] * (len(sizes) - d - 1))
        outside = nodes.constant(nodes.options.get("extrapolation_value", 0.0), _dtype(nodes))
        x = x if inside.all() else nodes.emit("Where", [nodes.constant(inside, np.bool_), x, outside])
    nodes.emit("Identity", [x], nodes.node.output[0])
    return True


def _along(nodes: Nodes, x: str, dim: _Dim, d: int, ndim: int, mode: str, how: str) -> str:
    places = dim.places(how)
    if mode == "nearest":
        near = nodes.options.get("nearest_mode", b"floor" if nodes.facts.opset < 11 else b"round_prefer_floor").decode()
        return nodes.emit("Gather", [x, nodes.constant(_ROUNDED[near](places).clip(0, dim.size - 1))], axis=d)
    sharp = nodes.options.get("cubic_coeff_a", -0.75)
    matrix = dim.matrix(places, mode, sharp, bool(nodes.options.get("exclude_outside", 0)))
    return _product(nodes, x, matrix, d, ndim)


def _changes(dim: _Dim, how: str) -> bool:
    return dim.made != dim.size or dim.scale != 1 or (how == "tf_crop_and_resize" and dim.crop != (0, 1))


def _is_usual(nodes: Nodes, ndim: int, changed: Mapping[int, _Dim], mode: str, how: str) -> bool:
    """Whether TVM's importer reads it right: images, to a size that says all."""
    whole = all(math.isclose(dim.size * dim.scale, dim.made, rel_tol=1e-6) for dim in changed.values())
    return ndim == 4 and min(changed, default=2) > 1 and whole and _is_known(nodes, mode, how)


def _is_known(nodes: Nodes, mode: str, how: str) -> bool:
    """Whether TVM's importer has that way to count places."""
    other = "axes" in nodes.options or any(name in nodes.options for name in _OTHERS) and mode == "cubic"
    return not other and (how in ("half_pixel", "align_corners") or (how == "asymmetric" and mode == "nearest"))


def _check_open(nodes: Nodes, old: bool, mode: str, how: str) -> None:
    """Refuse what TVM's importer would read wrong for some sizes: all but images, to stated sizes or as large several
    times. What is not stated, but computed, is left to it."""
    sizes, scales, made = nodes.facts.sizes(nodes.operand(0)), _stated(nodes, "scales", 1 if old else 2), None
    if scales is None:
        made = _stated(nodes, "sizes", 3)
    stated = made if scales is None else scales
    if stated is None:
        return
    kept = [1, 1] if made is None else (sizes or [])[:2]
    whole = made is not None or bool((stated % 1 == 0).all())
    if len(stated) != 4 or [*stated[:2]] != kept or not whole or not _is_known(nodes, mode, how):
        what = f"scales {[float(scale) for scale in stated]}" if made is None else f"sizes {[*map(int, stated)]}"
        nodes.refuse(
            f"{mode} elements by {how} of a tensor of shape {sizes}, by {what}", "settle its sizes by `shapes`"
        )


_OTHERS = ("cubic_coeff_a", "exclude_outside")


def _check(nodes: Nodes, changed: Mapping[int, _Dim], mode: str, how: str) -> None:
    """Refuse what ONNX's documents don't settle, and matrices that are too large."""
    fix = "export it with sizes, half pixels and without these"
    if mode != "nearest" and _dtype(nodes).kind != "f":
        nodes.refuse(f"{mode} elements of {_dtype(nodes)}", "cast it to float32 before")
    if mode == "linear" and nodes.options.get("exclude_outside", 0):
        nodes.refuse("linear elements with exclude_outside", fix)
    for dim in changed.values():
        if how == "align_corners" and not math.isclose(dim.size * dim.scale, dim.made, rel_tol=1e-6):
            nodes.refuse(f"aligned corners of {dim.size} elements times {dim.scale}", fix)
        if mode != "nearest" and dim.size * dim.made > _MOST:
            nodes.refuse(f"{mode} elements of {dim.size}, to {dim.made} by {how}", fix)


def _dims(nodes: Nodes, old: bool, how: str) -> dict[int, _Dim] | None:
    """The dims that it may change; None if their sizes, or what they become, are open."""
    sizes = nodes.facts.sizes(nodes.operand(0))
    scales, made = _stated(nodes, "scales", 1 if old else 2), _stated(nodes, "sizes", 3)
    if sizes is None or (scales is None and made is None):
        return None
    axes = [int(axis) % len(sizes) for axis in nodes.options.get("axes", range(len(sizes)))]
    crop = _stated(nodes, "roi", 1) if how == "tf_crop_and_resize" else None
    ends = np.array([[0.0] * len(axes), [1.0] * len(axes)]) if crop is None else crop.reshape(2, -1)
    if scales is not None:
        kept = [n for n in range(len(axes)) if scales[n] != 1 or crop is not None]
        axes, scales, ends = [axes[n] for n in kept], scales[kept], ends[:, kept]
    whole = [size for size in (sizes[axis] for axis in axes) if isinstance(size, int)]
    if len(whole) < len(axes):
        return None
    if scales is None:
        assert made is not None
        scales, made = _ratios(made / np.array(whole), made, whole, nodes.options.get("keep_aspect_ratio_policy", b""))
    else:
        made = np.floor(np.array(whole) * scales.astype(np.float64))
    parts = zip(whole, made, scales, ends.T, strict=True)
    found = [_Dim(size, int(to), float(scale), (float(a), float(b))) for size, to, scale, (a, b) in parts]
    return dict(zip(axes, found, strict=True))


def _ratios(scales: np.ndarray, made: np.ndarray, whole: list[int], policy: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Scales and sizes where dims may have to keep their ratio."""
    if policy not in (b"not_larger", b"not_smaller"):
        return scales, made
    scale = scales.min() if policy == b"not_larger" else scales.max()
    return np.full(len(whole), scale), np.floor(scale * np.array(whole) + 0.5)


def _stated(nodes: Nodes, name: str, number: int) -> np.ndarray | None:
    """The numbers of an operand, or, long ago, of an option; None if there are none, or they are not known."""
    given = np.array(nodes.options[name], np.float32) if name in nodes.options else nodes.known(number)
    return given if given is not None and given.size else None


def _dtype(nodes: Nodes) -> np.dtype[Any]:
    return nodes.facts.dtype(nodes.onnx, nodes.operand(0))


def _product(nodes: Nodes, x: str, matrix: np.ndarray, d: int, ndim: int) -> str:
    if d == ndim - 2:
        return nodes.emit("MatMul", [nodes.constant(matrix, _dtype(nodes)), x])
    turned = nodes.constant(matrix.T, _dtype(nodes))
    if d == ndim - 1:
        return nodes.emit("MatMul", [x, turned])
    order = [*range(d), ndim - 1, *range(d + 1, ndim - 1), d]
    product = nodes.emit("MatMul", [nodes.emit("Transpose", [x], perm=order), turned])
    return nodes.emit("Transpose", [product], perm=order)
