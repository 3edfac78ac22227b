"""What a pipeline has learned: gradients, updates by them, and its state under the names that it has where the model
comes from, as it is now, and set again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from mesh_tensor.base.errors import did_you_mean, refuse, shown
from mesh_tensor.importers.constants import Constants
from mesh_tensor.pipelining.check import is_amount
from mesh_tensor.pipelining.stages import Stage
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.module_inputs import ModuleSignature
from mesh_tensor.runtime.ranks.dtensor import is_dtensor
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from ..fragments import Values
from ..module_ports import checked_state, whole
from ..on_ranks import Turns
from ..training_optimizer import GOOD_STEPS, LOSS_SCALE, LossScale
from .planned import PlannedStages
from .ranks import RankRuns
from .weights import Rule, StageWeights, copied, norm_of

RULE = "update."  # before what rules keep: "update.momentum.fc.weight"
_WHERE = "state_dict of a pipeline"
State = dict[str, Any]


class Checkpoints:
    """The states of a pipeline, whole, on all ranks alike."""

    def __init__(
        self,
        signature: ModuleSignature,
        weights: StageWeights,
        stages: Sequence[Stage],
        runs: RankRuns | None,
        constants: Constants,
    ) -> None:
        self._signature, self._weights, self._constants = signature, weights, constants
        self._stages, self._runs = stages, runs

    def state(self, weights: Mapping[str, torch.Tensor]) -> State:
        """These weights, and what rules keep for weights, by torch's names."""
        every = {name: tensor.clone() for name, tensor in self._weights.whole.items() if name not in weights}
        names = self._signature.names
        made = {theirs: tensor for name, tensor in {**every, **weights}.items() for theirs in names[name]}
        for (name, _, key), value in sorted(self._of_rules().items(), key=lambda item: -item[0][1]):
            made |= {f"{RULE}{key}.{theirs}": value for theirs in names[name]}
        return made

    def _of_rules(self) -> dict[tuple[str, int, str], Any]:
        """What rules keep, by weight, stage and key."""
        runs = self._runs
        if not self._weights.layouts:  # as it was loaded, on all ranks alike
            loaded = self._weights.loaded.items()
            return {(name, 0, key): value for name, state in loaded for key, value in copied(state).items()}
        if runs is None:
            return {place: self._weights.whole_of(value) for place, value in self._kept().items()}

        def run(_: None) -> dict[tuple[str, int, str], Any]:
            mine, error = {}, None
            try:
                mine = self._kept()
            except Exception as raised:
                error = raised
            runs.settle([], error, _WHERE)
            said = runs.heard(json.dumps([[place, _told(value)] for place, value in mine.items()]))
            told = {tuple(place): form for each in said for place, form in json.loads(each)}
            tensors = {place: form for place, form in sorted(told.items()) if isinstance(form, list)}
            owners = {place: self._stages[place[1]] for place in tensors}
            like = {place: (tuple(shape), getattr(torch, dtype)) for place, (shape, dtype) in tensors.items()}
            made = {place: self._weights.whole_of(mine[place]) for place in tensors if place in mine}
            return {**told, **runs.share(made, owners, like, 0)}

        return runs.call(lambda: ({"state_dict": "what rules keep"}, None), run)

    def _kept(self) -> dict[tuple[str, int, str], Any]:
        """What rules keep of this process' stages."""
        kept = {(*place, key): value for place, held in self._weights.of_rules.items() for key, value in held.items()}
        weights, problems = self._weights.whole, []
        for (name, _, key), value in kept.items():
            is_number = isinstance(value, (int, float))
            if not is_number and not (_is_laid_out(value) and tuple(value.shape) == tuple(weights[name].shape)):
                problems.append(f"{key!r} of {self._signature.names[name][0]!r} is {shown(value)}")
        if problems:
            fix = "let rules keep numbers, and tensors of the weight's shape"
            refuse(problems, where=_WHERE, why="it is neither a number nor laid out as the weight", fix=fix)
        return kept

    def load(self, state: Mapping[str, Any], strict: bool) -> None:
        """Go on with this state; rules start anew where it has nothing of them."""
        if self._runs is None:
            self._weights.replace(*self._checked(state, strict))
            return

        def prepare() -> tuple[dict[str, str], tuple[State, dict[str, State]]]:
            checked = self._checked(state, strict)
            return {"names in the state": ", ".join(state), "values of the state": _digest(*checked)}, checked

        self._runs.call(prepare, lambda checked: self._weights.replace(*checked))

    def _checked(self, state: Mapping[str, Any], strict: bool) -> tuple[State, dict[str, State]]:
        """The weights that are replaced, and by weight what rules keep for it, in memory of their own."""
        if not isinstance(state, Mapping):
            refuse(f"{shown(state)} is no state", fix="pass what state_dict() gave")
        held, own = self._weights.whole, {name: value for name, value in state.items() if _is_own(name)}
        checked = checked_state(self._signature, held, self._constants.left_out(own, whole), "cpu", strict)
        weights = {name: whole(tensor) for name, tensor in checked.items() if tensor is not held[name]}
        called = {theirs: ours for ours in held for theirs in self._signature.names[ours]}
        found: dict[str, State] = {}
        problems = [
            f"{name!r} is {shown(state[name])}, and no number"
            for name in (LOSS_SCALE, GOOD_STEPS)
            if name in state and not _is_number(state[name])
        ]
        for name, value in state.items():
            if not _is_of_rules(name):
                continue
            key, _, theirs = name.removeprefix(RULE).partition(".")
            if theirs not in called:
                problems.append(f"{name!r}: there is no weight {theirs!r}{did_you_mean(theirs, called)}")
            elif isinstance(value, torch.Tensor) and value.shape == held[called[theirs]].shape:
                found.setdefault(called[theirs], {})[key] = value.detach().clone()
            elif isinstance(value, (int, float)):
                found.setdefault(called[theirs], {})[key] = value
            else:
                problems.append(f"{name!r} is {shown(value)}, and no number or tensor of the weight's shape")
        if problems:
            refuse(problems, where="the state to load", fix="load what state_dict() of the same pipeline gave")
        return weights, found


