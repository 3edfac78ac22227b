"""Random structure: tuples, If, calls of private functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from . import elementwise, manual, moves, reductions, windows
from .scene import Function, Scene, Value

Emit = Callable[[Scene], None]

OPERATORS: dict[Emit, int] = {
    elementwise.unary: 5,
    elementwise.root: 1,
    elementwise.binary: 8,
    elementwise.compare: 1,
    elementwise.logical: 1,
    elementwise.where: 2,
    elementwise.cast: 2,
    moves.permute_dims: 3,
    moves.reshape: 5,
    moves.expand_or_squeeze: 2,
    moves.broadcast_to: 1,
    moves.concat: 2,
    moves.split: 2,
    moves.strided_slice: 2,
    moves.take: 2,
    moves.others: 1,
    windows.shift: 2,
    windows.unfold: 1,
    windows.convolution: 2,
    windows.pad: 1,
    windows.slice_scatter: 1,
    windows.looked_up: 1,
    windows.scattered: 1,
    reductions.matmul: 6,
    reductions.gram: 1,
    reductions.two_sums: 6,
    reductions.reduce: 5,
    reductions.along: 2,
    reductions.normalize: 2,
    reductions.made: 1,
    manual.collective: 4,
}


def emit(scene: Scene) -> None:
    """One more operator, call, tuple or If."""
    if scene.chance(8):
        call(scene)
    elif scene.chance(4) and scene.may_branch:
        branch(scene)
    elif scene.chance(3):
        pair(scene)
    elif scene.chance(4):
        manual.computation(scene, emit, function_text)
    else:
        weights = [weight * (4 if op.__name__ in scene.shared.favourites else 1) for op, weight in OPERATORS.items()]
        scene.random.choices(list(OPERATORS), weights)[0](scene)


def pair(scene: Scene) -> None:
    """A tuple, and a field of it."""
    a, b = scene.find(), scene.find()
    if a is None or b is None:
        return
    name = scene.fresh()
    scene.line(f"{name} = ({a.name}, {b.name})")
    index = scene.pick((0, 1))
    scene.bind(f"{name}[{index}]", *_type((a, b)[index]))


def _type(value: Value) -> tuple:
    return value.shape, value.dtype, value.whole, value.bound


def call(scene: Scene) -> None:
    """A call of a private function: one that fits what there is, or a new one."""
    fitting = [f for f in scene.shared.functions if all(_fitting(scene, param) for param in f.params)]
    if fitting and scene.chance(75):
        function = scene.pick(fitting)
    elif len(scene.shared.functions) < 3:
        args = [v for v in (scene.find() for _ in range(scene.number(1, 3))) if v is not None]
        made = _function(scene, args) if args else None
        if made is None:
            return
        function = made
    else:
        return
    args = [scene.pick(_fitting(scene, param)[-3:]) for param in function.params]
    name = scene.fresh()
    scene.line(f"{name} = cls.{function.name}({', '.join(arg.name for arg in args)})")
    if len(function.results) == 1:
        scene.add(replace(function.results[0], name=name))
        return
    for index, result in enumerate(function.results):
        scene.bind(f"{name}[{index}]", *_type(result))


def _fitting(scene: Scene, param: Value) -> list[Value]:
    return [
        v
        for v in scene.values
        if (v.shape, v.dtype) == (param.shape, param.dtype) and v.bound <= param.bound and v.whole >= param.whole
    ]


def _function(scene: Scene, args: list[Value]) -> Function | None:
    """A new private function that takes such arguments."""
    shared = scene.shared
    name = f"f{shared.started}"
    shared.started += 1
    inner = Scene(shared, name)
    inner.may_branch = False
    params = []
    for index, arg in enumerate(args):
        params.append(replace(arg, name=f"{name}_a{index}", bound=max(arg.bound, 4.0)))
        inner.values.append(params[-1])
    for _ in range(scene.number(1, 4)):
        emit(inner)
    if not inner.named:
        return None
    results = inner.named[-1:] if scene.chance(60) else scene.some(inner.named, 1, 2)
    typed = [f'{p.name}: R.Tensor({p.shape}, "{p.dtype}")' for p in params]
    returned = ", ".join(v.name for v in results)
    returned = f"({returned})" if len(results) > 1 else returned
    shared.texts.append(function_text("@R.function(private=True)", name, typed, inner, returned))
    function = Function(name, tuple(params), tuple(results))
    shared.functions.append(function)
    return function


def branch(scene: Scene) -> None:
    """An If, whose branches give values of one type."""
    a = scene.find(dtypes=("float32",))
    if a is None or scene.name != "main":
        return
    condition = scene.parameter((), "bool")
    scene.values.remove(condition)
    made = []
    lines, known = scene.lines, list(scene.values)
    for _ in range(2):
        scene.lines, scene.indent = [], 1
        for _ in range(scene.number(0, 2)):
            scene.random.choice((elementwise.unary, elementwise.binary, moves.permute_dims))(scene)
        same = [v for v in scene.values if v not in known and (v.shape, v.dtype) == (a.shape, a.dtype)]
        result = scene.pick(same) if same else scene.bind(f"R.negative({a.name})", *_type(a))
        made.append((scene.lines, result))
        scene.values, scene.indent = list(known), 0
    scene.lines = lines
    name = scene.fresh()
    for head, (inside, result) in zip((f"if {condition.name}:", "else:"), made, strict=True):
        scene.lines += [head, *inside, f"    {name} = {result.name}"]
    results = [result for _, result in made]
    whole, bound = all(r.whole for r in results), max(r.bound for r in results)
    scene.add(Value(name, a.shape, a.dtype, whole, bound))


def function_text(decorator: str, name: str, params: list[str], scene: Scene, result: str) -> str:
    """A function as TVMScript: some in a dataflow block, where there is no If."""
    lines = scene.lines
    if not any(line.startswith("if ") for line in lines) and scene.chance(50):
        lines = ["with R.dataflow():", *(f"    {line}" for line in lines), f"    out = {result}", "    R.output(out)"]
        result = "out"
    body = "".join(f"        {line}\n" for line in ["cls = Module", *lines])
    return f"    {decorator}\n    def {name}({', '.join(params)}):\n{body}        return {result}\n"
