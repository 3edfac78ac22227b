"""Random operators that combine elements: products, reductions, normalisations."""

from __future__ import annotations

import math

from .scene import FLOATS, Scene


def matmul(scene: Scene) -> None:
    """Of vectors, matrices and batches, which may be broadcast."""
    a = scene.find(dtypes=FLOATS, ndim=1)
    if a is None:
        return
    k, batch = a.shape[-1], a.shape[:-2]
    shape: tuple[int, ...] = (k, scene.size()) if scene.chance(85) or a.ndim == 1 else (k,)
    if len(shape) == 2 and batch and scene.chance(50):
        more = tuple(1 if scene.chance(30) else size for size in batch)
        shape = (*more[scene.number(0, len(more)) :], *shape)
    b = scene.operand(shape, a.dtype)
    if b is None:
        return
    whole, bound = a.whole and b.whole, a.bound * b.bound * k
    rows = a.shape[-2:-1]
    result = (*batch, *rows, *(shape[-1:] if len(shape) > 1 else ()))
    if scene.fits(bound, a.dtype, whole, result):
        made = scene.bind(f"R.matmul({a.name}, {b.name})", result, a.dtype, whole, bound)
        scene.pending(made, {a.name: a.ndim - 1, b.name: max(0, b.ndim - 2)})


def two_sums(scene: Scene) -> None:
    """Two sums over the same dims of the same operand, and something of one or both."""
    a = scene.find(dtypes=("float32",), ndim=2)
    if a is None:
        return
    axis = scene.number(0, a.ndim - 1)
    bound = a.bound * a.shape[axis]
    shape = [size for d, size in enumerate(a.shape) if d != axis]
    if not scene.fits(9 * bound**2, a.dtype, a.whole):
        return
    first = scene.bind(f"R.sum({a.name}, axis=[{axis}])", shape, a.dtype, a.whole, bound)
    second = scene.bind(f"R.sum(R.negative({a.name}), axis=[{axis}])", shape, a.dtype, a.whole, bound)
    mask, other = scene.operand(shape, "bool"), scene.operand(shape, "float32")
    if mask is None or other is None:
        return
    text = scene.pick(
        [
            f"R.{scene.pick(('add', 'subtract', 'maximum', 'multiply'))}({first.name}, {second.name})",
            f"R.{scene.pick(('add', 'subtract', 'maximum', 'multiply'))}({first.name}, {other.name})",
            f"R.where({mask.name}, {first.name}, {second.name})",
            f"R.where({mask.name}, {first.name}, {other.name})",
            f"R.nn.{scene.pick(('relu', 'gelu', 'silu'))}({first.name})",
            f"R.concat(({first.name}, {scene.pick((second, other)).name}), axis=0)",
        ]
    )
    if "concat" in text:
        shape = [2 * shape[0], *shape[1:]]
    whole = a.whole and (other.whole or other.name not in text) and "lu(" not in text.replace("relu(", "")
    made = scene.bind(text, shape, a.dtype, whole, 3 * bound * max(bound, other.bound))
    scene.pending(made, {a.name: axis})


def gram(scene: Scene) -> None:
    """A matrix times its own transpose."""
    a = scene.find(dtypes=FLOATS, ndim=2)
    if a is not None:
        order = [*range(a.ndim - 2), a.ndim - 1, a.ndim - 2]
        shape, bound = (*a.shape[:-1], a.shape[-2]), a.bound**2 * a.shape[-1]
        if scene.fits(bound, a.dtype, a.whole, shape):
            scene.bind(f"R.matmul({a.name}, R.permute_dims({a.name}, axes={order}))", shape, a.dtype, a.whole, bound)


