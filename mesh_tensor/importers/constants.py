"""A model's buffers that are no parameters of its module: those that became constants, and those that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mesh_tensor.annotations.names import SourceNames
from mesh_tensor.base.errors import listing, refuse

_FIX = "import the model again, or its buffers as weights: mt.from_torch(program, buffers=True)"


@dataclass(frozen=True)
class Constants:
    """`copied`: what the module has a copy of, by the model's names, each with the number of times that it had been
    written then. `unread`: buffers of the model's `state_dict()` that the module has nothing of."""

    copied: Mapping[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    def check_unwritten(self) -> None:
        """Weights are the model's own tensors, and constants are copies: refuse one without the other.

        Raises:
            MeshTensorError: what became a constant was written since.
        """
        if changed := self._written():
            refuse(
                f"the model's {listing(changed)} {'was' if len(changed) == 1 else 'were'} written since the import",
                where="the imported module",
                why="the module has what was there then as constants, and the model's weights as they are now",
                fix=_FIX,
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
        written = self._written()
        other = [
            name
            for name, ours in there.items()
            if ours in self.copied and (ours in written or not _same(self.copied[ours][0], whole(weights[name])))
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
        if donate:
            return weights
        return {name: weights[name] for name in weights if name not in there}

    def _written(self) -> list[str]:
        return [name for name, (tensor, times) in self.copied.items() if writes(tensor) != times]


def writes(tensor: torch.Tensor) -> int:
    """How often torch has written the tensor's memory; 0 where it does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _same(ours: torch.Tensor, given: torch.Tensor) -> bool:
    return ours is given or (ours.dtype == given.dtype and torch.equal(ours, given.to(ours.device)))
