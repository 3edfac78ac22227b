"""The weights of a pipeline's stages: placed once, updated where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.stages import Stage
from mesh_tensor.runtime.backend import fetched, plain, put_away
from mesh_tensor.runtime.elementwise import not_finite
from mesh_tensor.runtime.ranks.dtensor import is_dtensor
from mesh_tensor.runtime.ranks.redistribution import Part
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from ..fragments import StageFragments, Values
from ..module_launch import parts_of
from .carriers import Carrier
from .ranks import RankRuns

#: From a weight, its gradient and a dict that is kept for it, the new weight. Works on what lies on a mesh.
Rule = Callable[[Any, Any, dict[str, Any]], Any]
Place = tuple[str, int]  # a weight, a stage that has it


class StageWeights:
    """What every stage of this process holds of the weights; `whole` are the tensors that they were made of. `memory`
    has the kinds of memory of those that are in another one than the devices' while nothing computes with them.
    `of_rules`: what rules keep for weights, as these get it; `loaded`: the same, whole, before weights are laid out.
    `homes`: the stage that updates a weight; others that have it get what it made."""

    def __init__(
        self, whole: dict[str, torch.Tensor], carrier: Carrier, runs: RankRuns | None, memory: Mapping[str, str]
    ) -> None:
        self.whole, self._carrier, self._runs, self._memory = whole, carrier, runs, memory
        self.of: dict[int, Values] = {}
        self.layouts: dict[int, Mapping[str, Sharding]] = {}
        self._placed: dict[int, StageFragments] = {}
        self.of_rules: dict[Place, dict[str, Any]] = {}
        self.loaded: dict[str, Mapping[str, Any]] = {}
        self.homes: dict[str, Stage] = {}

    def place(self, here: StageFragments) -> None:
        """Lay out a stage's weights, once."""
        stage = here.stage
        if stage.index in self.layouts:
            return
        names = [name for name in stage.params if name in self.whole]
        self.layouts[stage.index] = {name: here.layouts[name] for name in names}
        if self._runs is None or self._runs.ranks.name == stage.mesh:
            placed = {name: self._carrier.place(here, name, self.whole[name]) for name in names}
            self.of[stage.index] = {name: self._put_away(name, value) for name, value in placed.items()}
            self._placed[stage.index] = here
            for name in [name for name in names if name in self.loaded and self.homes[name].index == stage.index]:
                self.of_rules[name, stage.index] = self._as_kept(here, name, self.loaded[name])

    def _put_away(self, name: str, value: Any) -> Any:
        """A weight in the memory that is stated for it."""
        if name not in self._memory:
            return value
        tile = next(iter(self._carrier.tiles(value)))
        return put_away(value, tile.device, self._memory[name], self._carrier.moved)

    def _fetched(self, value: Any) -> Any:
        return fetched(value, self._carrier.moved)

    def advance(self, state: Mapping[int, Values]) -> None:
        """Stages go on from this state, in memory of its own."""
        apart = {
            (name, stage): self._carrier.moved(value, torch.clone)
            for stage, values in state.items()
            for name, value in values.items()
        }
        self._go_on(apart, self.of_rules)

    def _go_on(self, weights: Mapping[Place, Any], of_rules: dict[Place, dict[str, Any]]) -> None:
        """Go on with these weights, and this that rules keep: all of it, or, where it is interrupted, nothing."""
        of = {stage: dict(values) for stage, values in self.of.items()}
        for (name, stage), value in weights.items():
            of[stage][name] = self._put_away(name, value)
        self.of, self.of_rules = of, of_rules

    def replace(self, whole: Mapping[str, torch.Tensor], of_rules: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with these weights, and with this that rules keep for some."""
        placed: dict[Place, Any] = {}
        kept = {place: state for place, state in self.of_rules.items() if place[0] not in whole}
        for stage, home in self._placed.items():
            for name in self.of[stage].keys() & whole.keys():
                placed[name, stage] = self._carrier.place(home, name, whole[name])
                if name in of_rules and self.homes[name].index == stage:
                    kept[name, stage] = self._as_kept(home, name, of_rules[name])
        self._go_on(placed, kept)
        if not self.layouts:
            others = {name: state for name, state in self.loaded.items() if name not in whole}
            self.loaded = others | {name: state for name, state in of_rules.items() if name in whole}
        self.whole |= whole

    def whole_of(self, value: Any) -> Any:
        """What a rule keeps, whole, in memory of its own; on ranks, all of its mesh have to ask."""
        laid_out = isinstance(value, MeshTensor) or is_dtensor(value)
        return self._carrier.whole(self._carrier.kept(value)).clone() if laid_out else value

    def _as_kept(self, home: StageFragments, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """What a rule is given again of what it kept."""

        def shown(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return self._carrier.shown(self._carrier.place(home, name, value)) if is_tensor else value

        return {key: shown(value) for key, value in state.items()}

    def gathered(
        self,
        values: Callable[[], Mapping[int, Mapping[str, Any]]],
        stages: Sequence[Stage],
        names: Sequence[str],
        what: str,
        check: Callable[[], None] = lambda: None,
    ) -> dict[Place, torch.Tensor]:
        """Whole tensors of values that stages hold for weights; on ranks, all get those of all. `check` refuses where
        there are none."""

        def own() -> dict[Place, Any]:
            return {(name, stage): value for stage, found in values().items() for name, value in found.items()}

        if what == "weights" and not self.layouts:  # they are where they were: there are no sizes to lay them out for
            places = [(name, stage.index) for stage in stages for name in stage.params if name in names]
            return {place: self.whole[place[0]].clone() for place in places}

        if self._runs is None:
            check()
            there = {place: value for place, value in own().items() if place[0] in names}
            return {place: self._carrier.whole(self._fetched(value)) for place, value in there.items()}
        keys = [(name, stage.index) for stage in stages for name in stage.params if name in names]
        owners = {key: stages[key[1]] for key in keys}
        wide = what == "gradients"
        types = {
            name: torch.promote_types(t.dtype, torch.float32) if wide else t.dtype for name, t in self.whole.items()
        }
        like = {key: (tuple(self.whole[key[0]].shape), types[key[0]]) for key in keys}
        runs = self._runs

        def prepare() -> tuple[dict[str, str], None]:
            check()
            return {what: ", ".join(names)}, None

        def share(_: None) -> dict[Place, torch.Tensor]:
            whole = {key: self._carrier.whole(self._fetched(value)) for key, value in own().items() if key in owners}
            shared = runs.share(whole, owners, like, 0)
            return shared | {key: value.clone() for key, value in whole.items()}  # which may be memory of ours

        return runs.call(prepare, share)

    def update(
        self,
        rule: Rule,
        gradients: Mapping[int, Values],
        sums: Mapping[str, torch.Tensor],
        scale: float,
        may_overflow: bool = False,
    ) -> bool:
        """Every weight that has a gradient is what `rule` makes of it, once; `sums` has the whole gradients of those
        that several stages have. On ranks, part of a call that all make. Where gradients overflowed, and may, nothing
        is changed: False.

        Raises:
            MeshTensorError: a weight would not be finite, or on ranks: the rule raised on one. All stay as they were.
        """
        made, states, bad, error, doing = {}, {}, list[str](), None, "update of a pipeline"
        if may_overflow:  # all know before the rule runs, which may wait for others
            every = [(name, gradient) for found in gradients.values() for name, gradient in found.items()]
            bad = [name for name, gradient in every if not_finite({name: _parts(gradient)})]
            if self._found_bad(bad, error, doing, may_overflow):
                return False
        try:
            for stage, found in gradients.items():
                for name in [name for name in found if self.homes[name].index == stage]:
                    doing = f"update of a pipeline, the rule on weight {name!r} of stage {stage}"
                    state = states[name, stage] = copied(self.of_rules.get((name, stage), {}))
                    made[name, stage] = self._ruled(rule, stage, name, sums.get(name, found[name]), state, scale)
                    if not_finite({name: _parts(made[name, stage])}):
                        before = _parts(self._fetched(self.of[stage][name]))
                        bad += [] if not_finite({name: before}) else [name]
        except Exception as raised:
            if self._runs is None:
                raise
            error = raised
        if self._found_bad(bad, error, doing, may_overflow):
            return False
        kept = {(name, stage): self._as_laid_out(stage, name, new) for (name, stage), new in made.items()}
        kept |= self._handed_on({name: kept.get((name, self.homes[name].index)) for name in sums})
        self._go_on(kept, {**self.of_rules, **states})
        return True

    def _handed_on(self, made: Mapping[str, Any]) -> dict[Place, Any]:
        """New weights of several stages, of which this process has some, as the stages lie that didn't make them. On
        ranks, all have to ask."""
        if not made:
            return {}
        owners = {(name, self.homes[name].index): self.homes[name] for name in made}
        like = {place: (tuple(self.whole[place[0]].shape), self.whole[place[0]].dtype) for place in owners}

        def share(_: None) -> dict[Place, torch.Tensor]:
            there = {place: self._carrier.whole(made[place[0]]) for place in owners if made[place[0]] is not None}
            return there if self._runs is None else self._runs.share(there, owners, like, 0)

        facts = {"update": "weights of several stages"}
        whole = share(None) if self._runs is None else self._runs.call(lambda: (facts, None), share)
        return {
            (name, stage): self._carrier.place(home, name, whole[name, self.homes[name].index])
            for stage, home in self._placed.items()
            for name in made
            if name in home.stage.params and self.homes[name].index != stage
        }

    def _ruled(self, rule: Rule, stage: int, name: str, gradient: Any, state: dict[str, Any], scale: float) -> Any:
        """What the rule makes of a weight. What it gets is its own: nothing is changed where it writes into that."""
        if isinstance(gradient, torch.Tensor):
            gradient = self._carrier.place(self._placed[stage], gradient_name(name), gradient)
        old, grad = self._carrier.shown(self._fetched(self.of[stage][name])), self._carrier.shown(gradient)
        new = rule(old, grad if scale == 1.0 else grad * scale, state)
        if type(new) is not type(old) or new.shape != old.shape or not new.dtype.is_floating_point:
            refuse(
                f"the rule makes {shown(new)} of the weight {name!r}, which is {old!r}",
                where="update of a pipeline",
                fix="compute with operators and torch's element-wise functions: weight - 0.1 * gradient",
            )
        return new

    def _as_laid_out(self, stage: int, name: str, new: Any) -> Any:
        """A new weight in the layout and the dtype that it has in the stage. On ranks, all of the mesh have to ask."""
        dtype = self.whole[name].dtype
        made = self._carrier.laid(self._carrier.kept(new), self._carrier.layout(plain(self.of[stage][name])))
        return made if made.dtype == dtype else self._carrier.cast(made, dtype)

    def _found_bad(self, bad: Sequence[str], error: Exception | None, doing: str, may_overflow: bool) -> bool:
        """Refuse an update after which these weights would not be finite, on all ranks if on any, or say that there are
        some; raise there, too, what the rule raised on one."""
        if self._runs is not None:
            bad = self._runs.settle(bad, error, doing)
        if bad and not may_overflow:
            refuse(
                f"gradients that are not finite, or too large for what is kept: those of {listing(list(bad))}",
                where="update of a pipeline",
                why="the weights would not be finite after it; they stay as they were",
                fix="keep derivatives finite where they are not, as that of sqrt or norm at 0; look at the batch, use "
                "max_norm, or a smaller step",
            )
        return bool(bad)


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a rule keeps, in memory of its own; MeshTensors are never written."""
    return {key: held.detach().clone() if isinstance(held, torch.Tensor) else held for key, held in state.items()}


def _parts(value: Any) -> Sequence[torch.Tensor]:
    """What there is of a value here, without padding."""
    return parts_of(value.local if isinstance(value, Part) else value)


def norm_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """The norm of all gradients as one vector."""
    return float(sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5)
