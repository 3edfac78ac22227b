"""The weights that a module on a mesh holds: laid out once, whatever sizes it is called with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import Recent
from mesh_tensor.importers.weight_files import StoredTensor
from mesh_tensor.runtime.module_inputs import ModuleSignature
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .module_ports import ModulePort, Refined

T = TypeVar("T")
_LAYOUTS = 4  # that a weight is kept in at most; plans for other sizes may take it in another one


class HeldWeights(Mapping[str, Any]):
    """Weights by parameter, as they are now, in memory that no caller writes: laid out, once they are, where nothing is
    lost by that. `donated`: nobody else has the tensors."""

    def __init__(self, given: Mapping[str, Any], donated: bool = False) -> None:
        self._held = dict(given) if donated else {name: apart(tensor) for name, tensor in given.items()}
        self._names = tuple(given)
        self._laid: dict[str, Recent[tuple, Any]] = {name: Recent(_LAYOUTS) for name in given}

    @staticmethod
    def of(tensors: Mapping[str, Any], given: Mapping[str, Any], donated: bool) -> HeldWeights:
        """These tensors of those that were given; what is laid out for one module is, for others that were given it."""
        if not isinstance(given, HeldWeights):
            return HeldWeights(tensors, donated)
        made = HeldWeights({})
        made._held, made._laid, made._names = given._held, given._laid, tuple(tensors)
        return made

    def some(self, names: Collection[str]) -> HeldWeights:
        """Those of some names."""
        return HeldWeights.of({name: self._held[name] for name in self if name in names}, self, True)

    def laid_out(
        self, name: str, port: ModulePort, lay_out: Callable[[ModulePort, Any], tuple[T, Any]], rank: int | None = None
    ) -> T:
        """A weight as plans with such a port take it, on a rank or on all devices. `lay_out` makes that of the weight,
        and what can be held in the weight's place from now on, or None."""

        def make() -> T:
            made, kept = lay_out(port, self._held[name])
            if kept is not None:
                self._held[name] = kept
            return made

        return self._laid[name].made((port.dims, port.sharding, port.order, rank), make)

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def apart(tensor: Any) -> Any:
    """A tensor as it is now, whatever its owner writes later; MeshTensors and what is read from files are that."""
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def whole(tensor: Any) -> torch.Tensor:
    """A weight in any form as one tensor. Of a DTensor all ranks have to ask."""
    if isinstance(tensor, (MeshTensor, Refined)):
        return tensor.full()
    if isinstance(tensor, StoredTensor):
        return tensor.read()
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()


def checked_state(
    signature: ModuleSignature, held: Mapping[str, Any], state: Mapping[str, Any], device_type: str, strict: bool
) -> dict[str, Any]:
    """What replaces the weights that are held, by parameter, in memory of their own.

    Raises:
        MeshTensorError: names are unknown or missing, or shapes or dtypes differ; all of them are named.
    """
    new = signature.weights(state, device_type)
    called = signature.names
    problems = [f"{called[name][0]!r} is missing" for name in held if strict and name not in new]
    problems += [f"{called[name][0]!r} is no weight of this run, but an input" for name in new if name not in held]
    if problems:
        refuse(
            problems,
            where=f"weights of {signature.function!r}",
            fix="load what state_dict() of the same model gave; strict=False keeps what is missing",
        )
    return {**held, **{name: apart(tensor) for name, tensor in new.items()}}
