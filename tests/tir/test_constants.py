"""Constants of TIR, there and back."""

import math

import pytest
import tilelang  # noqa: F401  (brings the tvm below)
from tvm import tirx

from mesh_tensor.base.reductions import REDUCTIONS, neutral
from mesh_tensor.tir.rewrite import constant, neutral_element, number

DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"]
DTYPES += ["int8", "uint8", "int32", "uint32", "int64", "bool"]


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_neutral_elements(op, dtype):
    if not REDUCTIONS[op].takes(dtype):
        return
    expr = neutral_element(op, dtype)
    assert expr.dtype == dtype
    assert number(expr) == neutral(op, dtype)


def test_what_is_larger_than_any_literal():
    assert constant(2**64 - 1, "uint64").dtype == "uint64"


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        (tirx.const(2.5, "float32"), 2.5),
        (tirx.Cast("float16", tirx.const(2, "int32")), 2.0),
        (tirx.const(0.0, "float32") - tirx.const(3.0, "float32"), -3.0),
        (-tirx.infinity("float32"), -math.inf),
        (tirx.Var("v", "float32"), None),
        (tirx.Var("v", "float32") * 2.0, None),
        (tirx.Cast("int32", tirx.const(3.0, "float32")), 3),
        (tirx.Cast("int32", tirx.Cast("uint8", tirx.const(-1, "int32"))), None),
        (tirx.Cast("int32", tirx.const(2.5, "float32")), None),
        (tirx.const(2**63 - 1, "int64"), 2**63 - 1),
    ],
    ids=str,
)
def test_numbers(expr, value):
    assert number(expr) == value
