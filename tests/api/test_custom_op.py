"""A kernel as an operation of torch's."""

import pytest
import torch

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.runtime.programs import accumulate_kernel
from tests.runtime.ranks.compiled_bodies import compiled_around, compiled_model, uneven_columns
from tests.runtime.ranks.launcher import run

MESH = {"x": 2}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model(backend):
    func = mt.annotate(matmul(6, 4, 8), MESH, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    kern = mt.compile(func, target="interpret")
    op = mt.as_custom_op(kern, f"matmul_{backend}")
    model = torch.compile(lambda x, w: torch.relu(op(x + 1, w)) * 2, fullgraph=True, backend=backend)
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    with torch.inference_mode():
        torch.testing.assert_close(model(a, b), torch.relu((a + 1) @ b) * 2, rtol=1e-4, atol=1e-4)


def test_what_is_updated_in_place():
    layouts = {"A": {"x": 0}, "B": {"x": 0}}
    kern = mt.compile(mt.annotate(accumulate_kernel(7), MESH, layouts), target="interpret")
    op = mt.as_custom_op(kern, "accumulate")

    def model(a, b):
        op(a, b)
        return b * 2

    a, b = torch.randn(7), torch.randn(7)
    expected = a + b
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), expected * 2)
    torch.testing.assert_close(b, expected)
    assert op(a, b) is b


def test_on_ranks():
    run(compiled_model, 2)


def test_kernels_that_are_no_operations_on_ranks():
    """torch.compile looked into process groups, and ended the mesh."""
    run(compiled_around, 2)


def test_uneven_columns_on_ranks():
    run(uneven_columns, 2)
