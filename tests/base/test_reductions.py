"""The table of reductions: every record agrees with the functions that it names."""

import numpy as np
import pytest
import tilelang  # noqa: F401  (brings the tvm below)
import torch
from tvm import arith, tirx

from mesh_tensor import MeshTensorError
from mesh_tensor.base.dtypes import is_float, numpy_dtype
from mesh_tensor.base.reductions import PARTIAL_OPS, REDUCTIONS, neutral, reduction

DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"]
DTYPES += ["int8", "uint8", "int32", "uint32", "int64", "uint64", "bool"]


def values_of(dtype):
    """Numbers of a dtype, its extremes among them."""
    kind = numpy_dtype(dtype)
    if is_float(dtype):
        return np.concatenate([np.random.default_rng(0).normal(size=20), [0.0, 448.0, -448.0]]).astype(kind)
    if dtype == "bool":
        return np.array([False, True])
    limits = np.iinfo(kind)
    numbers = np.random.default_rng(0).integers(limits.min, limits.max, 20, dtype=kind, endpoint=True)
    return np.concatenate([numbers, np.array([limits.min, 0, limits.max], kind)])


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_neutral_elements_change_nothing(op, dtype):
    record, values = REDUCTIONS[op], values_of(dtype)
    if not record.takes(dtype) or (dtype == "bool" and record.magnitudes):
        return
    values = values[values >= 0] if record.magnitudes else values  # of magnitudes, results have none but these
    start = values.dtype.type(neutral(op, dtype))
    np.testing.assert_array_equal(getattr(np, record.function)(values, start), values)


@pytest.mark.parametrize("op", PARTIAL_OPS)
def test_torch_and_numpy_agree(op):
    a, b = np.array([3, -5, 12, 7], "int32"), np.array([-2, 9, 10, 7], "int32")
    function = REDUCTIONS[op].function
    expected = getattr(np, function)(a, b)
    assert getattr(torch, function)(torch.from_numpy(a), torch.from_numpy(b)).tolist() == expected.tolist()


@pytest.mark.parametrize("op", REDUCTIONS)
def test_tir_computes_the_same(op):
    """TVM folds constants."""
    record = REDUCTIONS[op]
    folded = getattr(tirx, record.tir)(tirx.const(12, "int32"), tirx.const(10, "int32"))
    assert int(arith.Analyzer().simplify(folded)) == int(getattr(np, record.function)(12, 10))


@pytest.mark.parametrize("op", REDUCTIONS)
def test_combining_twice(op):
    record, twice = REDUCTIONS[op], []
    for number in (2, 5, 12):
        value = np.int32(number)
        twice.append(getattr(np, record.function)(value, value) == value)
    assert all(twice) == record.idempotent


def test_magnitudes_are_completed_by_what_combines_them():
    for record in REDUCTIONS.values():
        assert REDUCTIONS[record.completed_by].function == record.function
        assert REDUCTIONS[record.completed_by].magnitudes is None


def test_refusals():
    with pytest.raises(MeshTensorError, match=r"unknown reduction 'mean'[\s\S]*use one of 'sum', 'max', 'min', 'prod'"):
        reduction("mean")
    with pytest.raises(MeshTensorError, match="unknown reduction 'summ'; did you mean 'sum'?"):
        neutral("summ", "int32")
    with pytest.raises(MeshTensorError, match="'bitand' has no meaning for bfloat16"):
        neutral("bitand", "bfloat16")
    with pytest.raises(MeshTensorError, match="'max' has no meaning for complex64"):
        neutral("max", "complex64")
