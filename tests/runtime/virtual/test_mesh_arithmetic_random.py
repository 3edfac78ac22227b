"""Expressions of MeshTensors in any layouts: what torch gives on whole tensors, or refused."""

import operator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from mesh_tensor import Mesh, MeshTensor, MeshTensorError, distribute
from tests.runtime.reference import layouts

MESHES = [Mesh({"x": 2, "y": 2}), Mesh({"x": 3})]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.gt, torch.maximum, operator.pow]
UNARY = [operator.neg, abs, torch.exp, torch.relu, torch.square]
NUMBERS = st.sampled_from([0, 1, -2, 0.5, float("inf"), float("nan"), True])


@st.composite
def leaves(draw):
    """A tensor: whole, and on a mesh. Sums of parts are exact: all numbers are small and whole."""
    mesh, shape, dtype = draw(st.sampled_from(MESHES)), draw(st.sampled_from([(4, 6), (5, 3)])), draw(DTYPES)
    whole = torch.randint(-4, 5, shape).to(dtype)
    return whole, distribute(whole, mesh, draw(st.sampled_from(layouts(mesh, 2))))


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int32])
EXPRESSIONS = st.recursive(
    st.just("leaf"),
    lambda inner: (
        st.tuples(st.sampled_from(UNARY), inner)
        | st.tuples(st.sampled_from(BINARY), inner, inner)
        | st.tuples(st.sampled_from(BINARY[:-1]), inner, NUMBERS)
        | st.tuples(st.sampled_from(BINARY[:4]), NUMBERS, inner)
    ),
    max_leaves=4,
)


def evaluate(expression, leaf):
    """The value of the expression with one tensor for all its leaves."""
    if expression == "leaf":
        return leaf
    if not isinstance(expression, tuple):
        return expression
    function, *operands = expression
    return function(*(evaluate(operand, leaf) for operand in operands))


@given(leaf=leaves(), expression=EXPRESSIONS)
def test_right_or_refused(leaf, expression):
    whole, tensor = leaf
    try:
        expected = evaluate(expression, whole)
    except (RuntimeError, TypeError):  # of torch's own: an operation that the dtype has not
        return
    try:
        result = evaluate(expression, tensor)
    except MeshTensorError as error:
        assert "partial" in str(error) or "no operands" in str(error)  # noqa: PT017
        assert tensor.sharding.partial
        return
    assert isinstance(result, MeshTensor)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.full(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv, operator.lt])
def test_every_pair_of_layouts(op):
    """Right where both lie alike and are not partial in a way that matters; refused else."""
    mesh, right = MESHES[0], 0
    first, second = torch.randint(1, 9, (5, 3)).double(), torch.randint(1, 9, (5, 3)).double()
    for one in layouts(mesh, 2):
        for other in layouts(mesh, 2):
            a, b = distribute(first, mesh, one), distribute(second, mesh, other)
            try:
                result = op(a, b)
            except MeshTensorError:
                assert one != other or one.partial
                continue
            assert one == other
            torch.testing.assert_close(result.full(), op(first, second))
            right += 1
    assert right >= 9
