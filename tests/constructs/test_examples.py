"""Every example of the table: right on every target and mesh, or refused with the message of its row."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.targets.kernels import as_numpy

from .row import Example, Row
from .table import TABLE

#: One device; two that divide the rows; five, the last of which have short tiles or none.
DEVICES = (1, 2, 5)


def as_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor of a copy of the array; of dtypes that numpy lacks, too."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array.copy())
    bits = array.view(f"u{array.dtype.itemsize}").copy()
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def _cases(verdict: str) -> list:
    return [
        pytest.param(row, example, id=f"{row.title}: {example.name}".replace(" ", "_"))
        for row in TABLE
        if row.verdict == verdict
        for example in row.examples
    ]


@cache
def _kernel(make: Callable[[], tirx.PrimFunc]) -> tirx.PrimFunc:
    return make()


def _run(example: Example, devices: int, target: str) -> np.ndarray:
    """What the example's last output is."""
    func = mt.annotate(_kernel(example.kernel), mt.Mesh({"x": devices}), example.sharding)
    result = mt.compile(func, target=target)(*map(as_torch, example.inputs))
    return as_numpy(torch.as_tensor(result[-1] if isinstance(result, tuple) else result))


@pytest.mark.parametrize("target", ["interpret", "c"])
@pytest.mark.parametrize(("row", "example"), _cases("understood"))
def test_understood(row: Row, example: Example, target: str):
    assert example.reference is not None
    expected = example.reference(*example.inputs).astype(np.float64)
    for devices in DEVICES:
        result = _run(example, devices, target).astype(np.float64)
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6, err_msg=f"{row.title} on {devices} devices")


@pytest.mark.parametrize(("row", "example"), _cases("refused"))
def test_refused(row: Row, example: Example):
    for target in example.targets:
        for devices in DEVICES:
            with pytest.raises(mt.MeshTensorError) as caught:
                _run(example, devices, target)
            assert row.says in str(caught.value)
