"""A model's buffers that are no parameters of its module: those that became constants, and those that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mesh_tensor.annotations.names import SourceNames
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.runtime.ambient import why_not_plain
from mesh_tensor.runtime.ranks import is_dtensor

_FIX = "import the model again, or its buffers as weights: mt.from_torch(program, buffers=True)"


@dataclass(frozen=True)
class Copy:
    """The `values` of a tensor of the model, which had been written so many `times` then."""

    tensor: torch.Tensor
    values: torch.Tensor
    times: int

    @staticmethod
    def of(tensor: torch.Tensor, values: torch.Tensor | None = None) -> Copy:
        """Its values as they are now, of which there may be a copy."""
        return Copy(tensor, tensor.detach().clone() if values is None else values, _writes(tensor))


@dataclass(frozen=True)
class Constants:
    """`copied`: what the module has a copy of, by the model's names. `unread`: buffers of the model's `state_dict()`
    that the module has nothing of."""

    copied: Mapping[str, Copy] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    def check_unwritten(self, what: str = "the imported module", fix: str = _FIX) -> None:
        """Weights are the model's own tensors, and constants are copies: refuse one without the other.

        Raises:
            MeshTensorError: what became a constant was written since.
        """
        if changed := [name for name, copy in self.copied.items() if _writes(copy.tensor) != copy.times]:
            refuse(
                f"the model's {listing(changed)} {'was' if len(changed) == 1 else 'were'} written since",
                where=what,
                why="it has what was there then as constants, and the model's weights as they are now",
                fix=fix,
            )

    def left_out(self, weights: Any, whole: Callable[[Any], torch.Tensor], donate: bool = False) -> Any:
        """The weights without these buffers, which a model's `state_dict()` has; `donate`: taken out of that very dict.

        Raises:
            MeshTensorError: one of them has other values than the module.
        """
        if not isinstance(weights, Mapping) or not (self.copied or self.unread):
            return weights
        names = SourceNames({name: name for name in (*self.copied, *self.unread)})
        there = {name: ours for name in weights if (ours := names.ours(str(name))) in names.names}
        if not there:
            return weights
        no_values = {name: problem for name in there if (problem := _without_values(weights[name]))}
        if no_values:
            refuse(
                [f"{name!r} is {problem}" for name, problem in no_values.items()],
                where="weights of an imported module",
                fix="pass tensors of the module's shapes and dtypes",
            )
        other = [
            name
            for name, ours in there.items()
            if ours in self.copied and not _same(self.copied[ours].values, whole(weights[name]))
        ]
        if other:
            refuse(
                f"{listing(other)} {'has' if len(other) == 1 else 'have'} other values than the module's constants",
                where="weights of an imported module",
                why="buffers that nothing writes became constants when the model was imported",
                fix=_FIX,
            )
        if donate and isinstance(weights, MutableMapping):
            for name in there:
                del weights[name]
        return weights if donate else {name: weights[name] for name in weights if name not in there}


def _writes(tensor: torch.Tensor) -> int:
    """How often torch has written the tensor's memory; 0 where it does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _without_values(given: Any) -> str:
    """What is given instead of values that can be compared; nothing if they can."""
    if not isinstance(getattr(given, "dtype", None), torch.dtype):
        return f"a {type(given).__name__}, but expected a tensor"
    if not isinstance(given, torch.Tensor) or is_dtensor(given):
        return ""
    with torch.no_grad():
        found = why_not_plain(given)
    if found:
        return found[0]
    if given.device.type == "meta":
        return "on device meta, where tensors have no values"
    return ""


def _same(ours: torch.Tensor, given: torch.Tensor) -> bool:
    if ours.dtype != given.dtype or ours.shape != given.shape:
        return False
    given = given.to(ours.device)
    return bool(((ours == given) | ((ours != ours) & (given != given))).all())  # NaN is the same as NaN
