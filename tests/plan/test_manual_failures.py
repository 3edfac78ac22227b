"""Manual computations that are refused, and why."""

import pytest
import torch
from tvm import relax
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt

from .test_manual import Nested, manual_module

op, comm = relax.op, mt.comm


def refused(call, *facts):
    with pytest.raises(mt.MeshTensorError) as raised:
        call()
    text = str(raised.value)
    assert not [fact for fact in facts if fact not in text], text


def distributed(mod, mesh, stated=None):
    return lambda: mt.distribute_module(mod, mesh, stated or {})


def rows(body=lambda emit, t: emit(op.negative(t)), out=None, mesh=None, axes=None, shape=(8, 4)):
    mesh = mesh or {"x": 2}
    return manual_module(body, [shape], mesh, [{"x": 0}], {"x": 0} if out is None else out, axes)


def test_devices_with_different_values():
    mod = rows(out={})
    refused(distributed(mod, {"x": 2}), "devices along 'x' may have different values of main.", "result 0", "reduce or")
    refused(lambda: mt.run_sequential(mod, [torch.randn(8, 4)]), "devices have different values where 'R' says")


def test_uneven_tiles():
    text = '{"body": "body", "axes": {"x": 2}, "in": ["S[0]"], "out": ["S[0]"]}'
    mod = rows()
    builder = relax.BlockBuilder(mod)
    wide = relax.Var("x", relax.TensorStructInfo((7, 4), "float32"))
    with builder.function("uneven", [wide]):
        info = relax.TensorStructInfo((7, 4), "float32")
        call = relax.op.call_pure_packed("mesh.manual_computation", wide, relax.StringImm(text), sinfo_args=[info])
        builder.emit_func_output(builder.emit(call))
    mod = builder.get()
    refused(
        lambda: mt.distribute_module(mod, {"x": 2}, {}, function="uneven"),
        "operand 0, 'x', is [7, 4], and 'x' (2) don't divide its dim 0 of 7 evenly",
        "all tiles are of one shape",
    )
    refused(lambda: mt.run_sequential(mod, [torch.randn(7, 4)], "uneven"), "[7, 4] has no tiles of one shape in 'S[0]'")


def test_axes():
    refused(distributed(rows(), {"x": 4}), "axis 'x' of 2 devices has 4 in Mesh", "a manual computation")
    refused(distributed(rows(), {"y": 2}), "axis 'x' of 2 devices is none of Mesh")
    both = manual_module(lambda emit, t: t, [(8, 4)], {"x": 2, "y": 2}, [{"x": 0, "y": 1}], {"x": 0, "y": 1})
    refused(distributed(both, {"y": 2, "x": 2}), "the axes are 'x', 'y', but 'y', 'x' in the mesh")
    free = rows(lambda emit, t: emit(comm.all_reduce(t, {"y": 2})), mesh={"x": 2, "y": 2}, axes=["x"])
    refused(distributed(free, {"x": 2, "y": 2}), "axis 'y' is not manual here", "use manual axes: 'x'")


@I.ir_module
class Twice:
    @R.function(private=True)
    def inner(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        return R.negative(x)

    @R.function(private=True)
    def body(x: R.Tensor((8, 4), "float32")) -> R.Tensor((8, 4), "float32"):
        cls = Twice
        return mt.manual_computation(cls.inner, (x,), {"x": 2}, [{"x": 0}], {"x": 0})

    @R.function
    def main(x: R.Tensor((16, 4), "float32")) -> R.Tensor((16, 4), "float32"):
        cls = Twice
        return mt.manual_computation(cls.body, (x,), {"x": 2}, [{"x": 0}], {"x": 0})

    @R.function
    def bare(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        return R.ccl.allreduce(x, "sum", True)


def test_an_axis_that_is_manual_already():
    refused(distributed(Twice, {"x": 2}), "axis 'x' is manual already, around it", "body.")


def test_collectives_outside():
    refused(
        lambda: mt.distribute_module(Twice, {"x": 2}, {}, function="bare"),
        "R.ccl.allreduce stands outside of a manual computation",
        "bare.",
    )


def test_annotations_of_manual_axes():
    refused(
        distributed(Nested, {"x": 2, "y": 2}, {"body.x": {"x": 0}}),
        "is annotated along 'x', which is manual there",
        "every device has a value of its own",
    )


def test_what_is_stated():
    text = relax.Var("t", relax.TensorStructInfo((4, 6), "float32"))
    refused(lambda: comm.reduce_scatter(text, {"x": 4}, 1), "dim 1 of the tile has 6 elements for 4 devices")
    refused(lambda: comm.all_gather(text, {"x": 4}, 2), "dim 2 of a tile of 2 dims")
    refused(lambda: comm.all_reduce(text, {"x": 4}, "mean"), "unknown op 'mean'", "'avg'")
    refused(lambda: comm.permute(text, {"x": 4}, [(0, 1), (2, 1)]), "sends and receives once at most")
    refused(lambda: comm.permute(text, {"x": 2, "y": 2}, []), "a permutation over several axes")
    refused(lambda: comm.broadcast(text, {"x": 4}, 4), "root 4 of 4 devices")
    refused(lambda: rows(out=[{"x": 0}, {}]), "tensor 0: the sharding [{'x': 0}, {}] has 2 placements")
    refused(lambda: rows(out={"z": 0}), "tensor 0: unknown mesh axis 'z'", "manual axes 'x'")


def test_gradients_and_searches():
    mod = rows(out={"x": 0})
    for axes in ({"x": 4}, {"y": 2}):
        refused(lambda axes=axes: mt.search(mod, devices=4, meshes=[axes]), "axis 'x' of 2 devices", "devices=mt.Mesh")
    refused(lambda: mt.search(mod, 2, batch=8, inputs=["x0"]), "manual computations over 'x'", "leave out batch")
    both = rows(mesh={"x": 2, "y": 2}, out={"x": 0}, axes=["x", "y"])
    refused(lambda: mt.search(both, devices=4, meshes=[{"y": 2, "x": 2}]), "are 'x', 'y', but 'y', 'x' in the mesh")
    refused(lambda: mt.search(both, devices=6), "has 6 in Mesh", "{'x': 2, 'y': 2}, in this order")
