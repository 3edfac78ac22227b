"""Devices that are to hold the same are compared after every step."""

import math

import pytest
import torch

from mesh_tensor import Mesh
from mesh_tensor.lowering.verify import VerificationError
from mesh_tensor.program.steps import AllocStep, KernelStep
from mesh_tensor.runtime.virtual.operators import first_difference
from tests.runtime.programs import axpy_kernel, kernel_of, local_axpy_kernel, program, value

MESH = Mesh({"x": 2, "y": 2})


def run(sharding, partial=None, *, poison=True):
    """B = A + 100 * x + 10 * y on device (x, y), whatever is said of how B lies."""
    values = [value("A", (4,), MESH, sharding), value("B", (4,), MESH, sharding, partial)]
    func = local_axpy_kernel(values[0].tile_shape[0])
    step = KernelStep("kernel_0", func, ("A", "B"), ("x", "y"), ("B",), 0, ("alpha", "n"))
    made = program(MESH, values, [AllocStep("B"), step], ["A", ">B"])
    return kernel_of(axpy_kernel(4), made, poison=poison)(torch.zeros(4), 1.0, 0)


@pytest.mark.parametrize(
    ("sharding", "partial", "told"),
    [
        ({}, None, ["('R, R') at [0] is 0.0 on device {'x': 0, 'y': 0}, 10.0 on {'x': 0, 'y': 1}", "110.0 on {'x': 1"]),
        ({"x": 0}, None, ["at [2] is 100.0 on device {'x': 1, 'y': 0}, 110.0 on {'x': 1, 'y': 1}"]),
        ({}, {"x": "sum"}, ["('P[sum], R') at [0] is 100.0 on device {'x': 1, 'y': 0}, 110.0"]),
    ],
)
def test_what_differs_is_named(sharding, partial, told):
    with pytest.raises(VerificationError) as caught:
        run(sharding, partial)
    assert "program test: what kernel kernel_0 leaves" in str(caught.value)
    assert all(text in str(caught.value) for text in told)


def test_parts_and_contributions_differ():
    assert run({"x": 0, "y": 0}).tolist() == [0, 10, 100, 110]
    assert run({}, {"x": "sum", "y": "sum"}).tolist() == [220] * 4


def test_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("MESH_TENSOR_VERIFY", "0")
    assert run({}).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.5, 4.5]], (1, 0)),
        ([0.0], [-0.0], (0,)),
        ([math.nan, 1.0], [-math.nan, 1.0], None),
        ([math.nan], [1.0], (0,)),
        (1.0, 2.0, ()),
        ([], [], None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.float8_e5m2])
def test_the_first_bit_that_differs(one, other, place, dtype):
    assert first_difference(torch.tensor(one).to(dtype), torch.tensor(other).to(dtype)) == place


def test_rows_that_lie_otherwise():
    assert first_difference(torch.ones(3, 2), torch.ones(2, 3).t()) is None
    assert first_difference(torch.tensor([True, False]), torch.tensor([True, True])) == (1,)
