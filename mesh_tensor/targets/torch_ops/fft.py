"""Fourier transforms of pairs of floats."""

from __future__ import annotations

import torch

from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.fft import FFT, fft_arguments

from .table import Function, torch_op


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
