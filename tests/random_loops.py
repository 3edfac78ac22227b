"""Loops of random steps on a few shapes, with layouts stated at random."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass, replace

import torch
from tvm import ir, relax

import mesh_tensor as mt
from tests.plan.loop_modules import Loop, looped, unrolled
from tests.random_modules.check import RIGHT, Outcome

op = relax.op
ROWS, COLS, STEPS = 6, 4, 3
SHAPES = [(ROWS, COLS), (COLS, COLS), (COLS,), (1, COLS)]
KEPT = [(COLS, COLS), (STEPS, ROWS, COLS), (COLS,), (ROWS, COLS)]
MESHES = [{"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}]


def _shape(value):
    return tuple(int(size) for size in value.struct_info.shape)


def _made(bb, pick, at, kept, kind):
    """A value of one of the shapes, in the pool of those that there are."""
    rows, square, vector = pick((ROWS, COLS)), pick((COLS, COLS)), pick((COLS,))
    if kind == "product":
        return op.matmul(rows, square)
    if kind == "row":
        return op.take(kept[1], at, axis=0)
    if kind == "bias":
        return op.add(rows, vector)
    if kind == "sum":
        return op.sum(rows, axis=0, keepdims=True)
    if kind == "reduced":
        return op.mean(square, axis=1)
    if kind == "turned":
        return op.permute_dims(square)
    if kind == "gram":
        return op.matmul(bb.emit(op.permute_dims(rows)), rows)
    if kind == "softmax":
        return op.nn.softmax(rows, axis=len(kept) % 2)
    if kind == "counted":
        return op.multiply(rows, bb.emit(op.astype(at, "float32")))
    if kind == "merged":
        return op.reshape(bb.emit(op.negative(bb.emit(op.reshape(rows, (ROWS * COLS,))))), (ROWS, COLS))
    if kind == "shifted":
        parts = [op.strided_slice(rows, [0], [2], [ROWS]), op.strided_slice(rows, [0], [0], [2])]
        return op.concat([bb.emit(part) for part in parts], 0)
    return op.add(rows, pick((1, COLS)))


KINDS = [
    "product",
    "row",
    "bias",
    "sum",
    "reduced",
    "turned",
    "gram",
    "softmax",
    "counted",
    "merged",
    "shifted",
    "added",
]


def random_loop(number: int) -> Loop:
    """The loop of that number."""
    chosen = random.Random(number)
    carried = [chosen.choice(SHAPES) for _ in range(chosen.randint(1, 3))]
    kinds = [chosen.choice(KINDS) for _ in range(chosen.randint(2, 6))]
    seed, given = chosen.random(), [chosen.choice(SHAPES[:2]) for _ in range(chosen.randint(0, 2))]

    def step(bb, at, values, kept):
        inner = random.Random(seed)
        pool = [*values, kept[0], kept[2], kept[3]]

        def pick(shape):
            found = [value for value in pool if _shape(value) == shape]
            if not found:
                return bb.emit(op.broadcast_to(kept[2], shape))
            return inner.choice(found[-4:])

        for kind in kinds:
            pool.append(bb.emit(op.tanh(bb.emit(_made(bb, pick, at, kept, kind)))))
        return [pick(shape) for shape in carried], [pick(shape) for shape in given]

    return Loop(carried, KEPT, given, step)


def manual_loop(number: int) -> tuple[ir.IRModule, dict[str, int]]:
    """A manual computation over x: a random loop on tiles, with collectives, of which devices have what they have of
    their own or all the same; and the axes."""
    chosen, loop = random.Random(number), random_loop(number)
    seed, count = chosen.random(), chosen.choice([2, 3])
    axes, shapes = {"x": count}, [*loop.carried, *loop.kept]

    def step(bb, at, values, kept):
        inner = random.Random(seed)
        given = [_sent(bb, inner, axes, value) if inner.random() < 0.6 else value for value in (*values, *kept)]
        made, rows = loop.step(bb, at, given[: len(values)], given[len(values) :])
        return [_sent(bb, inner, axes, value) if inner.random() < 0.4 else value for value in made], rows

    ins = [{"x": chosen.randrange(len(s))} if chosen.random() < 0.6 else {} for s in shapes]
    mod = looped(replace(loop, step=step), STEPS)
    builder = relax.BlockBuilder(mod)
    body = mod.get_global_var("main")
    results = mod["main"].ret_struct_info.fields
    outs = [{"x": chosen.randrange(result.ndim)} for result in results]
    wholes = [mt.Sharding.make(mt.Mesh(axes), len(s), one) for s, one in zip(shapes, ins, strict=True)]
    infos = [
        relax.TensorStructInfo([n * one.num_shards(d) for d, n in enumerate(s)], "float32")
        for s, one in zip(shapes, wholes, strict=True)
    ]
    params = [relax.Var(f"w{n}", info) for n, info in enumerate(infos)]
    with builder.function("outer", params):
        builder.emit_func_output(builder.emit(mt.manual_computation(body, params, axes, ins, outs)))
    return builder.get(), axes


def _sent(bb, inner, axes, value):
    """What devices have of a value after a collective, of its own shape."""
    comm, shape, count = mt.comm, _shape(value), axes["x"]
    even = [dim for dim, size in enumerate(shape) if size % count == 0]
    kind = inner.choice(["sum", "max", "avg", "ring", "root", "all_to_all", "gathered", "scattered", "place"])
    if kind in ("sum", "max", "avg"):
        return bb.emit(comm.all_reduce(value, axes, kind))
    if kind == "ring":
        return bb.emit(comm.permute(value, axes, [(n, (n + 1) % count) for n in range(count)]))
    if kind == "root":
        return bb.emit(comm.broadcast(value, axes, inner.randrange(count)))
    if kind == "place":
        place = bb.emit(op.astype(bb.emit(comm.axis_index(axes)), "float32"))
        return bb.emit(op.add(value, place))
    if not even:
        return value
    dim = inner.choice(even)
    if kind == "all_to_all":
        return bb.emit(comm.all_to_all(value, axes, dim, dim))
    if kind == "gathered":
        part = bb.emit(op.strided_slice(value, [dim], [0], [shape[dim] // count]))
        return bb.emit(comm.all_gather(part, axes, dim))
    return bb.emit(comm.all_gather(bb.emit(comm.reduce_scatter(value, axes, dim)), axes, dim))


def run_manual(number: int) -> Outcome:
    """The loop on tiles, mostly with poison, beside every device's own."""
    generator = torch.Generator().manual_seed(number)
    try:
        mod, axes = manual_loop(number)
        func, chosen = mod["outer"], random.Random(number + 1)
        given = [torch.randn(_shape(param), generator=generator) for param in func.params]
        mesh = axes if chosen.random() < 0.6 else {**axes, "y": 2}
        layouts = {p.name_hint: _layout(chosen, mesh, _shape(p)) for p in func.params if chosen.random() < 0.3}
        layouts = {name: at for name, at in layouts.items() if at}
        run = mt.distribute_module(mod, mesh, layouts, function="outer", poison=number % 4 != 1)
        expected = mt.run_sequential(mod, given, "outer")
        torch.testing.assert_close(run(*given), expected, rtol=2e-4, atol=2e-4)
    except mt.MeshTensorError as error:
        return Outcome("refused", str(error))
    except Exception:  # a crash is neither right nor refused, whatever its class
        return Outcome("wrong", traceback.format_exc())
    return RIGHT


