"""ModuleState: what a module writes, kept on the mesh between its calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tvm import relax

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.plan.ir import STATE_ATTR
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.ranks.dtensor import local_part
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .module_launch import ModuleLaunch
from .module_weights import apart, whole

if TYPE_CHECKING:
    from .mesh_module import AnyLaunch


class ModuleState(Collection[str]):
    """Parameters that the results of one call replace in the next one, laid out as the launch that ran last has them.

    first   their values before the first call, by name, in any form that weights have"""

    def __init__(self, first: Mapping[str, Any]) -> None:
        self.first = dict(first)
        self._launch: AnyLaunch | None = None
        self._kept: dict[str, Any] = {}

    def call(self, launch: AnyLaunch, tensors: Mapping[str, Any]) -> Any:
        """The results that are no state for these tensors; a call that raises leaves the state as it was."""
        results, new = launch.advance(tensors, self._of(launch))
        outside = {_memory(part) for tensor in (*tensors.values(), *results) for part in _parts(tensor)}
        new = {name: _apart(launch, name, tensor, outside) for name, tensor in new.items()}
        self._launch, self._kept = launch, new
        return results[0] if len(results) == 1 else results

    def values(self, full: bool) -> dict[str, Any]:
        """As callers know it: whole, or as MeshTensors (DTensors)."""
        if self._launch is None:
            return {name: whole(tensor).clone() if full else tensor for name, tensor in self.first.items()}
        launch: Any = self._launch
        return {name: launch.leave(name, tensor, full) for name, tensor in self._kept.items()}

    def __contains__(self, name: object) -> bool:
        return name in self.first

    def __iter__(self) -> Iterator[str]:
        return iter(self.first)

    def __len__(self) -> int:
        return len(self.first)

    def _of(self, launch: AnyLaunch) -> dict[str, Any]:
        """The state as this launch takes it."""
        if self._launch is launch:
            return self._kept
        return {name: launch.enter(name, tensor) for name, tensor in self.values(False).items()}


def state_of(func: relax.Function, weights: Mapping[str, Any], donated: bool) -> ModuleState:
    """The state of a module's function, if its parameters are among the weights; without them it is empty: they are
    passed at every call, and their new values are results. `donated`: nobody else has the tensors.

    Raises:
        MeshTensorError: some are among the weights, and some are not.
    """
    names = list((func.attrs or {}).get(STATE_ATTR, {}))
    missing = [name for name in names if name not in weights]
    if not names or len(missing) == len(names):
        return ModuleState({})
    if missing:
        refuse(f"the weights lack {listing(missing)}, which the module writes", fix="give all that it writes, or none")
    return ModuleState({name: weights[name] if donated else apart(weights[name]) for name in names})


def _apart(launch: AnyLaunch, name: str, tensor: Any, outside: set[int]) -> Any:
    """The state, in memory that no caller has."""
    if not any(_memory(part) in outside for part in _parts(tensor)):
        return tensor
    return launch.enter(name, launch.leave(name, tensor, True)) if isinstance(launch, ModuleLaunch) else tensor.clone()


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """The parts of a tensor in any form that this process has, without padding."""
    return tensor.parts() if isinstance(tensor, MeshTensor) else [local_part(tensor) if is_dtensor(tensor) else tensor]


def _parts(tensor: Any) -> Iterable[torch.Tensor]:
    if isinstance(tensor, MeshTensor):
        return tensor.tiles()
    return [local_part(tensor) if is_dtensor(tensor) else tensor]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
