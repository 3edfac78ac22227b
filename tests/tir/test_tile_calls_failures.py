"""Tile operations that TileLang didn't make."""

import pytest
from tvm import ir, tirx

from mesh_tensor.tir.tile_calls import parse_tile_op
from tests.refusals import refusal


@pytest.mark.parametrize("name", ["copy", "fill", "gemm", "reduce", "atomicadd", "cumsum", "transpose"])
def test_arguments_of_another_kind(name):
    operator = ir.Op.get(f"tl.tileop.{name}")
    call = tirx.call_intrin("handle", operator, *[tirx.IntImm("int32", n) for n in range(12)])
    message = refusal(lambda: parse_tile_op(tirx.Evaluate(call)))
    assert f"tl.tileop.{name} is malformed" in message
    assert "not those that TileLang gives it" in message
