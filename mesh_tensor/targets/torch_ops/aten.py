"""Operators of torch's own: each call is one of torch's. Fourier transforms of pairs of floats."""

from __future__ import annotations

from typing import Any

import torch

from mesh_tensor.rules.operator.aten import ATEN, arguments_of
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.fft import FFT, fft_arguments
from mesh_tensor.targets.dtypes import torch_dtype

from .table import Function, torch_op


@torch_op(*ATEN)
def _aten(call: OpCall) -> Function:
    """The operator with the arguments that the call states."""
    _, base, overload = call.expr.args[0].global_symbol.split(".")
    op = getattr(getattr(torch.ops.aten, base), overload)
    args, kwargs = arguments_of(call)

    def function(*tensors: torch.Tensor) -> Any:
        return op(*_filled(args, tensors), **_filled(kwargs, tensors))

    return function


def _filled(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Arguments with tensors and dtypes in their places."""
    if isinstance(value, list):
        return [_filled(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dtype" in value:
        return torch_dtype(value["dtype"])
    return {key: _filled(item, tensors) for key, item in value.items()}


@torch_op(FFT)
def _fft(call: OpCall) -> Function:
    """By torch's own, of complex numbers."""
    kind, dims, normalization, option = fft_arguments(call)
    transform = getattr(torch.ops.aten, f"_fft_{kind}").default
    option = option if kind == "c2r" else bool(option)

    def fft(x: torch.Tensor) -> torch.Tensor:
        given = x if kind == "r2c" else torch.view_as_complex(x.contiguous())
        made = transform(given, dims, normalization, option)
        return made if kind == "c2r" else torch.view_as_real(made)

    return fft
