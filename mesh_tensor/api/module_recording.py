"""What a module on a mesh asks of whatever records its calls for torch.autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from tvm import ir

from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .module_weights import HeldWeights


class Recording(Protocol):
    """A module's function of known sizes, as autograd runs it."""

    @property
    def wanted(self) -> Sequence[str]:
        """The parameters that get gradients."""

    @property
    def modules(self) -> Sequence[Any]:
        """The modules that run then."""

    def __call__(self, tensors: Mapping[str, Any]) -> Any:
        """What the function returns for these tensors of all its parameters that are no weights."""


# Of a module's function on a mesh, where gradients of some parameters are asked for; the weights are constants.
Recorder = Callable[[ir.IRModule, str, Any, Sequence[str], HeldWeights], Recording]


def requires_gradients(given: Sequence[Any]) -> bool:
    """Whether autograd is to record a call with these. MeshTensors carry no gradients."""
    return (
        torch.is_grad_enabled()
        and any(isinstance(value, torch.Tensor) and value.requires_grad for value in given)
        and not any(isinstance(value, MeshTensor) for value in given)
    )
