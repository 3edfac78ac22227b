"""Checks of what a call of a kernel brings, beside those of its signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Program
from mesh_tensor.runtime.plain_tensors import may_be_dual


def is_quick(
    expected: Sequence[tuple[str, torch.Size, torch.dtype]], given: Mapping[str, Any], device: torch.device
) -> bool:
    """The usual case, checked fast: plain tensors that fit. Whatever else is left to the thorough check."""
    for name, shape, dtype in expected:
        tensor = given.get(name)
        if tensor is None:
            if name in given:
                return False
        elif not (
            type(tensor) is torch.Tensor
            and tensor.dtype is dtype
            and not tensor.is_nested
            and tensor.shape == shape
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.requires_grad
            and tensor.device == device
        ):
            return False
    return not may_be_dual()


def check_layouts(layouts: Mapping[str, Sharding], program: Program, where: str, fix: str) -> None:
    """Refuse arguments that don't lie as the program takes or makes them: what `strict` asks for."""
    problems = []
    for parameter in program.parameters:
        expected = program.values[str(parameter.input or parameter.output)].sharding
        if (layout := layouts.get(parameter.name, expected)) != expected:
            problems.append(f"parameter {parameter.name!r}: lies as '{layout}', but expected '{expected}'")
    if problems:
        refuse(problems, where=where, fix=fix)
