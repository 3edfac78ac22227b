"""Random modules on random meshes: one case per number, and all as a strategy."""

from __future__ import annotations

import re
from random import Random

from hypothesis import strategies as st

from .scene import FLOATS, Scene, Shared, Value
from .spec import Case, Param
from .structure import OPERATORS, emit, function_text

_MESHES = ((2,), (2,), (2,), (3,), (4,), (4,), (6,), (2, 2), (2, 2), (2, 3), (3, 2), (2, 2, 2), (1,), (1, 2), (5,))
_SIZES = ((4, 8, 2, 6), (2, 3, 4, 6), (5, 7, 3, 2), (1, 4, 6, 12), (1, 2, 5, 8), (8, 16, 4, 12))

_OPERATOR = re.compile(r"(R\.(?:nn\.)?\w+|cls\.)\(?")
# What TVM infers R.DTensor types for.
_TYPED = (
    "R.function R.Tensor R.dataflow R.output R.matmul R.add R.subtract R.multiply R.maximum R.minimum R.tanh R.negative"
    " R.abs R.square R.nn.relu R.nn.gelu R.nn.silu R.sigmoid R.sum R.max R.min R.prod R.mean R.permute_dims R.shape"
    " R.nn.softmax"
)


def make_case(number: int) -> Case:
    """The case with this number."""
    random = Random(number)
    favourites = frozenset(op.__name__ for op in random.sample(list(OPERATORS), 3))
    mesh = dict(zip("xyz", random.choice(_MESHES), strict=False))
    shared = Shared(random, random.choice(_SIZES), random.random() < 0.5, favourites, mesh)
    scene = Scene(shared, "main")
    for _ in range(scene.number(1, 2)):
        shape = scene.shape(1, 3)
        if number % 13 == 5:
            shape = (*shape[1:], 0)
        scene.parameter(shape, scene.pick(("float32",) * 8 + ("float16", "int32")))
    length, tries = scene.number(2, 11), 0
    while len(scene.lines) < length and tries < 40:
        emit(scene)
        tries += 1
    text, results = _result(scene)
    params = [f'{p.name}: R.Tensor({p.shape}, "{p.dtype}")' for p in scene.params]
    shared.texts.append(function_text("@R.function", "main", params, scene, text))
    shardings = _shardings(scene, mesh)
    names = [p.name for p in scene.params]
    groups, barriers = _ties(scene, shardings)
    return Case(
        "@I.ir_module\nclass Module:\n" + "\n".join(shared.texts),
        tuple(scene.params),
        mesh,
        shardings,
        open=tuple(name for name in shardings if random.random() < 0.2),
        priority={name: scene.number(0, 2) for name in shardings if random.random() < 0.2},
        groups=groups,
        barriers=barriers,
        weights=tuple(names[1:]) if random.random() < 0.3 else (),
        spread={p.name: _dims(random, len(p.shape), mesh) for p in scene.params if random.random() < 0.5}
        if random.random() < 0.2
        else {},
        typed=_may_be_typed("".join(shared.texts)) and _can_be_typed(shardings) and random.random() < 0.7,
        whole=shared.whole,
        exact=tuple(i for i, value in enumerate(results) if value.whole),
        seed=number,
    )


def cases() -> st.SearchStrategy[Case]:
    """Random modules, each on a random mesh. A counterexample is made smaller by `reduction.reduced`, not by
    hypothesis: its parts depend on each other too much."""
    return st.integers(0, 2**40).map(make_case)


def _result(scene: Scene) -> tuple[str, list[Value]]:
    """What main returns, as text: mostly what nothing uses; the values in it, in order."""
    text = "\n".join(scene.lines)
    unused = [v for v in scene.values if f"{v.name}" not in text.replace(f"{v.name} = ", "")]
    found = [*scene.some(unused[::-1][:6], 1, 4), *scene.some(scene.values, 0, 1)] or scene.values[-1:]
    if len(found) == 1:
        return found[0].name, found
    if len(found) > 2 and scene.chance(30):
        inner = ", ".join(v.name for v in found[1:])
        return f"({found[0].name}, ({inner}))", found
    return f"({', '.join(v.name for v in found)})", found


