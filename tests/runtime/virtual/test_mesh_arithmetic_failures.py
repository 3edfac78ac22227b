"""What arithmetic on MeshTensors refuses, and what does it instead."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mesh_tensor import Mesh, MeshTensorError, distribute
from tests.refusals import refusal

MESH = Mesh({"x": 2, "y": 3})
WHOLE = torch.randn(6, 6)
TENSOR = distribute(WHOLE, MESH, {"x": 0})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t: torch.matmul(t, t), "matmul"),
        (lambda t: t @ t, "matmul"),
        (lambda t: WHOLE @ t, "matmul"),
        (lambda t: F.linear(t, WHOLE), "linear"),
        (lambda t: torch.einsum("ij,jk", t, t), "einsum"),
    ],
    ids=["matmul", "@", "reflected", "linear", "einsum"],
)
def test_products_are_for_kernels(call, name):
    text = refusal(call, TENSOR)
    assert f"torch's {name} can't be taken of a MeshTensor" in text or "rmatmul" in text
    assert "why: what it sums over may be split" in text
    assert "compile a kernel for it (mt.compile), or a module (mt.distribute_module)" in text
    assert ".full()" in text


@pytest.mark.parametrize(
    "function", [torch.sum, torch.cumsum, torch.sort, F.softmax, F.dropout, torch.reshape, torch.cat]
)
def test_what_is_not_element_wise(function):
    args = {torch.cat: ([TENSOR, TENSOR],), torch.sum: (TENSOR,), torch.reshape: (TENSOR, (36,))}
    text = refusal(function, *args.get(function, (TENSOR, 0)))
    assert f"torch's {function.__name__} can't be taken of a MeshTensor" in text
    assert "not one of the element-wise functions" in text
    assert ".full()" in text


def test_methods_that_it_has_not():
    for name in ("sum", "view", "T", "numpy", "cpu", "to", "item"):
        with pytest.raises(
            AttributeError, match=f"no '{name}', which is not element-wise: its whole tensor, .full\\(\\)"
        ):
            getattr(TENSOR, name)
    with pytest.raises(AttributeError, match="a MeshTensor has no attribute 'colour'"):
        TENSOR.colour  # noqa: B018
    assert not hasattr(TENSOR, "__cuda_array_interface__")


@pytest.mark.parametrize("call", [lambda t: t + WHOLE, lambda t: WHOLE * t, lambda t: torch.where(t > 0, t, WHOLE)])
def test_a_whole_tensor_beside_it(call):
    text = refusal(call, TENSOR)
    assert "a Tensor of shape (6, 6), which lies on no mesh, beside a MeshTensor" in text
    assert "mt.distribute(tensor, mesh, sharding)" in text


def test_a_scalar_whose_gradient_would_be_lost():
    text = refusal(lambda: TENSOR * torch.tensor(2.0, requires_grad=True))
    assert "a Tensor beside a MeshTensor: requires a gradient, which would be lost" in text
    with torch.no_grad():
        (TENSOR * torch.tensor(2.0, requires_grad=True)).full()


@pytest.mark.parametrize(("value", "told"), [("x", "'x' beside"), ([1], "a list beside"), (None, "no operands of add")])
def test_operands_that_are_none(value, told):
    text = refusal(lambda: TENSOR + value)
    assert told in text
    assert "where: add of MeshTensors" in text


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (distribute(WHOLE, MESH, {"x": 1}), "tensors as 'S[0], R' and as 'S[1], R'"),
        (distribute(WHOLE, MESH, {}), "tensors as 'S[0], R' and as 'R, R'"),
        (distribute(WHOLE[:, :1], MESH, {"x": 0}), "tensors of shapes (6, 6) and (6, 1)"),
        (distribute(WHOLE[0], MESH, {}), "tensors of shapes (6, 6) and (6,)"),
        (distribute(WHOLE, {"x": 2}, {"x": 0}), 'tensors on Mesh({"x": 2, "y": 3}) and on Mesh({"x": 2})'),
        (distribute(WHOLE, MESH, "S[0], P[sum]"), "tensors as 'S[0], R' and as 'S[0], P[sum]'"),
        (distribute(torch.tensor(1.0), MESH, "R, P[sum]"), "tensors of shapes (6, 6) and ()"),
    ],
    ids=str,
)
def test_tensors_that_lie_otherwise(other, told):
    text = refusal(lambda: TENSOR + other)
    assert told in text
    assert "why: every device computes its own tile, and nothing is moved or broadcast" in text
    assert ".redistribute('S[0], R')" in text


PART = distribute(WHOLE, MESH, "P[sum], S[0]")
SCALAR = distribute(torch.tensor(2.0), MESH, {})
SCALAR_PART = distribute(torch.tensor(2.0), MESH, "P[sum], R")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t: t + 1, "add"),
        (lambda t: 1 - t, "rsub"),
        (lambda t: t + SCALAR, "add"),
        (lambda t: t * t, "mul"),
        (lambda t: 2 / t, "rtruediv"),
        (lambda t: t / 0, "div"),
        (lambda t: t * float("inf"), "mul"),
        (lambda t: t * SCALAR, "mul"),
        (lambda t: t * torch.tensor(2.0), "mul"),
        (lambda t: torch.div(t, 2, rounding_mode="floor"), "div"),
        (lambda t: t // 2, "floordiv"),
        (lambda t: t**2, "pow"),
        (lambda t: t > 0, "gt"),
        (lambda t: t == t, "eq"),
        (torch.exp, "exp"),
        (torch.relu, "relu"),
        (abs, "abs"),
        (lambda t: t + distribute(WHOLE.double(), MESH, "P[sum], S[0]"), "add"),
    ],
)
def test_what_is_not_linear_in_a_partial_tensor(call, name):
    """Each device would add its own 1."""
    text = refusal(call, PART)
    assert f"{name} of a tensor that is partial (sum over 'x')" in text
    assert "why: a device holds a part of each value" in text
    assert "fix: reduce it first: .redistribute({'y': 0})" in text


@pytest.mark.parametrize(
    "call",
    [
        lambda: SCALAR_PART + SCALAR,
        lambda: SCALAR + SCALAR_PART,
        lambda: distribute(WHOLE, MESH, "P[max], R") * 2,
        lambda: distribute(WHOLE, MESH, "P[prod], R") + distribute(WHOLE, MESH, "P[prod], R"),
        lambda: distribute(WHOLE.int(), MESH, "P[sum], R") * 0.5,
        lambda: distribute(WHOLE.int(), MESH, "P[sum], R") / 2,
        lambda: distribute(WHOLE > 0, MESH, "P[sum], R") + distribute(WHOLE > 0, MESH, "P[sum], R"),
    ],
)
def test_other_partial_tensors(call):
    text = refusal(call)
    assert "partial" in text or "tensors as" in text
    assert ".redistribute(" in text


def test_results_are_new_tensors():
    assert "`out` is given for a MeshTensor" in refusal(torch.add, TENSOR, TENSOR, out=TENSOR)
    assert "`inplace` is given for a MeshTensor" in refusal(F.relu, TENSOR, inplace=True)
    assert "torch's relu_ can't" in refusal(torch.relu_, TENSOR)


def test_what_python_would_get_wrong_without_a_word():
    assert "a MeshTensor is neither true nor false" in refusal(lambda: bool(TENSOR == TENSOR))
    assert ".full().all()" in refusal(lambda: 1 if TENSOR > 0 else 2)
    assert ".full().numpy()" in refusal(np.asarray, TENSOR)
    assert ".tile(rank)" in refusal(lambda: TENSOR[0])
    assert ".tile(rank)" in refusal(list, TENSOR)
    with pytest.raises(MeshTensorError, match="items can't be set"):
        TENSOR[0] = 1
