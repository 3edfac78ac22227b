"""Element-wise operators: arithmetic, comparisons, functions, activations, casts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from mesh_tensor.base.dtypes import poison_value
from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.elementwise import NARROWED
from mesh_tensor.targets.cpu.gelu import gelu_tanh
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype

from .table import Function, Place, of_attributes, placed_torch_op, same_for_all, torch_op, with_numbers

Tensor = torch.Tensor

_AS_IN_TORCH = (
    "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil cos cosh erf"
    " exp floor isfinite isinf isnan log logical_and logical_not logical_or logical_xor maximum minimum round rsqrt"
    " sigmoid sign sin sinh sqrt square tan tanh trunc"
)


def _power(x: Tensor, exponent: Tensor) -> Tensor:
    """With one exponent for all elements, torch multiplies where a number says so, not a tensor. With a half it would
    take roots then, which are others of -0 and -infinity."""
    if exponent.ndim or not exponent.is_cpu or exponent.requires_grad or not (x.ndim and x.is_floating_point()):
        return torch.pow(x, exponent)
    number = exponent.item()
    return torch.pow(x, exponent if abs(number) == 0.5 else number)


same_for_all(
    {
        **{name: getattr(torch, name) for name in _AS_IN_TORCH.split()},
        "nn.gelu": F.gelu,
        "nn.gelu_tanh": gelu_tanh,
        "nn.relu": torch.relu,
        "nn.selu": F.selu,
        "nn.silu": F.silu,
        "equal": torch.eq,
        "ewise_fma": lambda a, b, c: torch.addcmul(c, a, b),
        "greater": torch.gt,
        "greater_equal": torch.ge,
        "left_shift": torch.bitwise_left_shift,
        "less": torch.lt,
        "less_equal": torch.le,
        "log_add_exp": torch.logaddexp,
        "multiply": torch.mul,
        "negative": torch.neg,
        "not_equal": torch.ne,
        "power": _power,
        "right_shift": torch.bitwise_right_shift,
        "subtract": torch.sub,
        "where": lambda condition, a, b: torch.where(condition.bool(), a, b),
    }
)


@torch_op("grad.end_checkpoint", "grad.no_grad", "grad.start_checkpoint", "hint_on_device", "to_vdevice")
@torch_op("builtin.stop_lift_params", "dist.annotate_sharding", "dist.redistribute")
def _identity(call: OpCall) -> Function:
    return lambda x, *_: x


@torch_op("astype", "wrap_param", NARROWED)
def _astype(call: OpCall) -> Function:
    """Floats become integers by dropping their fraction."""
    dtype = torch_dtype(call.outputs[0].dtype)
    return lambda x: x.to(dtype)


@torch_op("clip")
def _clip(call: OpCall) -> Function:
    low, high = call.literals
    if not torch_dtype(call.inputs[0].dtype).is_floating_point:
        low, high = (int(bound) if math.isfinite(bound) else None for bound in (low, high))
        if low is None and high is None:
            return lambda x: x
    return lambda x: torch.clamp(x, low, high)


def _on_floats(a: Tensor, b: Tensor) -> Tensor:
    return torch.floor(a / b)


# name -> the function of floats, and that of integers: R.divide and R.mod round towards zero, as C does
_DIVISIONS: dict[str, tuple[Function, Function]] = {
    "divide": (torch.true_divide, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "floor_divide": (_on_floats, torch.floor_divide),
    "mod": (torch.fmod, torch.fmod),
    "floor_mod": (torch.remainder, torch.remainder),
}


@placed_torch_op(*_DIVISIONS)
def _division(call: OpCall, place: Place) -> Function:
    on_floats, on_integers = _DIVISIONS[call.name]
    dtype = torch_dtype(call.outputs[0].dtype)
    if dtype.is_floating_point:
        return with_numbers(call, on_floats)
    divide = _poisoned(on_integers, dtype) if place.padded else on_integers
    if place.valid is None:
        return with_numbers(call, divide)
    _, divisors = place.valid

    def divide_checked(a: Tensor, b: Tensor) -> Tensor:
        if (divisors.of(b) == 0).any():
            refuse(
                f"R.{call.name}: an integer is divided by 0",
                where=str(call.expr),
                fix="divide by something else there; check_indices=False leaves this out, and gives the lowest integer",
            )
        return divide(a, b)

    return divide_checked


def _poisoned(divide: Function, dtype: torch.dtype) -> Function:
    """An integer division for padding: it gives poison where the divisor is 0, and divides the lowest integer by 1
    instead of -1, which traps."""
    poison = torch.tensor(poison_value(dtype_name(dtype)), dtype=dtype)

    def divide_padded(a: Tensor, b: Tensor) -> Tensor:
        zero = b == 0
        traps = (a == torch.iinfo(dtype).min) & (b == -1)
        return torch.where(zero, poison, divide(a, torch.where(zero | traps, 1, b)))

    return divide_padded


of_attributes({"nn.leakyrelu": (F.leaky_relu, ("alpha",)), "nn.softplus": (F.softplus, ("beta", "threshold"))})


@torch_op("nn.prelu")
def _prelu(call: OpCall) -> Function:
    data, alpha = call.inputs
    shape = [1] * data.ndim
    shape[call.axis(call.attr("axis"))] = alpha.shape[0]
    return lambda x, slope: torch.where(x > 0, x, x * slope.reshape(shape))


@torch_op("quantize")
def _quantize(call: OpCall) -> Function:
    """clip(round(x / scale) + zero_point), in the range of the result's dtype."""
    dtype = torch_dtype(call.outputs[0].dtype)
    limits: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    shape = _quantized_shape(call)

    def quantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        scaled = x / scale.reshape(shape(scale))
        rounded = scaled if dtype.is_floating_point else torch.round(scaled)
        return torch.clamp(rounded + zero.reshape(shape(zero)), limits.min, limits.max)

    return quantize


@torch_op("dequantize")
def _dequantize(call: OpCall) -> Function:
    """scale * (x - zero_point), computed in float32."""
    shape = _quantized_shape(call)
    limits = torch.finfo(torch_dtype(call.outputs[0].dtype))
    wide = torch.float32 if torch_dtype(call.inputs[0].dtype).is_floating_point else torch.int32

    def dequantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        out = (x.to(wide) - zero.reshape(shape(zero))).float() * scale.reshape(shape(scale)).float()
        return torch.clamp(out, limits.min, limits.max)

    return dequantize


def _quantized_shape(call: OpCall) -> Function:
    """How a scale or zero point lies along the data's dims: one for all, or one per position of a dim."""
    ndim, axis = call.inputs[0].ndim, call.axis(call.attr("axis"))
    return lambda t: [1] * ndim if t.numel() == 1 else [-1 if dim == axis else 1 for dim in range(ndim)]
