"""What dtypes are, by their names."""

import math

import numpy as np
import pytest

from mesh_tensor import MeshTensorError
from mesh_tensor.base.dtypes import dtype_bits, extreme, is_float, itemsize, numpy_dtype, poison_value


@pytest.mark.parametrize(
    ("dtype", "bits", "bytes_"),
    [
        ("float32", 32, 4),
        ("bfloat16", 16, 2),
        ("int8", 8, 1),
        ("bool", 8, 1),
        ("float8_e4m3fn", 8, 1),
        ("int4", 4, 1),
        ("float16x4", 16, 2),
    ],
)
def test_sizes(dtype, bits, bytes_):
    assert dtype_bits(dtype) == bits
    assert itemsize(dtype) == bytes_


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_extremes_of_integers(dtype):
    limits = np.iinfo(dtype)
    assert (extreme(dtype, -1), extreme(dtype, 1)) == (limits.min, limits.max)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e5m2"])
def test_extremes_of_floats_are_infinite(dtype):
    assert (extreme(dtype, -1), extreme(dtype, 1)) == (-math.inf, math.inf)


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e4m3fn"])
def test_what_has_no_infinity_ends_at_its_largest_number(dtype):
    assert (extreme(dtype, -1), extreme(dtype, 1)) == (-448.0, 448.0)


def test_extremes_of_bools():
    assert (extreme("bool", -1), extreme("bool", 1)) == (False, True)


@pytest.mark.parametrize(("dtype", "poison"), [("int16", -(2**15)), ("uint16", 2**16 - 1), ("bool", True)])
def test_poison_is_far_from_0(dtype, poison):
    assert poison_value(dtype) == poison


@pytest.mark.parametrize("dtype", ["float8_e4m3", "bfloat16", "float64", "complex64"])
def test_poison_is_no_number(dtype):
    assert math.isnan(poison_value(dtype))


def test_kinds():
    assert [is_float(d) for d in ("bfloat16", "float8_e5m2", "uint8", "bool")] == [True, True, False, False]
    assert numpy_dtype("float32x4") == np.float32
    assert numpy_dtype("float8_e4m3").name == "float8_e4m3fn"
    with pytest.raises(MeshTensorError, match="no numpy dtype for 'handle'"):
        numpy_dtype("handle")