def reduce(scene: Scene) -> None:
    """Along some dims, kept or not."""
    a = scene.find(dtypes=(*FLOATS, "int32", "int64"), ndim=1, empty=True)
    if a is None:
        return
    axes = sorted(scene.some(range(a.ndim), 1, a.ndim))
    count = math.prod(a.shape[d] for d in axes)
    keep = scene.chance(40)
    shape = [1 if d in axes else size for d, size in enumerate(a.shape) if keep or d not in axes]
    bounds = {"sum": a.bound * count, "max": a.bound, "min": a.bound, "prod": a.bound ** min(count, 40)}
    if a.dtype == "float32":
        bounds |= {"mean": a.bound, "variance": a.bound**2}
    if not a.elements:
        bounds = {"sum": a.bound, "prod": a.bound}
    names = [name for name, bound in bounds.items() if scene.fits(bound, a.dtype, a.whole)]
    if not names:
        return
    name = scene.pick(names)
    written = "None" if len(axes) == a.ndim and scene.chance(50) else str([d - a.ndim * scene.chance(20) for d in axes])
    whole = a.whole and name not in ("mean", "variance")
    made = scene.bind(f"R.{name}({a.name}, axis={written}, keepdims={keep})", shape, a.dtype, whole, bounds[name])
    scene.pending(made, {a.name: axes[0]})


def along(scene: Scene) -> None:
    """Operators along one dim."""
    a = scene.find(dtypes=("float32",), ndim=1)
    if a is None:
        return
    axis = scene.number(0, a.ndim - 1)
    name = scene.pick(("nn.softmax", "nn.log_softmax", "cumsum", "argmax"))
    if name == "argmax":
        if a.whole and scene.chance(50):
            shape = [size for d, size in enumerate(a.shape) if d != axis]
            scene.bind(f"R.argmax({a.name}, axis={axis})", shape, "int64", True, a.shape[axis])
        return
    bound = {"nn.softmax": 1, "nn.log_softmax": 2 * a.bound + 8}.get(name, a.bound * a.shape[axis])
    whole = a.whole and name == "cumsum"
    if scene.fits(bound, a.dtype, whole):
        scene.bind(f"R.{name}({a.name}, axis={axis})", a.shape, a.dtype, whole, bound)


def normalize(scene: Scene) -> None:
    """Layer, RMS and group normalisation."""
    a = scene.find(dtypes=("float32",), ndim=2)
    if a is None:
        return
    if scene.chance(25):
        _group_norm(scene, a)
        return
    count = scene.pick((1, 1, 2)) if a.ndim > 2 else 1
    axes = list(range(-count, 0))
    scale, shift = (scene.operand(a.shape[-count:], "float32") for _ in range(2))
    if scale is None or shift is None:
        return
    bound = scale.bound * 30 + shift.bound
    if scene.chance(50):
        scene.bind(f"R.nn.rms_norm({a.name}, {scale.name}, axes={axes})", a.shape, a.dtype, False, bound)
    else:
        text = f"R.nn.layer_norm({a.name}, {scale.name}, {shift.name}, axes={axes})"
        scene.bind(text, a.shape, a.dtype, False, bound)


def _group_norm(scene: Scene, a) -> None:
    groups = scene.pick([n for n in range(1, a.shape[1] + 1) if a.shape[1] % n == 0])
    scale, shift = (scene.operand(a.shape[1:2], "float32") for _ in range(2))
    if scale is not None and shift is not None and a.ndim > 2:
        text = f"R.nn.group_norm({a.name}, {scale.name}, {shift.name}, {groups}, 1, {list(range(2, a.ndim))})"
        scene.bind(text, a.shape, a.dtype, False, scale.bound * 30 + shift.bound)


def made(scene: Scene) -> None:
    """Tensors out of nothing."""
    shape = list(scene.shape(1, 3))
    if scene.chance(60):
        kind = scene.pick(("zeros", "ones"))
        scene.bind(f'R.{kind}(R.shape({shape}), "float32")', shape, "float32", True, 1)
    else:
        size = scene.size()
        scene.bind(f'R.arange(0, {size}, 1, "float32")', [size], "float32", True, size)
