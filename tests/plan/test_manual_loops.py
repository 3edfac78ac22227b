"""Loops in manual computations, and manual computations in loops."""

import pytest
import torch
from tvm import ir, relax

import mesh_tensor as mt
from mesh_tensor.plan.reader import read_graph
from tests import random_loops
from tests.random_modules.check import RIGHT

from .loop_modules import Loop, looped
from .test_manual import manual_module
from .test_manual_failures import refused

op, comm = relax.op, mt.comm
X = {"x": 2}


def inside(step, shapes, kept=(), *, mesh=None, ins=None, outs=None):
    """main: a manual computation of a loop over the tiles of what is carried; of `kept` all devices have all."""
    mesh = mt.Mesh(mesh or X)
    ins = ins or [dict.fromkeys(mesh, 0)] * len(shapes)
    layouts = [mt.Sharding.make(mesh, len(s), one) for s, one in zip(shapes, ins, strict=True)]
    tiles = [one.tile_shape(shape) for one, shape in zip(layouts, shapes, strict=True)]
    mod = looped(Loop(tiles, kept, [], step), 3)
    builder, variables = relax.BlockBuilder(mod), [relax.Var(f"x{n}", _info(s)) for n, s in enumerate((*shapes, *kept))]
    params = [relax.Var(f"t{n}", _info(shape)) for n, shape in enumerate((*tiles, *kept))]
    with builder.function("body", params, private=True):
        made = builder.emit(relax.Call(mod.get_global_var("main"), params))
        builder.emit_func_output(made)
    body = builder.get().get_global_var("body")
    with builder.function("outer", variables):
        call = mt.manual_computation(body, variables, mesh, [*ins, *({} for _ in kept)], outs or ins)
        builder.emit_func_output(builder.emit(call))
    return builder.get()


def _info(shape):
    return relax.TensorStructInfo(shape, "float32")


def run(mod, mesh, shapes, stated=None, function="outer"):
    """With poison and without, as on one device; the program."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    wanted = mt.run_sequential(mod, inputs, function)
    for poison in (True, False):
        made = mt.distribute_module(mod, mesh, stated or {}, function=function, poison=poison)
        torch.testing.assert_close(made(*inputs), wanted, rtol=1e-4, atol=1e-4)
    return made.program, inputs, wanted


def ring(b, i, carried, kept):
    """Tiles go around, and are added up."""
    moved = b.emit(comm.permute(carried[0], X, [(0, 1), (1, 0)]))
    return [moved, b.emit(op.add(carried[1], b.emit(op.tanh(moved))))], []


def summed(b, i, carried, kept):
    return [b.emit(op.tanh(b.emit(comm.all_reduce(b.emit(op.matmul(carried[0], kept[0])), X))))], []


@pytest.mark.parametrize("number", [6, 7, 8, 12, 13])
def test_random_loops(number):
    """`python -m tests.fuzz --of manual_loops` makes more of them. The rows of 8 and 12 once stood in their devices'
    place."""
    assert random_loops.run_manual(number) == RIGHT


def test_a_ring():
    program, (x, y), wanted = run(inside(ring, [(6, 4), (6, 4)]), X, [(6, 4), (6, 4)])
    turned = x.roll(3, 0)
    torch.testing.assert_close(wanted[1], y + 2 * turned.tanh() + x.tanh())
    (loop,) = program.loops
    assert len([step for step in loop.inner if step.collective]) == 1
    assert loop.count == 3


def test_what_all_devices_have_becomes_their_own():
    """What is carried begins the same on all devices, one more after each step is not."""

    def step(b, i, carried, kept):
        a, c, d = carried
        place = b.emit(op.astype(b.emit(comm.axis_index(X)), "float32"))
        return [b.emit(op.add(a, place)), b.emit(op.add(c, a)), b.emit(op.multiply(d, kept[0]))], []

    shapes = [(2, 4), (2, 4), (2, 4)]
    mod = inside(step, [*shapes], [(2, 4)], ins=[{"x": 0}, {"x": 0}, {}])
    program, (a, c, d, k), wanted = run(mod, X, [*shapes, (2, 4)])
    torch.testing.assert_close(wanted[0], a + torch.tensor([0.0, 3.0])[:, None])
    torch.testing.assert_close(wanted[1], c + 3 * a + torch.tensor([0.0, 3.0])[:, None])
    torch.testing.assert_close(wanted[2], d * k**3)
    assert not any(step.bytes for step in program.steps)


def test_begins_shared():
    """What begins as one value becomes each device's own: the loop is read again, with one for each."""

    def step(b, i, carried, kept):
        return [b.emit(op.tanh(carried[0])), b.emit(op.add(carried[1], carried[2])), carried[0]], []

    shapes, ins = [(4, 4), (2, 4), (2, 4)], [{"x": 0}, {}, {}]
    mod = inside(step, shapes, ins=ins, outs=[{"x": 0}] * 3)
    program, (a, c, d), wanted = run(mod, X, shapes)
    assert not any(step.bytes for step in program.steps)
    torch.testing.assert_close(wanted[1], torch.cat([c + d] * 2) + a + a.tanh())
    refused(
        lambda: mt.distribute_module(inside(step, shapes, ins=ins), X, {}, function="outer"),
        "devices along 'x' may have different values of outer.gv1: result 1",
    )


