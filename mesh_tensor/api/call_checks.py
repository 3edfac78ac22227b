"""Checks of what a call of a kernel brings, beside those of its signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.program.steps import Program
from mesh_tensor.runtime.plain_tensors import may_be_dual
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor


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
            and tensor.shape == shape
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.requires_grad
            and tensor.device == device
        ):
            return False
    return not may_be_dual()


def check_placements(kernel: str, given: Mapping[str, Any], program: Program) -> None:
    """Refuse MeshTensors that don't lie as the program takes them: what `strict` asks for."""
    problems = []
    for parameter in program.parameters:
        tensor = given.get(parameter.name)
        value = program.values.get(str(parameter.input or parameter.output))
        if value and isinstance(tensor, MeshTensor) and tensor.sharding != (expected := value.sharding):
            problems.append(f"parameter {parameter.name!r}: lies as '{tensor.sharding}', but expected '{expected}'")
    if problems:
        fix = "distribute or .redistribute it so, or compile without strict=True"
        refuse(problems, where=f"call of kernel {kernel!r} on {program.mesh}", fix=fix)
