"""TrainingRun: a training step on a mesh, which keeps parameters and what belongs to them there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mesh_tensor.base.errors import did_you_mean, listing, refuse
from mesh_tensor.plan.training import NUMBERS_NAME
from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.program.program import Program
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.finite import not_finite

from .training import TrainingStep

if TYPE_CHECKING:
    from .module import MeshModule

STEP = "opt.step"


class TrainingRun:
    """`loss = run(x, y)` takes the next step: a batch as global tensors (MeshTensors, DTensors), the loss as a whole
    one. Parameters, and what the optimizer keeps, stay on the mesh, in the layouts that were stated for them. A step
    that raises leaves them as they were.

    steps   how many steps were taken"""

    def __init__(self, step: TrainingStep, module: MeshModule) -> None:
        self.steps = 0
        self._step, self._module = step, module
        self._state: dict[str, Any] | None = None
        self._watched = [name for name, first in step.state.items() if not not_finite({name: (first,)})]

    @undisturbed
    def __call__(self, *batch: Any, **named: Any) -> torch.Tensor:
        wanted = self._step.inputs
        if len(batch) + len(named) != len(wanted) or any(name not in wanted for name in named):
            refuse(
                f"{len(batch)} tensors and {listing(list(named))} for a batch of {listing(list(wanted))}",
                where="a step of training",
                fix="pass the batch's tensors in order, or by name",
            )
        free = [name for name in wanted if name not in named]
        tensors = {**dict(zip(free, batch, strict=True)), **named}
        numbers = self._step.numbers(self.steps)
        loss, state, bad = self._module.step({**tensors, NUMBERS_NAME: numbers}, self._kept, self._watched)
        if bad or not bool(torch.isfinite(loss)):
            self._refuse(loss, bad)
        self._state = state
        self.steps += 1
        return loss

    def _refuse(self, loss: torch.Tensor, bad: Collection[str]) -> NoReturn:
        """Refuse a step after which the state `bad` would not be finite."""
        names = {ours: theirs for theirs, ours in reversed(self._step.names.items())}
        found = [names[k.parameter] for k in self._step.kept if not {k.parameter, *k.slots.values()}.isdisjoint(bad)]
        slots = {slot for mine in self._step.kept for slot in (mine.parameter, *mine.slots.values())}
        found += [names[name] for name in bad if name not in slots]
        if not bool(torch.isfinite(loss)):
            refuse(
                f"the loss is {loss.item()}",
                where=f"step {self.steps + 1}; not finite would be {listing(found)}",
                why="the state stays as it was before this step",
                fix="look at the batch, use a smaller learning rate, or clip_norm",
            )
        refuse(
            f"gradients that are not finite, or too large for what is kept: those of {listing(found)}",
            where=f"step {self.steps + 1}, whose loss is {loss.item():.6g}",
            why="the parameters would not be finite after it; the state stays as it was before this step",
            fix="keep derivatives finite where they are not, as that of sqrt or norm at 0: "
            "torch.sqrt(x.clamp(min=eps)); look at the batch, or use a smaller learning rate",
        )

    def state_dict(self, *, full: bool | None = None) -> dict[str, Any]:
        """The state by torch's names: parameters ("fc.weight"), what the optimizer keeps ("opt.exp_avg.fc.weight"), and
        the number of steps ("opt.step").

        full   whole tensors (the default on a virtual mesh), instead of DTensors (the default on ranks, all of which
               have to ask)
        """
        made = {**self._step.fixed, **self._module.whole_state(self._kept, full)}
        tensors = {theirs: made[ours] for theirs, ours in self._step.names.items()}
        return {**tensors, STEP: torch.tensor(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, perhaps on another mesh: whole tensors or DTensors.

        Raises:
            MeshTensorError: names are missing or unknown, or shapes or dtypes differ; the state stays as it was.
        """
        names = {theirs: ours for theirs, ours in self._step.names.items() if ours in self._step.state}
        known = [*names, STEP]
        problems = [f"{name!r} is missing" for name in known if name not in state]
        every = [*self._step.names, STEP]
        problems += [f"there is no {name!r}{did_you_mean(name, known)}" for name in state if name not in every]
        problems += [
            found for n in names if n in state and (found := _differs(n, state[n], self._step.state[names[n]]))
        ]
        if problems:
            refuse(
                problems, where="the state to load", fix="load what state_dict() of the same model and optimizer gave"
            )
        kept = self._module.as_state({names[name]: state[name] for name in names})
        self._state, self.steps = kept, int(state[STEP])

    @property
    def _kept(self) -> dict[str, Any]:
        if self._state is None:
            self._state = self._module.as_state(self._step.state)
        return self._state

    @property
    def plan(self) -> ModulePlan:
        """Every stage of the step's way."""
        return self._module.plan

    @property
    def program(self) -> Program:
        """The steps of every device."""
        return self._module.program

    def explain(self) -> str:
        """What was decided, why, and what it costs."""
        return self._module.explain()

    def __repr__(self) -> str:
        batch = ", ".join(self._step.inputs)
        return f"TrainingRun({batch}; {self._step.optimizer.name}, {self.steps} steps, {self._module.mesh})"


def _differs(name: str, tensor: Any, expected: torch.Tensor) -> str:
    shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    if shape is None or tuple(shape) != tuple(expected.shape) or dtype != expected.dtype:
        found = type(tensor).__name__ if shape is None else f"{tuple(shape)} {dtype}"
        return f"{name!r} is {found}, but has to be {tuple(expected.shape)} {expected.dtype}"
    return ""