def test_constants_of_a_loop_that_is_read_again():
    """Its values are named once each, those of constants too."""
    scale = relax.const(3.0, "float32")

    def step(b, i, carried, kept):
        a, c = carried
        scaled = b.emit(op.multiply(a, scale))
        place = b.emit(op.astype(b.emit(comm.axis_index(X)), "float32"))
        return [b.emit(op.add(scaled, c)), b.emit(op.add(c, place))], []

    shapes = [(4, 4), (2, 4)]
    mod = inside(step, shapes, ins=[{"x": 0}, {}], outs=[{"x": 0}] * 2)
    graph = read_graph(mod, "outer", mt.Mesh(X), {}, loops=True)
    names = [value.name for value in graph.values()]
    assert len(set(names)) == len(names)
    run(mod, X, shapes)


def test_devices_that_would_not_go_on_together():
    """How long devices go on has to be one thing for all of them."""

    def module(combined):
        holder, tile = relax.BlockBuilder(), _info((2, 4))
        called = holder.add_func(_function(lambda b, x: x, tile), "grow")

        def write(b, x):
            size = b.emit(op.max(b.emit(op.abs(x))))
            size = b.emit(comm.all_reduce(size, X, "max")) if combined else size
            more = b.emit(op.less(size, relax.const(10.0, "float32")))
            b._begin_binding_block()
            again = b.emit(relax.Call(called, [b.emit(op.multiply(x, relax.const(2.0, "float32")))]))
            return b.emit(relax.If(more, relax.SeqExpr([b._end_block()], again), relax.SeqExpr([], x)))

        holder.update_func(called, _function(write, tile))
        whole = relax.Var("x", _info((4, 4)))
        with holder.function("main", [whole]):
            holder.emit_func_output(holder.emit(mt.manual_computation(called, [whole], X, [{"x": 0}], {"x": 0})))
        return holder.get()

    program, (x,), wanted = run(module(True), X, [(4, 4)], function="main")
    torch.testing.assert_close(wanted, x * 2 ** torch.ceil(torch.log2(10 / x.abs().max())))
    what = "devices along 'x' may have different values of what says whether it does", "mt.comm.all_reduce"
    refused(lambda: mt.distribute_module(module(False), X, {}), *what)
    refused(
        lambda: mt.run_sequential(module(False), [torch.tensor([1.0, 1.0, 6.0, 6.0])[:, None] + torch.zeros(4, 4)]),
        "some devices have function 'grow' call itself, others don't",
    )


def _function(write, info):
    inner, param = relax.BlockBuilder(), relax.Var("v", info)
    with inner.function("f", [param], private=True):
        inner.emit_func_output(write(inner, param))
    return inner.get()["f"]


@pytest.mark.parametrize("stated", [{}, {"x1": {"y": 1}}])
def test_free_axes(stated):
    """y is not manual: what it splits in a loop is found as elsewhere."""
    mod = inside(summed, [(6, 4)], [(4, 4)], mesh=X)
    torch.manual_seed(1)
    inputs = [torch.randn(6, 4), torch.randn(4, 4)]
    made = mt.distribute_module(mod, {"x": 2, "y": 2}, stated, function="outer", poison=True)
    torch.testing.assert_close(made(*inputs), mt.run_sequential(mod, inputs, "outer"), rtol=1e-4, atol=1e-4)


def around(body, shape, mesh, at, steps=3):
    """main: a loop of which each step is a manual computation."""
    tiled, name = manual_module(body, [shape], mesh, [at], at)["body"], ir.GlobalVar("body")
    relax.expr._update_struct_info(name, tiled.struct_info)

    def step(builder, _, carried, kept):
        made = builder.emit(mt.manual_computation(name, [carried[0]], mt.Mesh(mesh), [at], at))
        return [builder.emit(op.tanh(builder.emit(op.add(made, kept[0]))))], [made]

    mod = looped(Loop([shape], [(1, shape[1])], [shape], step), steps)
    mod[name] = tiled
    return mod


@pytest.mark.parametrize("at", [{"x": 0}, {"x": 1}])
def test_a_loop_around(at):
    def body(emit, t):
        return emit(op.multiply(t, emit(op.mean(emit(comm.all_reduce(t, X)), keepdims=True))))

    mod = around(body, (8, 4), X, at)
    program, (x, bias), wanted = run(mod, X, [(8, 4), (1, 4)], function="main")
    for step in range(3):
        (dim,) = at.values()
        scale = sum(x.chunk(2, dim)).mean()
        torch.testing.assert_close(wanted[1][step], x * scale)
        x = (x * scale + bias).tanh()
    torch.testing.assert_close(wanted[0], x)
    assert {step.kind for step in program.loops[0].inner if step.collective} <= {"all_reduce", "slice"}