def _shardings(scene: Scene, mesh: dict[str, int]) -> dict[str, object]:
    """Layouts of some parameters and of a few other values; sometimes of nearly everything, so that they clash."""
    random = scene.random
    share = random.choice((0.3, 0.6, 1.0))
    inner = random.choice((0.0, 0.1, 0.4))
    named = [v for v in scene.named if v.name.isidentifier()]
    chosen = [(p.name, p) for p in scene.params if random.random() < share]
    chosen += [(v.name, v) for v in named if random.random() < inner]
    for function in scene.shared.functions:
        chosen += [(f"{function.name}.{p.name}", p) for p in function.params if random.random() < inner / 2]
    if not chosen:
        chosen = [(scene.params[0].name, scene.params[0])]
    stated = {name: _stated(random, value, mesh) for name, value in chosen}
    if scene.summed and random.random() < 0.7:
        axis = random.choice(list(mesh))
        for dims in random.sample(scene.summed, min(2, len(scene.summed))):
            stated |= {name: {axis: dim} for name, dim in dims.items()}
    return stated


def _stated(random: Random, value: Param | Value, mesh: dict[str, int]) -> object:
    """A layout in one of the forms that there are."""
    dims = _dims(random, len(value.shape), mesh)
    form = random.random()
    if form < 0.15:
        return ", ".join(f"S[{dims[axis]}]" if axis in dims else "R" for axis in mesh)
    free = [axis for axis in mesh if axis not in dims]
    if form > 0.7 and len(dims) > len({*dims.values()}):
        return _in_another_order(random, dims)
    if form > 0.8:
        return _in_parts(random, dims, len(value.shape), mesh)
    if form < 0.22 and free and value.dtype in FLOATS:
        return {"sharding": dims, "partial": {random.choice(free): random.choice(("sum", "max"))}}
    return dims


def _dims(random: Random, ndim: int, mesh: dict[str, int]) -> dict[str, int]:
    return {axis: random.randrange(ndim) for axis in mesh if ndim and random.random() < 0.75}


def _ties(scene: Scene, shardings: dict[str, object]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """A group of values of one shape, at most one of which is stated to lie somehow; and barriers."""
    random = scene.random
    named = [v for v in [*scene.params, *scene.named] if v.name.isidentifier()]
    groups, barriers = {}, {}
    if named and random.random() < 0.15:
        first = random.choice(named)
        alike = [v.name for v in named if v.shape == first.shape and v.name not in shardings]
        alike += [v.name for v in named if v.shape == first.shape and v.name in shardings][:1]
        if len(set(alike)) > 1 and "partial" not in str(shardings.get(alike[-1])):
            groups["group"] = tuple(dict.fromkeys(alike))
    if named and random.random() < 0.15:
        barriers = {v.name: random.choice(("none", "forward", "backward")) for v in random.sample(named, 1)}
    return groups, barriers


def _in_another_order(random: Random, dims: dict[str, int]) -> dict[object, int]:
    """The layout, with the axes that split one dim in any order."""
    by_dim: dict[int, list[str]] = {}
    for axis, dim in dims.items():
        by_dim.setdefault(dim, []).append(axis)
    return {tuple(random.sample(axes, len(axes))) if len(axes) > 1 else axes[0]: dim for dim, axes in by_dim.items()}


def _in_parts(random: Random, dims: dict[str, int], ndim: int, mesh: dict[str, int]) -> dict[str, int]:
    """The layout, with axes that have parts of two devices or more taken apart."""
    stated: dict[str, int] = {}
    for axis, dim in dims.items():
        major = next((count for count in (2, 3) if mesh[axis] % count == 0 and mesh[axis] > count), None)
        if major is None:
            stated[axis] = dim
            continue
        minor = mesh[axis] // major
        parts = {f"{axis}:(1){major}": dim, f"{axis}:({major}){minor}": random.randrange(ndim)}
        stated |= dict(random.sample(list(parts.items()), random.choice((1, 2, 2))))
    return stated


def _can_be_typed(shardings: dict[str, object]) -> bool:
    """Whether TVM has words for the layouts: no parts of axes, no order of theirs."""
    return ":(" not in str(shardings) and "('" not in str(shardings)


def _may_be_typed(text: str) -> bool:
    return set(_OPERATOR.findall(text)) <= set(_TYPED.split()) and "if " not in text
