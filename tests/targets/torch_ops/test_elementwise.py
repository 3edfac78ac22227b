"""Element-wise operators against TVM and formulas in numpy."""

import math

import numpy as np
import pytest
import torch
from tvm import relax, tirx

from mesh_tensor.targets.torch_ops import torch_function

from .cases import Case, CaseTests, i, t

op = relax.op


def _number(value, dtype="float32"):
    return relax.PrimValue(tirx.const(value, dtype))


_HALVES = [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.0, 3.7]
_UNARY = {
    "abs": (op.abs, np.abs, t(3, 4)),
    "acos": (op.acos, np.arccos, t(3, 4, low=-1, high=1)),
    "acosh": (op.acosh, np.arccosh, t(3, 4, low=1, high=4)),
    "asin": (op.asin, np.arcsin, t(3, 4, low=-1, high=1)),
    "asinh": (op.asinh, np.arcsinh, t(3, 4)),
    "atan": (op.atan, np.arctan, t(3, 4)),
    "atanh": (op.atanh, np.arctanh, t(3, 4, low=-0.9, high=0.9)),
    "bitwise_not": (op.bitwise_not, np.invert, i(3, 4)),
    "ceil": (op.ceil, np.ceil, t(3, 4)),
    "cos": (op.cos, np.cos, t(3, 4)),
    "cosh": (op.cosh, np.cosh, t(3, 4)),
    "erf": (op.erf, np.vectorize(math.erf, otypes=[np.float32]), t(3, 4)),
    "exp": (op.exp, np.exp, t(3, 4)),
    "floor": (op.floor, np.floor, t(3, 4)),
    "isfinite": (op.isfinite, np.isfinite, t(3, values=[1, np.inf, np.nan])),
    "isinf": (op.isinf, np.isinf, t(3, values=[1, np.inf, np.nan])),
    "isnan": (op.isnan, np.isnan, t(3, values=[1, np.inf, np.nan])),
    "log": (op.log, np.log, t(3, 4, low=0.1)),
    "logical_not": (op.logical_not, np.logical_not, t(3, 4, dtype="bool")),
    "negative": (op.negative, np.negative, t(3, 4)),
    "negative int": (op.negative, np.negative, i(3, 4, dtype="int32")),
    "round": (op.round, np.round, t(8, values=_HALVES)),
    "rsqrt": (op.rsqrt, lambda x: 1 / np.sqrt(x), t(3, 4, low=0.1)),
    "sigmoid": (op.sigmoid, lambda x: 1 / (1 + np.exp(-x)), t(3, 4)),
    "sign": (op.sign, np.sign, t(8, values=_HALVES)),
    "sin": (op.sin, np.sin, t(3, 4)),
    "sinh": (op.sinh, np.sinh, t(3, 4)),
    "sqrt": (op.sqrt, np.sqrt, t(3, 4, low=0)),
    "square": (op.square, lambda x: x * x, t(3, 4)),
    "tan": (op.tan, np.tan, t(3, 4, low=-1, high=1)),
    "tanh": (op.tanh, np.tanh, t(3, 4)),
    "trunc": (op.trunc, np.trunc, t(8, values=_HALVES)),
    "nn.relu": (op.nn.relu, lambda x: x * (x > 0), t(3, 4)),
    "nn.gelu": (
        op.nn.gelu,
        lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
        t(3, 4),
    ),
    "nn.gelu_tanh": (
        op.nn.gelu_tanh,
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        t(3, 4),
    ),
    "nn.selu": (
        op.nn.selu,
        lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
        t(3, 4),
    ),
    "nn.silu": (op.nn.silu, lambda x: x / (1 + np.exp(-x)), t(3, 4)),
    "nn.relu6": (op.nn.relu6, lambda x: np.minimum(np.maximum(x, 0), 6), t(3, 4, low=-9, high=9)),
    "nn.leakyrelu": (lambda x: op.nn.leakyrelu(x, 0.2), lambda x: np.where(x > 0, x, 0.2 * x), t(3, 4)),
    "nn.softplus": (
        lambda x: op.nn.softplus(x, 2.0, 3.0),
        lambda x: np.where(2 * x > 3, x, np.log1p(np.exp(2 * x)) / 2),
        t(3, 4, low=-4, high=4),
    ),
}
_BINARY = {
    "add": (op.add, np.add, t(3, 4), t(4)),
    "add int8": (op.add, np.add, i(3, 4, dtype="int8", low=-128, high=128), i(3, 1, dtype="int8", low=100, high=127)),
    "atan2": (op.atan2, np.arctan2, t(3, 4), t(3, 4)),
    "bitwise_and": (op.bitwise_and, np.bitwise_and, i(3, 4), i(3, 4)),
    "bitwise_or": (op.bitwise_or, np.bitwise_or, i(3, 4), i(3, 4)),
    "bitwise_xor": (op.bitwise_xor, np.bitwise_xor, i(3, 4), i(3, 4)),
    "divide": (op.divide, np.divide, t(3, 4), t(3, 4, low=0.5)),
    "divide int": (op.divide, lambda a, b: np.trunc(a / b), i(40, low=-20, high=20), i(40, low=1, high=7)),
    "divide int by negative": (op.divide, lambda a, b: np.trunc(a / b), i(40, low=-20, high=20), i(40, low=-7, high=0)),
    "floor_divide": (op.floor_divide, lambda a, b: np.floor(a / b), t(40, low=-20, high=20), t(40, low=-7, high=-0.5)),
    "floor_divide int": (op.floor_divide, np.floor_divide, i(40, low=-20, high=20), i(40, low=-7, high=0)),
    "floor_mod": (op.floor_mod, lambda a, b: a - np.floor(a / b) * b, t(40, low=-9, high=9), t(40, low=-7, high=-0.5)),
    "floor_mod int": (
        op.floor_mod,
        lambda a, b: a - np.floor(a / b) * b,
        i(40, low=-20, high=20),
        i(40, low=-7, high=0),
    ),
    "mod": (op.mod, lambda a, b: a - np.trunc(a / b) * b, t(40, low=-9, high=9), t(40, low=0.5, high=3)),
    "mod int": (op.mod, lambda a, b: a - np.trunc(a / b) * b, i(40, low=-20, high=20), i(40, low=-7, high=0)),
    "equal": (op.equal, np.equal, i(3, 4, high=0), i(3, 4, high=0)),
    "not_equal": (op.not_equal, np.not_equal, i(3, 4, high=0), i(3, 4, high=0)),
    "greater": (op.greater, np.greater, i(3, 4), i(3, 4)),
    "greater_equal": (op.greater_equal, np.greater_equal, i(3, 4), i(3, 4)),
    "less": (op.less, np.less, i(3, 4), i(3, 4)),
    "less_equal": (op.less_equal, np.less_equal, i(3, 4), i(3, 4)),
    "left_shift": (op.left_shift, np.left_shift, i(3, 4), i(3, 4, low=0, high=5)),
    "right_shift": (op.right_shift, np.right_shift, i(3, 4), i(3, 4, low=0, high=5)),
    "log_add_exp": (op.log_add_exp, lambda a, b: np.log(np.exp(a) + np.exp(b)), t(3, 4), t(3, 4)),
    "logical_and": (op.logical_and, np.logical_and, t(3, 4, dtype="bool"), t(4, dtype="bool")),
    "logical_or": (op.logical_or, np.logical_or, t(3, 4, dtype="bool"), t(4, dtype="bool")),
    "logical_xor": (op.logical_xor, np.logical_xor, t(3, 4, dtype="bool"), t(4, dtype="bool")),
    "maximum": (op.maximum, np.maximum, t(3, 1), t(4)),
    "minimum": (op.minimum, np.minimum, t(3, 1), t(4)),
    "multiply": (op.multiply, np.multiply, t(3, 4), t(3, 4)),
    "power": (op.power, np.power, t(3, 4, low=0.1), t(3, 4)),
    "subtract": (op.subtract, np.subtract, t(3, 4), t(2, 3, 4)),
    "nn.prelu": (
        lambda x, a: op.nn.prelu(x, a, axis=1),
        lambda x, a: np.where(x > 0, x, x * a[None, :, None]),
        t(2, 3, 4),
        t(3),
    ),
}
_OTHERS = {
    "add a number": Case((t(3, 4),), lambda x: op.add(x, _number(1.5)), lambda x: x + np.float32(1.5)),
    "a number minus": Case((t(3, 4),), lambda x: op.subtract(_number(1.5), x), lambda x: np.float32(1.5) - x),
    "int divided by a number": Case(
        (i(9, low=-20, high=20),), lambda x: op.divide(x, _number(3, "int64")), lambda x: np.trunc(x / 3)
    ),
    "power of ints": Case((i(3, 4, low=1, high=5), i(values=3)), op.power, np.power, tvm=False),
    **{
        f"power of {exponent}": Case((t(3, 4, low=0.1), t(values=exponent)), op.power, np.power)
        for exponent in (2.0, 0.5, 3.0, -1.0, 0.0, 1.7)
    },
    "where": Case((t(3, 1, dtype="bool"), t(3, 4), t(4)), op.where, np.where),
    "ewise_fma": Case((t(3, 4), t(3, 4), t(3, 4)), op.ewise_fma, lambda a, b, c: a * b + c, tvm=False),
    "clip": Case((t(3, 4),), lambda x: op.clip(x, -1, 0.5), lambda x: np.minimum(np.maximum(x, -1), 0.5)),
    "clip int": Case((i(9),), lambda x: op.clip(x, -3, 2), lambda x: np.minimum(np.maximum(x, -3), 2)),
    "astype float to int": Case((t(8, values=_HALVES),), lambda x: op.astype(x, "int32"), np.trunc),
    "astype to bool": Case((t(8, values=_HALVES),), lambda x: op.astype(x, "bool"), lambda x: x != 0),
    "astype to float64": Case((t(8),), lambda x: op.astype(x, "float64"), lambda x: x.astype("float64")),
    "astype int64 to int8": Case(
        (i(8, low=-500, high=500),), lambda x: op.astype(x, "int8"), lambda x: x.astype("int8")
    ),
    "astype to float16": Case((t(8),), lambda x: op.astype(x, "float16"), lambda x: x.astype("float16"), tvm=False),
    "quantize": Case(
        (t(3, 4, low=-9, high=9), t(4, low=0.02, high=0.1), i(4, dtype="int8", low=-5, high=5)),
        lambda x, s, z: op.quantize(x, s, z, axis=1, out_dtype="int8"),
        lambda x, s, z: np.clip(np.round(x / s) + z, -128, 127),
    ),
    "dequantize": Case(
        (i(3, 4, dtype="int8", low=-128, high=127), t(4, low=0.02, high=0.1), i(4, dtype="int8", low=-5, high=5)),
        lambda x, s, z: op.dequantize(x, s, z, axis=1, out_dtype="float32"),
        lambda x, s, z: s * (x.astype("int32") - z),
    ),
}
_NOT_IN_C = ("abs", "isfinite", "isinf")  # TVM's C code generator has no fabs
CASES = (
    {name: Case((arg,), build, expected, tvm=name not in _NOT_IN_C) for name, (build, expected, arg) in _UNARY.items()}
    | {name: Case((a, b), build, expected) for name, (build, expected, a, b) in _BINARY.items()}
    | _OTHERS
)


