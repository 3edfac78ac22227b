"""Neutral elements: combining with them changes nothing."""

import numpy as np
import pytest
import tilelang  # noqa: F401  (brings the tvm below)
from tvm import tirx

from mesh_tensor.rules.kernel.values import neutral_element, neutral_number, number

COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "abssum": lambda a, b: a + abs(b),
    "absmax": lambda a, b: np.maximum(a, abs(b)),
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
}
FLOATS = [op for op in COMBINE if not op.startswith("bit")]


def as_number(expr):
    """The value of a constant expression."""
    value = number(expr)
    if value is None and isinstance(expr, tirx.Call):
        value = ~int(number(expr.args[0]))  # bitwise_not
    return value


@pytest.mark.parametrize("op", FLOATS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats(op, dtype):
    neutral = as_number(neutral_element(op, dtype))
    values = np.random.default_rng(0).normal(size=20)
    values = abs(values) if op == "absmax" else values  # a maximum of magnitudes is none itself
    np.testing.assert_array_equal(COMBINE[op](values, neutral), values)
    assert neutral_number(op, dtype) == neutral
    assert neutral_element(op, dtype).dtype == dtype


@pytest.mark.parametrize("op", COMBINE)
@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_integers(op, dtype):
    neutral = int(as_number(neutral_element(op, dtype)))
    limits = np.iinfo(dtype)
    values = np.random.default_rng(0).integers(limits.min, limits.max, 20, endpoint=True)
    values = abs(values) if op == "absmax" else values
    np.testing.assert_array_equal(COMBINE[op](values, neutral), values)
    assert neutral_element(op, dtype).dtype == dtype


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_of_integers_are_not_compared_as_numbers(op):
    assert neutral_number(op, "int32") is None


def test_what_is_no_reduction():
    with pytest.raises(ValueError, match="'mean' is no reduction"):
        neutral_element("mean", "float32")


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        (tirx.const(2.5, "float32"), 2.5),
        (tirx.Cast("float16", tirx.const(2, "int32")), 2.0),
        (tirx.const(0.0, "float32") - tirx.const(3.0, "float32"), -3.0),
        (-tirx.infinity("float32"), -np.inf),
        (tirx.Var("v", "float32"), None),
        (tirx.Var("v", "float32") * 2.0, None),
    ],
    ids=str,
)
def test_constants(expr, value):
    assert number(expr) == value
