"""TVM's tensors as torch's and back, on the same memory."""

from __future__ import annotations

import math
from typing import Any

import torch
import tvm_ffi


def as_torch(tensor: Any) -> torch.Tensor:
    """A torch tensor on the memory of a TVM tensor on the CPU."""
    return torch.from_dlpack(tensor)


def as_tvm(tensor: torch.Tensor) -> Any:
    """A TVM tensor on the memory of a torch tensor, which stays alive with it."""
    tensor = tensor.detach().contiguous()
    if not tensor.numel():  # TVM has strides of its own for these, and takes others for gaps
        strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim)]
        tensor = tensor.as_strided(tensor.shape, strides)
    return tvm_ffi.from_dlpack(tensor)


def apart(results: tuple[torch.Tensor, ...], operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The results, none in the memory of an operand: the virtual machine uses that again as soon as nobody reads it."""
    taken = {operand.untyped_storage().data_ptr() for operand in operands}
    return tuple(r.clone() if r.untyped_storage().data_ptr() in taken else r for r in results)
