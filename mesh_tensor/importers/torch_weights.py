"""Weights of a torch model: those under several names are one parameter of the module, and constants may be in bfloat16
and 8-bit floats."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch
from tilelang.language import dtypes
from tvm import ir


def without_tied(
    mod: ir.IRModule, weights: Mapping[str, str], state: Mapping[str, torch.Tensor]
) -> tuple[ir.IRModule, dict[str, str]]:
    """The module with one parameter for all that are the same memory: the first; and the others, each with that one.

    `weights`: from parameters to their names in torch, and so to tensors of `state`."""
    first: dict[tuple, str] = {}
    tied = {}
    for name, target in weights.items():
        same = first.setdefault(_memory(state[target]), name)
        if same != name:
            tied[name] = same
    if not tied:
        return mod, tied
    func = mod["main"]
    params = {param.name_hint: param for param in func.params}
    merged = func.bind_params({params[name]: params[same] for name, same in tied.items()})
    result = mod.clone()
    result.update_func(result.get_global_var("main"), merged)
    return result, tied


def _memory(weight: torch.Tensor) -> tuple:
    """What tells a tensor's elements from another's; a tensor without elements is like no other."""
    if weight.numel() == 0:
        return (id(weight),)
    return weight.data_ptr(), weight.dtype, tuple(weight.shape), weight.stride()


def allow_constants() -> None:
    """Add numpy's dtypes of ml_dtypes to those that TileLang lists."""
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtypes._DTYPE_TO_STR.setdefault(np.dtype(getattr(ml_dtypes, name)), name)
