"""ModuleState: what a module writes, kept on the mesh between its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tvm import relax

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.plan.ir import STATE_ATTR
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.ranks.dtensor import local_part
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .module_launch import ModuleLaunch

if TYPE_CHECKING:
    from .module import AnyLaunch


class ModuleState:
    """Parameters that the results of one call replace in the next one, laid out as the launch that ran last has them.

    first   their values before the first call, by name"""

    def __init__(self, first: Mapping[str, torch.Tensor]) -> None:
        self.first = dict(first)
        self._launch: AnyLaunch | None = None
        self._kept: dict[str, Any] = {}

    def call(self, launch: AnyLaunch, tensors: Mapping[str, Any]) -> Any:
        """The results that are no state for these tensors; a call that raises leaves the state as it was."""
        results, new = launch.step(tensors, self._of(launch))
        outside = {_memory(part) for tensor in (*tensors.values(), *results) for part in _parts(tensor)}
        new = {name: _apart(launch, name, tensor, outside) for name, tensor in new.items()}
        self._launch, self._kept = launch, new
        return results[0] if len(results) == 1 else results

    def values(self, full: bool) -> dict[str, Any]:
        """As callers know it: whole, or as MeshTensors (DTensors)."""
        if self._launch is None:
            return {name: tensor.clone() for name, tensor in self.first.items()}
        launch: Any = self._launch
        return {name: launch.leave(name, tensor, full) for name, tensor in self._kept.items()}

    def reset(self) -> None:
        """As before the first call."""
        self._launch, self._kept = None, {}

    def _of(self, launch: AnyLaunch) -> dict[str, Any]:
        """The state as this launch takes it."""
        if self._launch is launch:
            return self._kept
        return {name: launch.enter(name, tensor) for name, tensor in self.values(False).items()}


def state_of(func: relax.Function, weights: Mapping[str, torch.Tensor]) -> ModuleState | None:
    """The state of a module's function, if its parameters are among the weights; without them they are passed at every
    call, and their new values are results.

    Raises:
        MeshTensorError: some are among the weights, and some are not.
    """
    names = list((func.attrs or {}).get(STATE_ATTR, {}))
    missing = [name for name in names if name not in weights]
    if not names or len(missing) == len(names):
        return None
    if missing:
        refuse(f"the weights lack {listing(missing)}, which the module writes", fix="give all that it writes, or none")
    return ModuleState({name: weights[name] for name in names})


def _apart(launch: AnyLaunch, name: str, tensor: Any, outside: set[int]) -> Any:
    """The state, in memory that no caller has."""
    if not any(_memory(part) in outside for part in _parts(tensor)):
        return tensor
    return launch.enter(name, launch.leave(name, tensor, True)) if isinstance(launch, ModuleLaunch) else tensor.clone()


def _parts(tensor: Any) -> Iterable[torch.Tensor]:
    if isinstance(tensor, MeshTensor):
        return tensor.tiles()
    return [local_part(tensor) if is_dtensor(tensor) else tensor]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