class Learned:
    """What a pipeline has learned, and the gradients of its last call."""

    stages: tuple[Stage, ...]
    trained: tuple[str, ...]
    skipped: int
    _signature: ModuleSignature
    _planned: PlannedStages
    _weights: StageWeights
    _gradients: Mapping[int, Values]
    _ran: bool
    _scale: LossScale | None
    _constants: Constants
    _runs: RankRuns | None
    _turns: Turns

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last call's loss, whole, by the names of the weights; a weight that several stages have
        gets the sum of theirs. On ranks, all have to ask."""
        with self._turns.one("gradients of a pipeline"):
            parts = self._weights.gathered(
                lambda: self._gradients, self.stages, self.trained, "gradients", self._check_ran
            )
        sums: dict[str, torch.Tensor] = {}
        for name, stage in sorted(parts, key=lambda place: place[1]):
            part = parts[name, stage]
            sums[name] = sums[name] + part if name in sums else part
        return {name: sums[name] for name in self.trained}

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights as they are now, whole, by name. On ranks, all have to ask."""
        names = tuple(self._weights.whole)
        with self._turns.one("weights of a pipeline"):
            parts = self._weights.gathered(lambda: self._weights.of, self.stages, names, "weights")
        return {name: parts[name, stage] for name, stage in sorted(parts, key=lambda place: -place[1])}

    @undisturbed
    def state_dict(self) -> dict[str, Any]:
        """The weights as they are now, what the model writes (running statistics), and what rules keep for weights
        ("update.m.fc.weight"): whole tensors and numbers, by torch's names. On ranks, all have to ask."""
        with self._turns.one("a state that is asked for", of_several=True):
            scale = {} if self._scale is None else self._scale.state()
            return {**self._checkpoints.state(self.weights()), **scale}

    @undisturbed
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a state that `state_dict` gave, perhaps of another pipeline of the model, or the model's own:
        whole tensors. On ranks all have to give the same. There are no gradients until the next call.

        strict   refuse a state in which weights are missing, instead of keeping these

        Raises:
            MeshTensorError: names are unknown or missing, or shapes or dtypes differ; all stays as it was.
        """
        with self._turns.one("a state that is loaded"):
            self._checkpoints.load(state, strict)
            self._scale = self._scale and self._scale.loaded(state)
            self._forget()

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self._signature, self._weights, self.stages, self._runs, self._constants)

    @undisturbed
    def update(self, rule: Rule, *, max_norm: float | None = None) -> None:
        """Replace every weight by `rule(weight, gradient, state)`, with the gradients of the last call. They are
        MeshTensors, or DTensors on ranks, to be computed with element by element; `state` is a dict that is kept.
        `max_norm`: gradients are scaled down, all alike, so that their norm is at most that (as torch clips it).
        What the rule raises changes nothing; on ranks, all raise what it raises on any. Where gradients overflowed
        under a dynamic loss scale nothing is changed, either, and the next call has a smaller one."""

        def prepare() -> tuple[dict[str, str], None]:
            self._check_ran()
            if max_norm is not None and not (is_amount(max_norm) and max_norm > 0):
                refuse(f"max_norm={shown(max_norm)}", fix="give the largest norm of all gradients, more than 0")
            if not callable(rule):
                refuse(f"rule={shown(rule)}", fix="give a function of a weight, its gradient and a dict that is kept")
            return {"update": ", ".join(self.trained), "max_norm": str(max_norm)}, None

        def ruled(*given: Any) -> Any:
            with self._turns.closed("the rule of an update"):
                return rule(*given)

        def run(_: None) -> None:
            sums = self.gradients() if self._planned.shared or max_norm is not None else {}
            scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm_of(sums) + 1e-6))
            shared, loss_scale = {name: sums[name] for name in self._planned.shared}, self._scale
            can_fall = loss_scale is not None and loss_scale.can_fall
            done = self._weights.update(ruled, self._gradients, shared, scale, can_fall)
            self.skipped += not done
            if loss_scale is not None:
                self._scale = loss_scale.after_step() if done else loss_scale.after_overflow()

        with self._turns.one("an update of a pipeline", of_several=True):
            if self._runs is None:
                run(prepare()[1])
            else:
                self._runs.call(prepare, run)

    @property
    def loss_scale(self) -> float | None:
        """What the loss of the next call is multiplied with before gradients are taken, which are divided by it."""
        return None if self._scale is None else self._scale.value

    def _forget(self) -> None:
        """There are no gradients until a call has ended, which may use their memory."""
        self._ran, self._gradients = False, {}

    def _check_ran(self) -> None:
        """Refuse where there are no gradients of a whole call."""
        if not self.trained or not self._ran:
            refuse("there are no gradients yet", fix="call the pipeline first, made with train=True")


def _is_own(name: object) -> bool:
    return not _is_of_rules(name) and name not in (LOSS_SCALE, GOOD_STEPS)


def _is_of_rules(name: object) -> bool:
    return isinstance(name, str) and name.startswith(RULE)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _is_laid_out(value: Any) -> bool:
    return isinstance(value, MeshTensor) or is_dtensor(value)


def _told(value: Any) -> Any:
    """A number as it is; shape and dtype of what is laid out."""
    return [list(value.shape), str(value.dtype).removeprefix("torch.")] if _is_laid_out(value) else value


def _digest(weights: State, of_rules: Mapping[str, State]) -> str:
    digest = hashlib.sha256()
    for value in (*weights.values(), *(value for held in of_rules.values() for value in held.values())):
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
