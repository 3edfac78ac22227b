"""What collectives refuse, and what they say."""

import pytest
import torch

from mesh_tensor import Mesh, MeshTensorError
from mesh_tensor.program.steps import CollectiveStep
from mesh_tensor.runtime.virtual import collectives
from mesh_tensor.runtime.virtual.collectives import check_step
from mesh_tensor.runtime.virtual.mesh_tensor import distribute
from tests.runtime.programs import value

MESH = Mesh({"x": 2, "y": 2})


@pytest.fixture
def tensor():
    return distribute(torch.arange(5.0), MESH, {"x": 0})


def message(call, *args):
    with pytest.raises(MeshTensorError) as caught:
        call(*args)
    return str(caught.value)


def test_unknown_axis(tensor):
    text = message(collectives.all_gather, tensor, "z")
    assert "unknown mesh axis 'z'" in text
    assert "'x', 'y'" in text


def test_wrong_placement(tensor):
    text = message(collectives.all_reduce, tensor, ["x", "y"])
    assert "axis 'x' is S[0], not partial" in text
    assert "axis 'y' is R, not partial" in text
    assert "all_reduce over 'x', 'y' of MeshTensor((5,), float32, S[0], R" in text


def test_dim_out_of_range(tensor):
    assert "dim 3" in message(collectives.slice_, tensor, "y", 3)


def test_broadcast_root(tensor):
    assert "root 2 is not in a group of 2 devices" in message(collectives.broadcast, tensor, "y", 2)


def test_permute_pairs(tensor):
    text = message(collectives.permute, tensor, "y", [(0, 1), (1, 1), (0, 4)])
    assert "pair (0, 4) leaves 0..1" in text
    assert "target 1 gets several tiles" in text


def test_permute_uneven(tensor):
    text = message(collectives.permute, tensor, "x", [(0, 1)])
    assert "device 0 holds (3,), device 2 (2,)" in text
    assert "pad the tensor" in text


def test_partial_by_several_ops():
    tensor = distribute(torch.arange(4.0), MESH, "P[sum], R")
    text = message(collectives.to_partial, tensor, "y", "max")
    assert "partial by several ops (axis 'x' by sum, axis 'y' by max)" in text


def test_a_step_must_say_what_its_values_say():
    src = value("A", (4,), MESH, {}, {"x": "sum"})
    dst = value("B", (4,), MESH, {})
    check_step(CollectiveStep("all_reduce", "A", "B", ("x",), "sum", None, None, 0, ""), src, dst)
    wrong = [
        CollectiveStep("all_reduce", "A", "B", ("y",), "sum", None, None, 0, ""),
        CollectiveStep("all_reduce", "A", "B", ("x",), "max", None, None, 0, ""),
        CollectiveStep("reduce_scatter", "A", "B", ("x",), "sum", None, 0, 0, ""),
    ]
    for step in wrong:
        with pytest.raises(AssertionError, match="over"):
            check_step(step, src, dst)
    with pytest.raises(AssertionError, match="can't change what is partial"):
        check_step(CollectiveStep("exchange", "A", "B", ("x",), None, None, None, 0, ""), src, dst)
    with pytest.raises(MeshTensorError, match="unknown collective 'gossip'"):
        check_step(CollectiveStep("gossip", "A", "B", ("x",), None, None, None, 0, ""), src, dst)


def test_a_direct_step_must_be_over_all_axes_that_it_takes():
    src, dst = value("A", (4,), MESH, {"x": 0}), value("B", (4,), MESH, {"y": 0})
    check_step(CollectiveStep("permute", "A", "B", ("x", "y"), None, None, None, 0, ""), src, dst)
    for step in (("permute", ("x",)), ("exchange", ("x", "y"))):
        with pytest.raises(AssertionError, match=r"permute over \('x', 'y'\) leads to R, S\[0\]"):
            check_step(CollectiveStep(step[0], "A", "B", step[1], None, None, None, 0, ""), src, dst)