class TestCases(CaseTests):
    cases = CASES


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2.0, -2.0, -1.0, 3.0])
def test_powers_of_what_is_no_plain_number(exponent):
    """A power with a half is no root of -0 and -infinity, as numpy has it where exponents are many."""
    x = torch.tensor([-0.0, 0.0, -torch.inf, torch.inf, torch.nan, -2.0, 2.0])
    (made,) = torch_function(CASES["power of 2.0"].call())(x, torch.tensor(exponent))
    with np.errstate(divide="ignore", invalid="ignore"):
        meant = torch.from_numpy(np.power(x.numpy(), np.full(x.shape, exponent, "float32")))
    torch.testing.assert_close(made, meant, equal_nan=True)
    assert torch.equal(made.signbit() | made.isnan(), meant.signbit() | meant.isnan())


@pytest.mark.parametrize("exponent", [2.0, 3.0])
def test_one_exponent_is_the_number_that_it_holds(exponent):
    """As `x**2` in torch, bit for bit, with its gradient; and the exponent has its own where it is asked for."""
    found, x = torch_function(CASES["power of 2.0"].call()), torch.rand(3, 4) + 0.5
    x.requires_grad_()
    (plain,) = found(x, torch.tensor(exponent))
    assert torch.equal(plain, x**exponent)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (plain, x**exponent)))
    wanted = torch.tensor(exponent, requires_grad=True)
    (d,) = torch.autograd.grad(found(x, wanted)[0].sum(), wanted)
    torch.testing.assert_close(d, (x**exponent * x.log()).sum().detach())
