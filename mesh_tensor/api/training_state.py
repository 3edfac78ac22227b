"""What a training run takes of a state that is loaded into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.base.optimizer import MASTER, is_number
from mesh_tensor.runtime.ambient import why_not_plain
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.targets.dtypes import as_floats, is_plain

from .training import TrainingStep

if TYPE_CHECKING:
    from .mesh_module import MeshModule


def check_mesh(module: MeshModule, tensors: Mapping[str, Any]) -> None:
    """The state lies where the step was distributed: on a virtual mesh there is no rank's part of it."""
    given = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
    if given and not module.is_on_ranks:
        refuse(
            f"{listing(given)} given as DTensors to a step on a virtual mesh",
            where=f"a training run on {module.mesh}",
            fix="distribute the step on their DeviceMesh: distribute_module(step, device_mesh, ...)",
        )


@dataclass(frozen=True)
class Loading:
    """A state for a step that is distributed as a module; `counts` are its numbers by name."""

    step: TrainingStep
    module: MeshModule
    counts: Mapping[str, torch.Tensor]

    def checked(
        self, state: Any, check_there: Callable[[], None], strict: bool
    ) -> tuple[dict[str, Any], dict[str, float | None]]:
        """The state by the module's parameters, and the numbers of it; refused where it is none of this step's.
        `check_there` refuses where a run has nothing to keep of what is missing."""
        names = {theirs: ours for theirs, ours in self.step.names.items() if ours in self.step.state}
        if not isinstance(state, Mapping):
            refuse(f"{shown(state)} is no state", fix="pass what state_dict() gave")
        state = {name: as_floats(value) for name, value in state.items()}
        check_mesh(self.module, state)
        known = [*names, *self.counts]
        problems = [f"{name!r} is missing" for name in known if strict and name not in state]
        if not problems and any(name not in state for name in names):
            check_there()
        every = [*self.step.names, *self.counts]
        problems += [f"there is no {name!r}{did_you_mean(name, known)}" for name in state if name not in every]
        problems += [found for n in names if n in state and (found := _differs(n, state[n], self.step.state[names[n]]))]
        problems += [
            f"{name!r} is not trained, and is another than the model's"
            for name, ours in self.step.names.items()
            if name in state and ours in self.step.fixed and not _is_same(state[name], self._fixed(ours))
        ]
        loaded = {ours: state[name] for name, ours in names.items() if name in state}
        problems = problems or self._apart(loaded)
        numbers = {name: _number(state[name]) for name in self.counts if name in state}
        problems += [f"{n!r} is {shown(state[n])}, and no number" for n, number in numbers.items() if number is None]
        if problems:
            fix = "load what state_dict() of the same model and optimizer gave; strict=False keeps what is missing"
            refuse(problems, where="the state to load", fix=fix)
        return self._with_masters(loaded), numbers

    def _apart(self, tensors: Mapping[str, Any]) -> list[str]:
        """Parameters that are not what the wide copy beside them is in 16 bits: the next step would overwrite them.
        Whole tensors alone are looked at."""
        theirs = {ours: name for name, ours in self.step.names.items()}
        pairs = [(mine.parameter, mine.slots[MASTER]) for mine in self.step.kept if MASTER in mine.slots]
        return [
            f"{theirs[name]!r} is another than {theirs[master]!r}, which is trained: leave that out (strict=False)"
            for name, master in pairs
            if is_plain(tensors.get(name))
            and is_plain(tensors.get(master))
            and not _is_same(tensors[name], tensors[master].to(tensors[name].dtype))
        ]

    def _with_masters(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """What is loaded, with the wide copies of parameters that come without theirs: the next step would overwrite
        them with what the run's own are; and the other way round."""
        for mine in self.step.kept:
            name, master = mine.parameter, mine.slots.get(MASTER, mine.parameter)
            for there, missing in ((name, master), (master, name)):
                if there in tensors and missing not in tensors:
                    given = tensors[there]
                    value = given.full() if isinstance(given, MeshTensor) else given.detach()
                    tensors[missing] = value.to(self.step.state[missing].dtype)
        return tensors

    def _fixed(self, name: str) -> torch.Tensor:
        """What is not trained of the parameters, as it was when the step was distributed; of DTensors all ranks would
        have to ask: there it is the model's."""
        return self.step.fixed[name] if self.module.is_on_ranks else self.module.weight(name, True)


def _number(value: Any) -> float | None:
    """One finite number from 0 on, which a tensor may have; None: it is none."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    return float(value) if is_number(value) else None


def _is_same(given: Any, own: torch.Tensor) -> bool:
    """Whether a tensor in any form has the same elements."""
    value = given.full() if isinstance(given, MeshTensor) else given.full_tensor() if is_dtensor(given) else given
    if not isinstance(value, torch.Tensor) or _differs("", value, own):
        return False
    own = own.to(value.device)
    return bool(((value == own) | ((value != value) & (own != own))).all())


@torch.no_grad()
def _differs(name: str, tensor: Any, expected: torch.Tensor) -> str:
    if isinstance(tensor, torch.Tensor) and (problem := why_not_plain(tensor)):
        return f"{name!r}: {problem[0]}"
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        return f"{name!r} is on device meta, without elements"
    shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    if shape is None or tuple(shape) != tuple(expected.shape) or dtype != expected.dtype:
        found = type(tensor).__name__ if shape is None else f"{tuple(shape)} {dtype}"
        return f"{name!r} is {found}, but has to be {tuple(expected.shape)} {expected.dtype}"
    return ""
