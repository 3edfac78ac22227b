"""What a pipeline has learned, under the names that it has where the model comes from: as it is now, and set again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mesh_tensor.base.errors import did_you_mean, refuse, shown
from mesh_tensor.importers.constants import Constants
from mesh_tensor.pipelining.fragments import Stage
from mesh_tensor.runtime.module_inputs import ModuleSignature
from mesh_tensor.runtime.ranks.dtensor import is_dtensor
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from ..module_ports import checked_state, whole
from ..training_optimizer import GOOD_STEPS, LOSS_SCALE
from .ranks import RankRuns
from .weights import StageWeights

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
            return {(name, 0, key): _copied(value) for name, state in loaded for key, value in state.items()}
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


def _is_own(name: object) -> bool:
    return not _is_of_rules(name) and name not in (LOSS_SCALE, GOOD_STEPS)


def _is_of_rules(name: object) -> bool:
    return isinstance(name, str) and name.startswith(RULE)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


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
