"""The order of the axes that split one dim, where it is not the mesh's."""

import pytest
import tilelang.language as T
import torch
import tvm
from tvm import relax

import mesh_tensor as mt

from .modules import function, kinds, layouts

op = relax.op
XY = {"x": 2, "y": 3}


def mlp(rows=12):
    return function(lambda emit, x, w: emit(op.nn.relu(emit(op.matmul(x, w)))), x=(rows, 12), w=(12, 6))


def check(mod, mesh, stated, *shapes, **said):
    """Distributed, with poison, as on one device; what is stated prints and parses."""
    run = mt.distribute_module(mt.annotate_module(mod, mesh, stated, **said), mesh, poison=True)
    inputs = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(run(*inputs), mt.run_sequential(mod, inputs), rtol=1e-4, atol=1e-4)
    annotated = mt.annotate_module(mod, mesh, stated, **said)
    again = mt.read_module_annotations(tvm.script.from_source(annotated.script())).annotations
    assert again == mt.read_module_annotations(annotated).annotations
    return run


@pytest.mark.parametrize("rows", [12, 13, 1])
def test_rows_stay(rows):
    """What is computed row by row moves nothing, uneven tiles too."""
    run = check(mlp(rows), XY, {"x": {("y", "x"): 0}}, (rows, 12), (12, 6))
    assert kinds(run.plan) == []
    assert layouts(run.plan)["lv1"] == "S[0:1], S[0]"
    assert "S[0:1], S[0]" in run.explain()


def test_sums():
    run = check(mlp(), XY, {"x": {("y", "x"): 1}, "w": {("y", "x"): 0}}, (12, 12), (12, 6))
    assert kinds(run.plan) == ["all_reduce"]


@pytest.mark.parametrize(("mesh", "kind"), [({"x": 2, "y": 2}, "permute"), (XY, "exchange")])
def test_a_change_of_order_moves_every_element_once(mesh, kind):
    shape = (12, 4)
    mod = function(lambda emit, x: emit(op.negative(x)), x=shape)
    run = check(mod, mesh, {"x": {("y", "x"): 0}, "lv": {("x", "y"): 0}}, shape)
    assert kinds(run.plan) == [kind]
    plan = mt.plan_redistribution(shape, torch.float32, mt.Sharding.make(mesh, 2, {("y", "x"): 0}), {"x": 0, "y": 0})
    lacking = {"permute": 48, "exchange": 32}[kind]  # a tile; of 6 devices the busiest has none of its 2 rows
    assert plan.bytes == lacking
    assert [move.kind for move in plan.moves] == [kind]


@pytest.mark.parametrize(
    ("mesh", "stated"),
    [
        ({"x": 4, "y": 3}, {"x": {("x:(2)2", "y", "x:(1)2"): 0}}),
        (XY, {"x": '{("y", "x"): 0}', "w": "S[1:1], S[1]"}),
        (XY, {"x": {"sharding": {("y", "x"): 0}}, "w": {"x": 0}}),
        (XY, {"w": mt.Sharding.make(XY, 2, {("y", "x"): 1})}),
        ({"x": 2, "y": 2, "z": 2}, {"x": {("z", "x"): 1, "y": 0}, "w": {("x", "z"): 0}}),
    ],
)
def test_forms(mesh, stated):
    check(mlp(), mesh, stated, (12, 12), (12, 6))


def test_with_other_statements():
    """Open dims, priorities, groups and barriers go with an order."""
    stated = {"x": {("y", "x"): 0}, "w": {"x": 1}}
    said = {"open": {"w": [0]}, "priority": {"w": 1}, "groups": {"g": ["lv", "lv1"]}, "barriers": {"lv": "forward"}}
    run = check(mlp(), XY, stated, (12, 12), (12, 6), **said)
    assert layouts(run.plan)["lv"] == layouts(run.plan)["lv1"]


def refused(stated, mesh, *facts):
    with pytest.raises(mt.MeshTensorError) as raised:
        mt.annotate_module(mlp(), mesh, stated)
    assert not [fact for fact in facts if fact not in str(raised.value)], raised.value


def test_what_is_no_order():
    xyz = {**XY, "z": 2}
    refused(
        {"x": {("y", "x"): 0, "z": 0}}, xyz, "('y', 'x') split dim 0 in that order, and other axes split it as well"
    )
    refused({"x": {("y", "q"): 0}}, XY, "unknown mesh axis 'q'")
    refused({"x": {("y", "y"): 0}}, XY, "axis 'y' splits dim 0, but also splits dim 0")
    refused({"x": {("y", "x"): 0, "x": 1}}, XY, "axis 'x' splits dim 0", "but also splits dim 1")


@T.prim_func
def double(A: T.Tensor((24, 8), "float32"), B: T.Tensor((24, 8), "float32")):
    with T.Kernel(6, threads=32) as bx:
        for i, j in T.Parallel(4, 8):
            B[bx * 4 + i, j] = A[bx * 4 + i, j] * 2.0


@pytest.mark.parametrize("results", [{("y", "x"): 0}, {"x": 0, "y": 0}, {("y", "x"): 1}])
def test_kernels(results):
    """A kernel takes and leaves tensors so; in it, axes are in the mesh's order."""
    func = mt.annotate(double, XY, {"A": {("y", "x"): 0}, "B": results})
    kernel = mt.compile(func, target="interpret")
    a = torch.randn(24, 8)
    torch.testing.assert_close(kernel(a), a * 2)
    given = mt.distribute(a, XY, {("y", "x"): 0})
    made = kernel(given)
    torch.testing.assert_close(made.full(), a * 2)
    assert made.sharding == mt.Sharding.make(XY, 2, results)
