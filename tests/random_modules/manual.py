"""Random manual computations: functions on tiles, with collectives, called in main and in one another."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

from .scene import FLOATS, Scene, Value

Text = Callable[..., str]


def computation(scene: Scene, emit: Callable[[Scene], None], function_text: Text) -> None:
    """A call of a new function on the tiles of one or two values."""
    free = [axis for axis in scene.shared.mesh if axis not in scene.devices]
    if not free or (scene.name != "main" and not scene.devices) or scene.shared.started > 4:
        return
    axes = [axis for axis in free if scene.chance(70)] or free[:1]
    found = [scene.find(ndim=1, empty=True) for _ in range(scene.number(1, 2))]
    args = [a for a in dict.fromkeys(found) if a is not None]
    if not args:
        return
    layouts = [_layout(scene, a.shape, axes) for a in args]
    name = f"f{scene.shared.started}"
    scene.shared.started += 1
    inner = Scene(scene.shared, name)
    inner.may_branch, inner.devices = False, (*scene.devices, *axes)
    params = []
    for index, (arg, layout) in enumerate(zip(args, layouts, strict=True)):
        shape = _tile(scene, arg.shape, layout)
        params.append(replace(arg, name=f"{name}_a{index}", shape=shape, bound=max(arg.bound, 4.0)))
        inner.values.append(params[-1])
    for number in range(scene.number(2, 5)):
        (collective if number == 1 or scene.chance(30) else emit)(inner)
    results = [value for value in inner.named[-2:] if value.ndim and 0 not in value.shape]
    ends = [{axis: scene.number(0, value.ndim - 1) for axis in axes} for value in results]
    wholes = [_whole(scene, value.shape, end) for value, end in zip(results, ends, strict=True)]
    if not results or max(map(math.prod, wholes)) > 4096:
        return
    typed = [f'{p.name}: R.Tensor({p.shape}, "{p.dtype}")' for p in params]
    returned = ", ".join(v.name for v in results)
    returned = f"({returned})" if len(results) > 1 else returned
    scene.shared.texts.append(function_text("@R.function(private=True)", name, typed, inner, returned))
    sizes = {axis: scene.shared.mesh[axis] for axis in axes}
    said = {"body": name, "axes": sizes, "in": [_text(axes, one) for one in layouts]}
    text = json.dumps({**said, "out": [_text(axes, one) for one in ends]})
    infos = ", ".join(f'R.Tensor({shape}, dtype="{v.dtype}")' for v, shape in zip(results, wholes, strict=True))
    infos = f"R.Tuple({infos})" if len(results) > 1 else infos
    called = f"R.call_pure_packed(\"mesh.manual_computation\", {', '.join(a.name for a in args)}, R.str('{text}'),"
    called += f" sinfo_args=({infos},))"
    if len(results) == 1:
        scene.bind(called, wholes[0], results[0].dtype, results[0].whole, results[0].bound)
        return
    made = scene.fresh()
    scene.line(f"{made} = {called}")
    for index, (value, shape) in enumerate(zip(results, wholes, strict=True)):
        scene.bind(f"{made}[{index}]", shape, value.dtype, value.whole, value.bound)


def collective(scene: Scene) -> None:
    """A collective of what devices have."""
    if not scene.devices:
        return
    a = scene.find(dtypes=(*FLOATS, "int32"), ndim=1)
    if a is None or 0 in a.shape:
        return
    axes = scene.some(scene.devices, 1, 2)
    axes = [axis for axis in scene.shared.mesh if axis in axes]
    count = math.prod(scene.shared.mesh[axis] for axis in axes)
    scene.pick(_KINDS)(scene, a, axes, count)


def _reduce(scene: Scene, a: Value, axes: list[str], count: int) -> None:
    op = scene.pick(("sum", "sum", "min", "max"))
    bound = a.bound * (count if op == "sum" else 1)
    if scene.fits(bound, a.dtype, a.whole):
        _bind(scene, "all_reduce", a, axes, a.shape, bound, op=op)


def _gather(scene: Scene, a: Value, axes: list[str], count: int) -> None:
    d = scene.number(0, a.ndim - 1)
    _bind(scene, "all_gather", a, axes, _sized(a.shape, d, count), a.bound, dim=d)


def _scatter(scene: Scene, a: Value, axes: list[str], count: int) -> None:
    dims = [d for d, size in enumerate(a.shape) if size % count == 0]
    if not dims:
        return
    d, kind = scene.pick(dims), scene.pick(("reduce_scatter", "scatter", "all_to_all"))
    shape, bound = _sized(a.shape, d, 1, count), a.bound
    said = {"dim": d, "root": scene.number(0, count - 1)}
    if kind == "reduce_scatter":
        bound *= count
    if kind == "all_to_all":
        other = scene.number(0, a.ndim - 1)
        shape, said = _sized(shape, other, count), {"dim": d, "dst_dim": other}
    if scene.fits(bound, a.dtype, a.whole):
        _bind(scene, kind, a, axes, shape, bound, **said)


def _move(scene: Scene, a: Value, axes: list[str], count: int) -> None:
    if scene.chance(40):
        _bind(scene, "broadcast", a, axes, a.shape, a.bound, root=scene.number(0, count - 1))
        return
    axis = axes[:1]
    size, far = scene.shared.mesh[axis[0]], scene.number(0, 3)
    pairs = [[n, (n + far) % size] for n in range(size) if scene.chance(80)]
    if scene.chance(30):
        ends = [target for _, target in pairs]
        scene.random.shuffle(ends)
        pairs = [[source, target] for (source, _), target in zip(pairs, ends, strict=True)]
    _bind(scene, "permute", a, axis, a.shape, a.bound, pairs=pairs)


_KINDS = (_reduce, _gather, _scatter, _scatter, _move)


def _bind(scene: Scene, kind: str, a: Value, axes: list[str], shape, bound: float, **said: object) -> None:
    if math.prod(shape) > 1024:
        return
    text = json.dumps({"axes": {axis: scene.shared.mesh[axis] for axis in axes}, **said})
    info = f'R.Tensor({tuple(shape)}, dtype="{a.dtype}")'
    call = f"R.call_pure_packed(\"mesh.comm.{kind}\", {a.name}, R.str('{text}'), sinfo_args=({info},))"
    scene.bind(call, shape, a.dtype, a.whole, bound)


def _layout(scene: Scene, shape: tuple[int, ...], axes: list[str]) -> dict[str, int]:
    """What axes split of a shape, where they divide it."""
    found: dict[str, int] = {}
    for axis in axes:
        tile, size = _tile(scene, shape, found), scene.shared.mesh[axis]
        dims = [d for d, n in enumerate(tile) if n and n % size == 0]
        if dims and scene.chance(85):
            found[axis] = scene.pick(dims)
    return found


def _tile(scene: Scene, shape: tuple[int, ...], layout: dict[str, int]) -> tuple[int, ...]:
    parts = [math.prod(scene.shared.mesh[a] for a, dim in layout.items() if dim == d) for d in range(len(shape))]
    return tuple(size // count for size, count in zip(shape, parts, strict=True))


def _whole(scene: Scene, shape: tuple[int, ...], layout: dict[str, int]) -> tuple[int, ...]:
    parts = [math.prod(scene.shared.mesh[a] for a, dim in layout.items() if dim == d) for d in range(len(shape))]
    return tuple(size * count for size, count in zip(shape, parts, strict=True))


def _sized(shape: tuple[int, ...], dim: int, times: int, over: int = 1) -> tuple[int, ...]:
    return tuple(size * times // over if d == dim else size for d, size in enumerate(shape))


def _text(axes: list[str], layout: dict[str, int]) -> str:
    return ", ".join(f"S[{layout[axis]}]" if axis in layout else "R" for axis in axes)
