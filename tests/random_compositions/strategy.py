"""Random compositions: one to three grids in one function, each over elements or with a loop that carries states, with
reads around, beside and far from their positions, walked in any order. One case per number."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random

from hypothesis import strategies as st

from tests.random_kernels.spec import Block, Case, Line, Param, render
from tests.random_kernels.strategy import make_shardings

from .at_rows import row_products, written_by_one
from .blocks import Carried
from .in_one_block import reused, rounds
from .looked_up import looked_up
from .orders import grid, walk
from .reads import test, value
from .scene import Dim, Scene
from .states import draw

MESHES = ((2,), (2,), (2,), (3,), (4,), (2, 2), (2, 2), (2, 3), (1, 2), (5,), (1,))


def make_scene(random: Random) -> Scene:
    """The scene of one function."""
    scene = Scene(random, calm=random.random() < 0.75)
    for name in "mkn":
        block = scene.pick((1, 2, 2, 4, 4, 3) if name != "n" else (1, 2, 4))
        whole = block * scene.pick((2, 4, 4, 4, 6, 6, 8, 3, 5, 1) if name == "k" else (1, 2, 2, 4, 3))
        size = whole if scene.chance(85 if scene.calm else 60) else max(1, whole - scene.number(1, block))
        scene.dims[name] = Dim(name, size, block)
    for _ in range(scene.pick((1, 1, 1, 2, 2, 3))):
        before = len(scene.made)
        scene.pick(_GRIDS)(scene)
        for number in range(before, len(scene.made)):
            made = scene.made[number]
            scene.made[number] = Param(made.name, made.shape, made.dtype, "done", made.below, made.dims)
    return scene


def _states(scene: Scene) -> None:
    """A grid whose programs walk k, once or again, and carry one or two states each time."""
    over = scene.pick(("m", "m", "n", "mn", "mn", ""))
    with grid(scene, over):
        for d in set(over) - scene.places.keys():
            scene.places[d] = "0"
            scene.dims[d] = Dim(d, min(scene.dims[d].size, scene.dims[d].block), scene.dims[d].block)
        carried = _walked(scene, over)
        for _ in range(scene.pick((0, 0, 0, 1, 1, 2))):
            scene.seen.add("walked again")
            scene.complete += [
                (name, state.over) for state in carried for name in state.left if scene.dtype_of(name) == "float32"
            ]
            carried += _walked(scene, over)
        scene.complete.clear()
        for state in carried:
            for name in state.left:
                _store(scene, name, state.over)


def _walked(scene: Scene, over: str) -> list[Carried]:
    """The states that one loop over k carries, which may use those that are complete."""
    carried = [draw(scene, over if len(over) < 2 or scene.chance(70) else scene.pick(over))]
    if scene.chance(25):
        carried.append(draw(scene, over))
    for d in {d for state in carried for d in state.over} - scene.places.keys():
        scene.places[d] = "0"
        scene.dims[d] = Dim(d, min(scene.dims[d].size, scene.dims[d].block), scene.dims[d].block)
    for state in carried:
        state.start()
    with walk(scene, "k"):
        skip = scene.twist("some blocks")
        headers = [f"if {_block_test(scene)}"] if skip else []
        with scene.block(*headers) if headers else nullcontext():
            for state in carried:
                state.step()
            if scene.chance(40 if scene.complete else 12):
                _store_blocks(scene, over)
        if scene.twist("left early") and scene.chance(40):
            with scene.block(f"if {scene.places['k']} == {scene.number(0, scene.dims['k'].blocks)}"):
                scene.emit("T.loop_break()")
    for state in carried:
        state.end()
    return carried


def _block_test(scene: Scene) -> str:
    ids = scene.param("mask", [scene.dims["k"].blocks], ["k"], "int32", below=2)
    return scene.pick((f"{ids}[{scene.places['k']}] != 0", f"{scene.places['k']} % 2 == 0", f"{scene.places['k']} > 0"))


def _store_blocks(scene: Scene, over: str) -> None:
    """Something of every position, while states are carried."""
    dims = f"{over}k"
    text = value(scene, dims)
    name = scene.output(dims)
    with scene.block(*scene.loops(dims)):
        scene.emit(f"{name}[{', '.join(scene.at(d) for d in dims)}] = {text}")


def _store(scene: Scene, buffer: str, over: str) -> None:
    dtype = scene.dtype_of(buffer)
    if not over:
        name = scene.param("E", [1], ["one"], dtype, "out")
        scene.emit(f"{name}[0] = {buffer}[0]")
        return
    order = "".join(scene.random.sample(over, len(over)))
    name = scene.output(order, dtype)
    if order == over and scene.chance(40):
        scene.emit(f"T.copy({buffer}, {name}[{', '.join(scene.start(d) for d in over)}])")
        return
    text = scene.element(buffer, over)
    if dtype == "float32" and scene.chance(30):
        lines = len(scene.lines)
        text = f"{text} + {value(scene, over, 0)}"
        assert len(scene.lines) >= lines
    with scene.block(*scene.loops(over)):
        scene.emit(f"{name}[{', '.join(scene.at(d) for d in order)}] = {text}")


def _elements(scene: Scene) -> None:
    """A grid over blocks of which every element is computed by itself."""
    dims = scene.pick(("k", "k", "mk", "km", "kn", "mn", "m"))
    with grid(scene, dims):
        text = value(scene, dims)
        name = scene.output("".join(scene.random.sample(dims, len(dims))))
        headers = scene.loops(dims)
        if scene.chance(40):
            dim = scene.pick(dims)
            headers.append(f"if {scene.at(dim)} < {scene.dims[dim].size}")
        with scene.block(*headers):
            scene.emit(f"{name}[{', '.join(scene.at(d) for d in scene.params[name].dims)}] = {text}")


def _split(scene: Scene) -> None:
    """A grid over blocks of k, too, of which each adds to what is shared."""
    over = scene.pick(("m", "n"))
    with grid(scene, f"{over}k"):
        text = value(scene, f"{over}k")
        op = scene.pick(("add", "add", "max"))
        name = scene.output(over, role="inout")
        headers = scene.loops(f"{over}k")
        headers += [f"if {scene.at(d)} < {scene.dims[d].size}" for d in f"{over}k"]
        if scene.chance(15):
            headers.append(f"if {test(scene, over + 'k')}")
        with scene.block(*headers):
            scene.emit(f"T.atomic_{op}({name}[{scene.at(over)}], {text})")


_GRIDS = (
    *[_states] * 6,
    *[_elements] * 2,
    *[_split] * 2,
    *[looked_up] * 2,
    rounds,
    reused,
    written_by_one,
    row_products,
)


def make_case(number: int) -> Case:
    """The case with this number."""
    random = Random(number)
    scene = make_scene(random)
    outputs = [p for p in scene.params.values() if p.role != "in"]
    params = (*(p for p in scene.params.values() if p.role == "in"), *outputs)
    mesh = dict(zip("xyz", random.choice(MESHES), strict=False))
    integers = random.random() < 0.6
    return Case(
        source(scene, params),
        params,
        mesh,
        _natural(random, params, mesh) if random.random() < 0.6 else make_shardings(random, params, mesh),
        exact=False,
        integers=integers,
        blank=random.random() < 0.2,
        as_python=True,
        seed=number,
        seen=frozenset(scene.seen),
        machine=random.choice((1, 1, 1, 2, 0)),
    )


def _natural(random: Random, params: tuple[Param, ...], mesh: dict[str, int]) -> dict[str, dict]:
    """Every axis splits one dim of all that has it, but for a few; what has none of them says nothing."""
    looks_up = any("v" in param.dims for param in params)
    common = {axis: random.choice("vvvkmmn" if looks_up else "kkkkmmn") for axis in mesh}
    found: dict[str, dict] = {}
    for param in params:
        lies = {axis: param.dims.index(dim) for axis, dim in common.items() if dim in param.dims}
        if (lies or random.random() < 0.3) and random.random() < 0.9:
            found[param.name] = lies
    return found or {params[-1].name: {}}


def source(scene: Scene, params: tuple[Param, ...]) -> str:
    header = ", ".join(f'{p.name}: T.Tensor({p.shape}, "{p.dtype}")' for p in params)
    body: tuple[Line, ...] = tuple(scene.lines)
    return "\n".join(["@T.prim_func", *render(Block(f"def kernel({header})", body), 0)]) + "\n"


def cases() -> st.SearchStrategy[Case]:
    """Random compositions, each on a random mesh."""
    return st.integers(0, 2**40).map(make_case)