@dataclass(frozen=True)
class LoopCase:
    """A loop as a function that calls itself, with layouts; its steps one by one; and whether data says how many."""

    number: int
    loop: Loop
    looped: ir.IRModule
    plain: ir.IRModule
    mesh: dict[str, int]
    by_data: bool


def make_loop_case(number: int) -> LoopCase:
    """The case of that number."""
    chosen, loop = random.Random(number + 1), random_loop(number)
    mesh, by_data = chosen.choice(MESHES), chosen.random() < 0.3
    names = [*(f"c{n}" for n in range(len(loop.carried))), *(f"k{n}" for n in range(len(KEPT)))]
    layouts = {name: _layout(chosen, mesh, shape) for name, shape in zip(names, (*loop.carried, *KEPT), strict=True)}
    layouts = {name: at for name, at in layouts.items() if at and chosen.random() < 0.6}
    mod = looped(loop, STEPS, by_data=by_data)
    mod = mt.annotate_module(mod, mesh, layouts) if layouts else mod
    inside = chosen.randrange(len(loop.carried))
    stated = _layout(chosen, mesh, loop.carried[inside])
    if stated and chosen.random() < 0.4:
        mod = mt.annotate_module(mod, mesh, {f"v{1 + inside}": stated}, function="loop")
    return LoopCase(number, loop, mod, unrolled(loop, STEPS), mesh, by_data)


def _layout(chosen, mesh, shape):
    found = {}
    for axis in mesh:
        dim = chosen.choice([None, *range(len(shape))])
        if dim is not None and dim not in found.values():
            found[axis] = dim
    return found


def run(case: LoopCase) -> Outcome:
    """The loop, mostly with poison in its padding, beside its steps one by one."""
    generator = torch.Generator().manual_seed(case.number)
    given = [torch.randn(shape, generator=generator) for shape in (*case.loop.carried, *case.loop.kept)]
    try:
        distributed = mt.distribute_module(case.looped, case.mesh, poison=case.number % 4 != 1)
        counts = [step.count for step in distributed.program.loops]
        assert counts == [None if case.by_data else STEPS], f"loops of {counts} steps"
        expected = mt.run_sequential(case.plain, given)
        torch.testing.assert_close(distributed(*given), expected, rtol=2e-4, atol=2e-4)
    except mt.MeshTensorError as error:
        return Outcome("refused", str(error))
    except Exception:  # a crash is neither right nor refused, whatever its class
        return Outcome("wrong", traceback.format_exc())
    return RIGHT
