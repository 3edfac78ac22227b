"""The weights of a pipeline's stages: placed once, updated where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.stages import Stage
from mesh_tensor.runtime.finite import not_finite
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from ..fragments import StageFragments, Values
from .carriers import Carrier
from .ranks import RankRuns

#: From a weight, its gradient and a dict that is kept for it, the new weight. Works on what lies on a mesh.
Rule = Callable[[Any, Any, dict[str, Any]], Any]
Place = tuple[str, int]  # a weight, a stage that has it


class StageWeights:
    """What every stage of this process holds of the weights; `whole` are the tensors that they were made of."""

    def __init__(self, whole: Mapping[str, torch.Tensor], carrier: Carrier, runs: RankRuns | None) -> None:
        self.whole, self._carrier, self._runs = whole, carrier, runs
        self.of: dict[int, Values] = {}
        self.layouts: dict[int, Mapping[str, Sharding]] = {}
        self._homes: dict[int, StageFragments] = {}
        self._states: dict[Place, dict[str, Any]] = {}

    def place(self, here: StageFragments) -> None:
        """Lay out a stage's weights, once."""
        stage = here.stage
        if stage.index in self.layouts:
            return
        names = [name for name in stage.params if name in self.whole]
        self.layouts[stage.index] = {name: here.layouts[name] for name in names}
        if self._runs is None or self._runs.ranks.name == stage.mesh:
            self.of[stage.index] = {name: self._carrier.place(here, name, self.whole[name]) for name in names}
            self._homes[stage.index] = here

    def gathered(
        self, values: Mapping[int, Mapping[str, Any]], stages: Sequence[Stage], names: Sequence[str], what: str
    ) -> dict[Place, torch.Tensor]:
        """Whole tensors of values that stages hold for weights; on ranks, all get those of all."""
        made = {(name, stage): value for stage, found in values.items() for name, value in found.items()}
        if self._runs is None:
            return {place: self._carrier.whole(value) for place, value in made.items() if place[0] in names}
        keys = [(name, stage.index) for stage in stages for name in stage.params if name in names]
        owners = {key: stages[key[1]].mesh for key in keys}
        wide = what == "gradients"
        types = {
            name: torch.promote_types(t.dtype, torch.float32) if wide else t.dtype for name, t in self.whole.items()
        }
        like = {key: (tuple(self.whole[key[0]].shape), types[key[0]]) for key in keys}
        runs = self._runs

        def share(_: None) -> dict[Place, torch.Tensor]:
            whole = {key: self._carrier.whole(value) for key, value in made.items() if key in owners}
            return runs.share(whole, owners, like, 0)

        return runs.call(lambda: ({what: ", ".join(names)}, None), share)

    def update(
        self, rule: Rule, gradients: Mapping[int, Values], sums: Mapping[str, torch.Tensor], scale: float
    ) -> None:
        """Every weight that has a gradient is what `rule` makes of it; `sums` has the whole gradients of those that
        several stages have.

        Raises:
            MeshTensorError: a weight would not be finite; all stay as they were.
        """
        made: dict[Place, Any] = {}
        states = {place: dict(state) for place, state in self._states.items()}
        bad: list[str] = []
        for stage, found in gradients.items():
            for name, gradient in found.items():
                if name in sums:
                    gradient = self._carrier.place(self._homes[stage], gradient_name(name), sums[name])
                old, grad = self._carrier.shown(self.of[stage][name]), self._carrier.shown(gradient)
                if scale != 1.0:
                    grad = grad * scale
                new = rule(old, grad, states.setdefault((name, stage), {}))
                made[name, stage] = self._checked(stage, name, old, new)
                if not_finite({name: _parts(new)}) and not not_finite({name: _parts(old)}):
                    bad.append(name)
        self._refuse_bad(bad)
        self._states = states
        for (name, stage), value in made.items():
            self.of[stage][name] = value

    def _refuse_bad(self, bad: Sequence[str]) -> None:
        """Refuse an update after which these weights would not be finite, on all ranks if on any."""
        if self._runs is not None:
            names = list(self.whole)
            found = self._runs.anywhere([name in bad for name in names])
            bad = [name for name, is_bad in zip(names, found, strict=True) if is_bad]
        if bad:
            refuse(
                f"gradients that are not finite, or too large for what is kept: those of {listing(list(bad))}",
                where="update of a pipeline",
                why="the weights would not be finite after it; they stay as they were",
                fix="keep derivatives finite where they are not, as that of sqrt or norm at 0; look at the batch, use "
                "max_norm, or a smaller step",
            )

    def _checked(self, stage: int, name: str, old: Any, new: Any) -> Any:
        if type(new) is not type(old) or new.shape != old.shape:
            refuse(
                f"the rule makes {shown(new)} of the weight {name!r}, which is {old!r}",
                where="update of a pipeline",
                fix="compute with operators and torch's element-wise functions: weight - 0.1 * gradient",
            )
        made = self._carrier.kept(new)
        if new.dtype != old.dtype:
            return self._carrier.place(self._homes[stage], name, self._carrier.whole(made).to(old.dtype))
        return made


def _parts(value: Any) -> Sequence[torch.Tensor]:
    """What there is of a value here, without padding."""
    return value.parts() if isinstance(value, MeshTensor) else (value.to_local(),)


def norm_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """The norm of all gradients as one vector."""
    return float(sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5)
