"""Gradients of manual computations, beside torch's of what all devices do."""

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.rules.operator.manual import devices_call
from tests.random_manual import run

from .test_manual import manual_module
from .test_manual_failures import refused

op, comm = relax.op, mt.comm


@pytest.mark.parametrize("number", [0, 2, 33, 38, 1122])
def test_random_programs(number):
    """In 33 and 38 the module knows the axes in another order than the mesh; in 1122 nothing is handed on."""
    outcome = run(number)
    assert outcome.verdict == "right", outcome.reason


def test_bytes():
    """The gradient of all-gather is a reduce-scatter (an all-to-all and a sum take as much), of reduce-scatter an
    all-gather: a product as Megatron splits it with sequences takes as much back as there (and x is gathered again
    for the gradient of its weight, as weights are)."""
    tile, mesh = 4 * 8 * 6, {"x": 4}

    def body(emit, x, up, down):
        hidden = emit(op.nn.relu(emit(op.matmul(emit(comm.all_gather(x, mesh, 0)), up))))
        return emit(comm.reduce_scatter(emit(op.matmul(hidden, down)), mesh, 0))

    def loss(emit, y):
        return emit(op.sum(emit(op.sin(y))))

    layouts = [{"x": 0}, {"x": 1}, {"x": 0}]
    mod = manual_module(body, [(8, 6), (6, 8), (8, 6)], mesh, layouts, {"x": 0}, more=loss)
    made = mt.distribute_module(mt.gradient(mod), mesh, {f"x{n}": one for n, one in enumerate(layouts)})
    sent = [(step.src, step.bytes) for step in made.program.collectives if step.bytes > 16]
    assert dict(sent).keys() == {"gv_1", "gv4", "d_8", "d_gv_1"}
    assert {size for _, size in sent} == {tile * 3 // 4}


def flat(name, given, axes, made, more=lambda emit, x: x):
    """main(x): what leads into what devices have of their own or out of it, by itself."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorStructInfo(given, "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(more(builder.emit, builder.emit(devices_call(name, x, axes, made))))
    return builder.get()


def test_what_gradients_write_is_checked():
    def distributed(mod, mesh):
        return lambda: mt.distribute_module(mod, mesh, {})

    own = flat("mesh.per_device", (2, 4), ("x",), (4,))
    refused(distributed(own, {"x": 2}), "devices along 'x' may have different values of 'gv'", "results of 'main'")
    refused(distributed(own, {"x": 4}), "axis 'x' of 2 devices has 4 in Mesh")
    refused(distributed(own, {"y": 2}), "axis 'x' of 2 devices is none of Mesh")
    out = distributed(flat("mesh.all_devices", (4,), ("x",), (2, 4)), {"x": 2})()
    assert out(torch.arange(4.0)).tolist() == [[0, 1, 2, 3]] * 2
    twice = flat(
        "mesh.per_device", (2, 2), ("x",), (2,), lambda emit, x: emit(devices_call("mesh.per_device", x, ("x",), ()))
    )
    refused(distributed(twice, {"x": 2}), "devices have their own along 'x'")


def test_axes_of_one_module():
    """Two manual computations that no mesh has the axes of."""

    def gradient(first, second):
        mod = manual_module(lambda emit, t: emit(op.sin(t)), [(8,)], first, [{"x": 0}], {"x": 0})
        builder, x = relax.BlockBuilder(mod), relax.Var("x", relax.TensorStructInfo((16,), "float32"))
        with builder.function("half", [relax.Var("t", relax.TensorStructInfo((4,), "float32"))], private=True):
            builder.emit_func_output(builder.emit(op.zeros((4,), "float32")))
        with builder.function("loss", [x]):
            part = builder.emit(op.strided_slice(x, [0], [0], [8]))
            y = builder.emit(relax.Call(mod.get_global_var("main"), [part]))
            half = builder.get().get_global_var("half")
            layout = [{"x": 0}]
            z = builder.emit(mt.manual_computation(half, [y if second["x"] == 2 else x], second, layout, layout[0]))
            builder.emit_func_output(builder.emit(op.add(builder.emit(op.sum(y)), builder.emit(op.sum(z)))))
        return lambda: mt.gradient(builder.get(), function="loss")

    where = "manual computations of one module"
    refused(gradient({"x": 2, "y": 2}, {"y": 2, "x": 2}), "axes are in several orders: ", where)
    refused(gradient({"x": 2}, {"x": 4}), "axis 'x' has 2, 4 devices", where)
