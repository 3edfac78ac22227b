"""Random kernels, meshes, and how a kernel's parameters lie on them: one case per number, and all as a strategy."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from .scene import Axis, Dim, Scene, Tile
from .spec import BARRIER, Case, KernelSpec, Line, Param, render
from .stores import Stores
from .views import with_views

_GRID_NAMES = ("bx", "by", "bz")


def make_kernel(random: Random) -> tuple[KernelSpec, bool]:
    """A global-view kernel in which every element of an output has one meaning, whatever order programs run in; and
    whether small integers make all its values exact."""
    scene = Scene(random)
    scene.dtype = scene.pick(("float32",) * 8 + ("int32",))
    scene.exact = scene.dtype == "int32" or not scene.chance(30)
    scene.plain = scene.chance(65)
    _draw_dims(scene)
    _draw_grid(scene)
    stores = Stores(scene)
    for _ in range(scene.number(1, 4)):
        _phase(stores)
    if not scene.tiles:
        stores.load()
    written = sum(p.role != "in" for p, _ in scene.params.values())
    rest = _worth_storing(scene, 1 if not written else 0)
    for tile in [*rest, *(t for t in scene.tiles if t.home and t not in rest)]:
        stores.store(tile)
    lines = _with_barrier(scene) if scene.chance(25) else scene.lines
    spec = KernelSpec(scene.sorted_params(), tuple(scene.grid), tuple(scene.buffers), tuple(lines))
    return spec, scene.exact


def _with_barrier(scene: Scene) -> list[Line]:
    """The body with a barrier of the whole grid, where nothing that programs hold is used on both sides, if anywhere:
    as programs have nothing to do with each other, it changes nothing."""

    def names(lines: list[Line]) -> set[str]:
        return set(re.findall(r"\w+", "\n".join(text for line in lines for text in render(line, 0))))

    def held(lines: list[Line]) -> set[str]:
        bound = {line.split(" = ")[0] for line in lines if isinstance(line, str) and re.match(r"\w+ = ", line)}
        return names(lines) & (bound | {buffer.name for buffer in scene.buffers})

    lines = list(scene.lines)
    ends = [n for n in range(1, len(lines)) if isinstance(lines[n], str) or lines[n].header != "else"]
    places = [n for n in ends if held(lines[:n]).isdisjoint(names(lines[n:]))]
    if not places:
        return lines
    place = scene.pick(places)
    return [*lines[:place], BARRIER, *lines[place:]]


def _worth_storing(scene: Scene, least: int) -> list[Tile]:
    """Some tiles, those made last and those that all programs of the grid have a part of before others."""
    apart = [t for t in scene.tiles[::-1] if all(a in t.axes for a in scene.grid_axes)]
    rest = [t for t in scene.tiles[::-1] if t not in apart]
    found = scene.some(apart[:3], min(least, len(apart)), 2)
    return found + scene.some(rest[:3], 0 if found else least, 1)


def _draw_dims(scene: Scene) -> None:
    for name in ("m", "n", "k")[: scene.pick((2, 2, 2, 1, 3, 3, 3))]:
        block = scene.pick((4, 4, 8, 8, 16, 2, 3, 1))
        known = [d.size for d in scene.dims]
        kind = scene.pick(("blocks", "blocks", "free", "free", "free", "large", "same", "one"))
        size = {
            "blocks": block * scene.pick((2, 1, 3, 4)),
            "same": scene.pick(known or [8]),
            "one": 1,
            "large": scene.number(1, 40),
            "free": scene.number(1, 3 * block + 2),
        }[kind]
        while size > 8 * block:
            block *= 2
        scene.dims.append(Dim(name, size, block))


def _draw_grid(scene: Scene) -> None:
    """Which dims the grid's programs share out, and by which map."""
    count = scene.pick((1, 1, 1, 1, 2, 2, 2, 0, 3))
    if count == len(scene.dims) > 1 and not scene.chance(30):
        count -= 1
    walked = scene.some(scene.dims, min(count, len(scene.dims)), count)
    if len(walked) == 2 and scene.chance(10):
        a, b = walked
        scene.grid.append(("pid", a.blocks * b.blocks))
        scene.open += [_grid_axis(a, f"(pid // {b.blocks})"), _grid_axis(b, f"(pid % {b.blocks})")]
    else:
        for name, dim in zip(_GRID_NAMES, walked, strict=False):
            scene.grid.append((name, dim.blocks))
            turned = dim.blocks > 1 and scene.chance(5)
            base = f"({dim.blocks - 1} - {name}) * {dim.block}" if turned else ""
            scene.open.append(_grid_axis(dim, name, base))
    if not scene.grid:
        scene.grid.append(("bx", 1))
    scene.grid_axes = list(scene.open)


def _grid_axis(dim: Dim, var: str, base: str = "") -> Axis:
    return Axis(dim, dim.block, base or (var if dim.block == 1 else f"{var} * {dim.block}"), var)


def _phase(stores: Stores) -> None:
    """One step of the kernel's body, at its outermost level, now and then in a branch."""
    scene = stores.scene
    if not scene.grid_axes or not scene.chance(6):
        _step(stores)
        return
    for header in (f"if {stores.expressions({}).block_condition()}", "else")[: scene.pick((1, 1, 2))]:
        before, scalars = list(scene.tiles), list(scene.scalars)
        scene.guarded += 1
        with scene.block(header):
            _step(stores)
        scene.guarded -= 1
        scene.scalars = scalars
        for tile in [tile for tile in scene.tiles if tile not in before]:
            scene.drop(tile)


