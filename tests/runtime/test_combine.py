"""Reductions of tensors, op by op and dtype by dtype."""

import numpy as np
import pytest
import torch

from mesh_tensor import MeshTensorError
from mesh_tensor.base.dtypes import poison_value
from mesh_tensor.base.reductions import neutral
from mesh_tensor.runtime.elementwise import combiner
from mesh_tensor.targets.dtypes import torch_dtype

from .reference import FOLDS

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
ARITHMETIC = ["sum", "prod", "max", "min"]
BITWISE = ["bitand", "bitor", "bitxor"]


def numbers(dtype: str, count: int) -> list[torch.Tensor]:
    kind = torch_dtype(dtype)
    if kind.is_floating_point:
        return [torch.randn(7, 5).to(kind) for _ in range(count)]
    low, high = (0, 2 * torch.iinfo(torch.int32).max) if "u" in dtype else (-(2**31), 2**31)
    return [torch.randint(low, high, (7, 5)).to(kind) for _ in range(count)]


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_floats(dtype, op, count):
    """Narrow floats are as good as float32 rounded once."""
    sources = numbers(dtype, count)
    out = torch.empty_like(sources[0])
    combiner(op, out.dtype)(out, sources)
    wide = torch.float64 if dtype == "float64" else torch.float32
    expected = sources[0].to(wide)
    for source in sources[1:]:
        expected = FOLDS[op](expected, source.to(wide))
    assert torch.equal(out.to(wide), expected.to(out.dtype).to(wide))


@pytest.mark.parametrize("op", ARITHMETIC + BITWISE)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(dtype, op):
    sources = numbers(dtype, 3)
    arrays = [source.numpy() for source in sources]
    out = torch.empty_like(sources[0])
    combiner(op, out.dtype)(out, sources)
    ufunc = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}.get(op, f"bitwise_{op[3:]}")
    combine = getattr(np, ufunc)
    expected = combine(combine(arrays[0], arrays[1]), arrays[2])
    assert (out.numpy() == expected).all()


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint8", "int32", "uint32"])
def test_neutral_elements_change_nothing(dtype, op):
    kind = torch_dtype(dtype)
    numbers_, out = numbers(dtype, 1)[0], torch.empty(7, 5, dtype=kind)
    blank = torch.full((7, 5), neutral(op, dtype), dtype=kind)
    combiner(op, kind)(out, [blank, numbers_])
    assert torch.equal(out, numbers_)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "bool"])
@pytest.mark.parametrize("op", BITWISE)
def test_neutral_bits_change_nothing(dtype, op):
    kind = torch_dtype(dtype)
    numbers_, out = numbers("int64", 1)[0].to(kind), torch.empty(7, 5, dtype=kind)
    blank = torch.full((7, 5), neutral(op, dtype), dtype=kind)
    combiner(op, kind)(out, [numbers_, blank])
    assert torch.equal(out, numbers_)


def test_sums_go_from_left_to_right():
    sources = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([0.1])]
    out = torch.empty(1)
    combiner("sum", torch.float32)(out, sources)
    assert out.item() == torch.tensor(0.1).item()
    combiner("sum", torch.float32)(out, sources[::-1])
    assert out.item() == 0.0


def test_the_first_source_may_be_the_result():
    sources = [torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 4.0)]
    combiner("sum", torch.float32)(sources[0], sources)
    assert sources[0].tolist() == [7.0] * 3


def test_poison_can_be_told():
    assert poison_value("float16") != poison_value("float16")
    assert poison_value("int8") == -128
    assert poison_value("uint8") == 255


def test_refusals():
    with pytest.raises(MeshTensorError, match=r"unknown reduction 'mean'[\s\S]*'sum', 'max', 'min', 'prod'"):
        combiner("mean", torch.float32)
    with pytest.raises(MeshTensorError, match="'bitand' has no meaning for torch.float32"):
        combiner("bitand", torch.float32)
    with pytest.raises(MeshTensorError, match="'float4' has no torch counterpart"):
        torch_dtype("float4")
