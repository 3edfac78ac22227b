"""A sharding stated as a list, one placement per mesh axis: wherever a sharding is."""

import pytest
import tilelang.language as T
import torch
import torch.distributed.tensor as dt  # noqa: TID251
from tvm import tirx
from tvm.script import ir as I
from tvm.script import relax as R

import mesh_tensor as mt
from mesh_tensor.annotations.annotate import INFO_ATTR, read_annotations
from tests.refusals import refusal

MESH = mt.Mesh({"x": 2, "y": 3})
LISTS = [
    ([mt.Shard(0), mt.Replicate()], "S[0], R"),
    ((mt.Replicate(), mt.Shard(-1)), "R, S[1]"),
    ([dt.Shard(1), dt.Replicate()], "S[1], R"),
    ([dt.Shard(0), mt.Shard(0)], "S[0], S[0]"),
    ([0, 1], "S[0], S[1]"),
    ([None, 0], "R, S[0]"),
    ({"y": mt.Shard(1)}, "R, S[1]"),
    ({"x": dt.Shard(0), "y": mt.Replicate()}, "S[0], R"),
]
PARTIAL = [
    ([mt.Shard(0), mt.Partial()], "S[0], P[sum]"),
    ([mt.Partial("max"), 1], "P[max], S[1]"),
    ([dt.Partial("product"), dt.Replicate()], "P[prod], R"),
    ({"x": mt.Partial("min")}, "P[min], R"),
]
ids = {"ids": lambda value: str(value).replace(" ", "")}


@T.prim_func
def scale(A: T.Tensor((12, 6), "float32"), B: T.Tensor((12, 6), "float32")):
    with T.Kernel(12) as bx:
        for j in T.Parallel(6):
            B[bx, j] = A[bx, j] * 2.0


@pytest.mark.parametrize(("stated", "text"), LISTS + PARTIAL, **ids)
def test_every_door_reads_the_same(stated, text):
    expected = mt.Sharding.parse(MESH, 2, text)
    assert mt.Sharding.make(MESH, 2, stated) == expected
    for said in (stated, {"sharding": stated}, mt.init_mesh_tensor_info(stated)):
        annotated = mt.annotate(scale, MESH, {"A": said})
        assert read_annotations(annotated)[1]["A"].sharding == expected
        assert annotated.script()
    buffer = tirx.decl_buffer((12, 6), name="A")
    fns = mt.mesh_tensor_functions(MESH)
    attrs = fns["annotate_mesh_tensor_info"]({buffer: mt.init_mesh_tensor_info(stated)})
    assert dict(attrs[INFO_ATTR][buffer.data]["sharding"]) == expected.as_dict()
    assert fns["get_tile_shape"](buffer) == expected.tile_shape((12, 6))


@pytest.mark.parametrize(("stated", "text"), LISTS + PARTIAL, **ids)
def test_tensors(stated, text):
    whole = torch.randn(12, 6)
    spread = mt.distribute(whole, MESH, stated)
    assert spread.sharding.text() == text
    torch.testing.assert_close(spread.full(), whole)
    other = mt.distribute(whole, MESH, {"y": 0})
    assert mt.plan_redistribution((12, 6), torch.float32, other.sharding, stated).dst.text() == text
    for moved in (other.redistribute(stated), mt.redistribute(other, stated)):
        assert moved.sharding.text() == text
        torch.testing.assert_close(moved.full(), whole)


@pytest.mark.parametrize(("stated", "text"), LISTS, **ids)
def test_a_kernel_runs_so(stated, text):
    kernel = mt.compile(mt.annotate(scale, MESH, {"A": stated, "B": stated}), target="interpret", poison=True)
    a = torch.randn(12, 6)
    torch.testing.assert_close(kernel(a), a * 2)
    assert kernel(mt.distribute(a, MESH, stated)).sharding.text() == text


def test_modules():
    @I.ir_module
    class Module:
        @R.function
        def main(X: R.Tensor((12, 6), "float32")) -> R.Tensor((12, 6), "float32"):
            with R.dataflow():
                Y = R.nn.relu(X)
                R.output(Y)
            return Y

    annotated = mt.annotate_module(Module, MESH, {"X": [mt.Shard(0), mt.Replicate()]})
    stated = mt.read_module_annotations(annotated).annotations.values()
    assert [annotation.sharding.text() for annotation in stated] == ["S[0], R"]
    x = torch.randn(12, 6)
    torch.testing.assert_close(mt.distribute_module(Module, MESH, {"X": [dt.Shard(0), None]})(x), torch.relu(x))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_placements(count):
    stated = [mt.Replicate()] * count
    told = f"has {count} placements, but the mesh has 2 axes ('x', 'y')"
    buffer = tirx.decl_buffer((12, 6), name="A")
    for call in (
        lambda: mt.annotate(scale, MESH, {"A": stated}),
        lambda: mt.mesh_tensor_functions(MESH)["annotate_mesh_tensor_info"]({buffer: mt.init_mesh_tensor_info(stated)}),
        lambda: mt.distribute(torch.zeros(12, 6), MESH, stated),
        lambda: mt.distribute(torch.zeros(12, 6), MESH, {}).redistribute(stated),
    ):
        message = refusal(call)
        assert told in message


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ([mt.Shard(2), None], "axis 'x' splits dim 2, but there are 2 dims"),
        ([True, None], "axis 'x' is given dim True; an axis splits one dim"),
        ([dt.Partial("avg"), None], "axis 'x' is given dim Partial(avg)"),
        ([mt.Partial("mean"), None], "axis 'x' is partial with unknown op 'mean'"),
        ([mt.Partial("sum"), mt.Partial("max")], "partial by several ops"),
        ([[0], None], "axis 'x' is given dim [0]"),
    ],
    **ids,
)
def test_placements_that_are_none(stated, told):
    message = refusal(mt.annotate, scale, MESH, {"A": stated})
    assert told in message
    assert "buffer 'A'" in message