def _step(stores: Stores) -> None:
    scene = stores.scene
    kinds = ["walk"] * 4 + ["load", "compute", "product", *(["split"] if scene.grid_axes else [])]
    if scene.tiles:
        kinds += ["modify"] * 3 + ["reduce"] * 3 + ["store", "drop", "scan", "scalar"]
    kind = scene.pick(kinds)
    if kind == "walk":
        free = [d for d in scene.dims if all(a.dim is not d for a in scene.open)]
        dims = scene.dims if not free or scene.chance(10) else free
        for result in stores.walk(scene.pick(dims)):
            if scene.chance(50):
                stores.modify(result)
    elif kind in ("load", "compute"):
        tile = stores.load() if kind == "load" else stores.compute()
        if scene.chance(30):
            stores.modify(tile)
    elif kind == "reduce":
        tile = scene.pick(scene.tiles[::-1])
        if tile.axes:
            result = stores.reduce(tile, scene.pick(tile.axes), scene.pick(("sum", "sum", "max", "min", "prod")))
            if scene.chance(50):
                stores.modify(result if scene.plain else scene.pick((result, tile)))
    elif kind in ("product", "split", "scalar"):
        {"product": stores.product, "split": stores.split_reduction, "scalar": stores.scalar}[kind]()
    else:
        act = {"modify": stores.modify, "store": stores.store, "drop": scene.drop, "scan": stores.scan}
        act[kind](scene.pick(scene.tiles[::-1]))


# -- meshes and shardings ------------------------------------------------------------------------------------------

MESHES = (
    (2,),
    (2,),
    (3,),
    (4,),
    (2, 2),
    (2, 2),
    (2, 3),
    (3, 2),
    (1, 2),
    (2, 4),
    (2, 2, 2),
    (1,),
    (2, 1, 3),
    (5,),
    (8,),
)


def make_shardings(random: Random, params: tuple[Param, ...], mesh: dict[str, int]) -> dict[str, dict]:
    """For each parameter, per axis, a dim or None: mostly the same logical dim for all of them, as people do it, or
    any. Some parameters are not annotated."""
    logical = sorted({dim for param in params for dim in param.dims})
    reduced = [dim for dim in logical if all(dim not in p.dims for p in params if p.role != "in")]
    common = {axis: random.choice(reduced if reduced and random.random() < 0.5 else logical) for axis in mesh}
    follow = random.choice((1.0, 1.0, 0.7, 0.0))
    found: dict[str, dict] = {}
    for param in params:
        if random.random() < 0.12 and (found or param is not params[-1]):
            continue
        wanted = common if random.random() < follow else {}
        lies = {axis: _lies(random, param, wanted.get(axis)) for axis in mesh}
        found[param.name] = _stated(random, param, lies)
    return found


def _lies(random: Random, param: Param, wanted: str | None) -> int | None:
    if wanted is not None:
        return param.dims.index(wanted) if wanted in param.dims else None
    ndim = len(param.shape)
    return random.choice([None, *range(ndim), *range(ndim)])


def _stated(random: Random, param: Param, lies: dict[str, int | None]) -> dict:
    """The annotation of one parameter, now and then with `replicate` or `partial`."""
    free = [axis for axis, dim in lies.items() if dim is None]
    if not free or random.random() < 0.92:
        return {axis: dim for axis, dim in lies.items() if dim is not None or random.random() < 0.5}
    sharding = {axis: dim for axis, dim in lies.items() if dim is not None}
    if param.role != "inout" and random.random() < 0.5:
        return {"sharding": sharding, "partial": {free[0]: random.choice(["sum", "max"])}}
    return {"sharding": sharding, "replicate": (free[0],)}


def make_case(number: int) -> Case:
    """The case with this number."""
    random = Random(number)
    kernel, exact = make_kernel(random)
    kernel = with_views(kernel, random) if random.random() < 0.3 else with_strides(kernel, Random(f"{number} strides"))
    mesh = dict(zip("xyz", random.choice(MESHES), strict=False))
    return Case(
        kernel.source(),
        kernel.params,
        mesh,
        make_shardings(random, kernel.params, mesh),
        exact=exact,
        integers=exact or random.random() < 0.5,
        blank=random.random() < 0.3,
        as_python=True,
        seed=number,
        seen=frozenset({"barriers of the grid"} if BARRIER in kernel.body else ()),
    )


def with_strides(kernel: KernelSpec, random: Random) -> KernelSpec:
    """The kernel; now and then its author has one parameter lie in memory with gaps, or column by column."""
    if random.random() < 0.85:
        return kernel
    param = random.choice(kernel.params)
    order = list(range(len(param.shape)))
    if random.random() < 0.5:
        random.shuffle(order)
    strides, step = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= param.shape[dim] + random.randrange(3)
    params = (replace(p, strides=tuple(strides)) if p is param else p for p in kernel.params)
    return replace(kernel, params=tuple(params))


def relaid(case: Case) -> Case:
    """The same kernel and data on another mesh, in other layouts: what one device makes of it is known by then."""
    random = Random(f"{case.seed} again")
    mesh = dict(zip("xyz", random.choice(MESHES), strict=False))
    return replace(case, mesh=mesh, shardings=make_shardings(random, case.params, mesh), as_python=False)


def cases() -> st.SearchStrategy[Case]:
    """Random kernels, each on a random mesh. A counterexample is made smaller by `reduction.reduced`, not by
    hypothesis: its parts depend on each other too much."""
    return st.integers(0, 2**40).map(make_case)
