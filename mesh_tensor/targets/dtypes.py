"""Torch's dtypes, by the names that TVM has for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import tvm_ffi

from mesh_tensor.base.dtypes import element_dtype
from mesh_tensor.base.errors import refuse


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a TVM dtype name such as `float16`."""
    dtype = getattr(torch, element_dtype(name), None)
    if not isinstance(dtype, torch.dtype):
        refuse(f"dtype {str(name)!r} has no torch counterpart", fix="use a dtype that torch tensors can have")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The TVM name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor, in float32 if it has floats of 16 bits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def is_plain(value: object) -> bool:
    """Whether it is a tensor of torch's own class, or a parameter: all of it is here."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def as_floats(value: Any) -> Any:
    """A plain tensor of complex numbers as pairs of floats, its last dim, of the same memory; all else as it is."""
    return torch.view_as_real(value.resolve_conj()) if is_plain(value) and value.is_complex() else value


def torch_tensor(constant: tvm_ffi.Tensor) -> torch.Tensor:
    """A tensor of TVM's as torch's, of the same memory."""
    try:
        return torch.from_dlpack(constant)
    except BufferError as error:
        refuse(
            "torch has no tensors of a constant's dtype", why=str(error), fix="use a dtype that torch tensors can have"
        )
