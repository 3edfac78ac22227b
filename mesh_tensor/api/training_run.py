"""TrainingRun: a training step on a mesh, which keeps parameters and what belongs to them there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.optimizer import IMPLIED, MOST_LR, SLOT_NORM, Optimizer
from mesh_tensor.plan.training import LOSS_SCALE_NAME, NUMBERS_NAME
from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.program.program import Program
from mesh_tensor.rules.operator.dropout import SEED_NAME
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.backend import Leave, finishing
from mesh_tensor.runtime.elementwise import not_finite, within
from mesh_tensor.targets.dtypes import as_floats

from .module_launch import parts_of
from .training import TrainingStep
from .training_optimizer import STEP
from .training_state import Loading, check_mesh

if TYPE_CHECKING:
    from .mesh_module import MeshModule


class TrainingRun:
    """A training step on a mesh: `loss = run(x, y)` takes the next step with a batch of global tensors, MeshTensors or
    DTensors, and returns the loss as a global tensor. Parameters and optimizer state stay on the mesh, in their
    layouts. A step that raises leaves them as they were.

    steps       number of steps taken
    skipped     number of steps skipped because gradients overflowed under a dynamic loss scale
    loss_scale  the loss scale of the next step; None: there is none"""

    def __init__(self, step: TrainingStep, module: MeshModule) -> None:
        self.steps = self.skipped = 0
        self._scale = step.loss_scale
        self._step, self._module = step, module
        self._state: dict[str, Any] | None = None
        self._bounded, self._lost = False, ""  # whether the state may be overwritten; why there is none any more
        self._first = {name: tensor.clone() for name, tensor in step.state.items()}  # which their owner may write
        slots = [(mine.slots, slot) for mine in step.kept for slot in mine.slots]
        means = IMPLIED if isinstance(step.optimizer, Optimizer) else {}  # others may keep anything under these names
        implied = {mine[slot] for mine, slot in slots if means.get(slot) in mine}
        finite = [name for name, first in step.state.items() if not not_finite({name: (first,)})]
        self._watched = [name for name in finite if name not in implied]

    @undisturbed
    def __call__(self, *batch: Any, **named: Any) -> torch.Tensor:
        given = (*batch, *named.values())
        with self._module.turns.one("a step of training", given):
            with self._module.as_call(given):
                tensors = self._tensors(batch, named)
            return self._next(tensors)

    def _tensors(self, batch: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """What a step takes beside the state."""
        wanted = self._step.inputs
        if len(batch) + len(named) != len(wanted) or any(name not in wanted for name in named):
            refuse(
                f"{len(batch)} tensors and {listing(list(named))} for a batch of {listing(list(wanted))}",
                where="a step of training",
                fix="pass the batch's tensors in order, or by name",
            )
        self._check_there()
        free = [name for name in wanted if name not in named]
        known = self._step.complex_inputs
        tensors = {**dict(zip(free, batch, strict=True)), **named}
        tensors = {name: as_floats(t) if known is None or name in known else t for name, t in tensors.items()}
        check_mesh(self._module, tensors)
        tensors[NUMBERS_NAME] = self._step.numbers(self.steps)
        if self._step.seed is not None:
            tensors[SEED_NAME] = self._step.dropout_seed(self.steps)
        if self._scale is not None:
            tensors[LOSS_SCALE_NAME] = torch.tensor(self._scale.value, dtype=torch.float32)
        return tensors

    def _next(self, tensors: Mapping[str, Any]) -> torch.Tensor:
        """The loss of the step with this batch."""
        state = self._kept
        leave = Leave(self._bounded and abs(float(tensors[NUMBERS_NAME][0])) <= MOST_LR)
        with finishing(leave):
            return self._stepped(tensors, state, leave)

    def _stepped(self, tensors: Mapping[str, Any], state: dict[str, Any], leave: Leave) -> torch.Tensor:
        """The loss, after the step from this state; with `leave` the new state may be where the old one was."""
        try:
            loss, state, bad = self._module.step(tensors, state, self._watched, leave)
        except BaseException as error:
            if leave.used:
                self._lost = f"step {self.steps + 1} ended in {type(error).__name__}"
            raise
        is_finite = bool(torch.isfinite(loss))
        if bad and is_finite and self._scale is not None and self._scale.can_fall:
            self._scale = self._scale.after_overflow()
            self.skipped += 1
            return loss
        if bad or not is_finite:
            self._refuse(loss, bad)
        self._state = state
        self._bounded = leave.used or self._is_bounded(state)
        self.steps += 1
        if self._scale is not None:
            self._scale = self._scale.after_step()
        return loss

    @property
    def loss_scale(self) -> float | None:
        """What the loss of the next step is multiplied with before gradients are taken."""
        return None if self._scale is None else self._scale.value

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
            where=f"step {self.steps + 1}, whose loss is {loss.item():.6g}"
            + ("" if self._scale is None else f", times {self._scale.value:g}"),
            why="the parameters would not be finite after it; the state stays as it was before this step",
            fix="keep derivatives finite where they are not, as that of sqrt or norm at 0: "
            "torch.sqrt(x.clamp(min=eps)); look at the batch, or use a smaller learning rate",
        )

    @undisturbed
    def state_dict(self, *, full: bool | None = None) -> dict[str, Any]:
        """The state by torch's names: parameters ("fc.weight"), what the optimizer keeps ("opt.exp_avg.fc.weight"), and
        the number of steps ("opt.step").

        full   whole tensors (the default on a virtual mesh), instead of DTensors (the default on ranks, all of which
               have to ask)
        """
        with self._module.turns.one("a state that is asked for"):
            with self._module.as_call():
                self._check_there()
            whole = not self._module.is_on_ranks if full is None else full
            fixed = {name: self._module.weight(name, whole) for name in self._step.fixed}
            made = {**fixed, **self._module.whole_state(self._kept, full)}
            self._bounded = False  # the caller may have the very memory, which must not be overwritten then
        tensors = {theirs: made[ours] for theirs, ours in self._step.names.items()}
        return {**tensors, **self._counts()}

    def _counts(self) -> dict[str, torch.Tensor]:
        """What of the state is no tensor of the module's."""
        return {STEP: torch.tensor(self.steps)} | ({} if self._scale is None else self._scale.state())

    @undisturbed
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a state that `state_dict` gave, perhaps on another mesh: whole tensors or DTensors. What is not
        trained may be missing.

        strict   refuse a state in which names are missing (a model's has nothing of the optimizer), instead of keeping
                 what the run has for them; of a parameter in 16 bits, the wide copy that is trained in its place
                 begins anew with it

        Raises:
            MeshTensorError: names are missing or unknown, shapes or dtypes differ, or what is not trained is another
                than the model's; the state stays as it was.
        """
        given = state.values() if isinstance(state, Mapping) else ()
        with self._module.turns.one("a state that is loaded", given):
            with self._module.as_call(given):
                loading = Loading(self._step, self._module, self._counts())
                tensors, numbers = loading.checked(state, self._check_there, strict)
            if len(tensors) < len(self._step.state):
                tensors = {**self._module.whole_state(self._kept, None), **tensors}
            kept = self._module.as_state(tensors)
            self._state, self.steps, self._lost = kept, int(numbers.get(STEP, self.steps) or 0), ""
            self._bounded = self._is_bounded(kept)
            self._scale = self._scale and self._scale.loaded(numbers)

    def _check_there(self) -> None:
        if self._lost:
            refuse(
                "the state is lost",
                where="a training run",
                why=f"{self._lost} while parameters were overwritten",
                fix="load_state_dict() of a state that was saved before",
            )

    @property
    def _kept(self) -> dict[str, Any]:
        if self._state is None:
            self._state, self._first = self._module.as_state(self._first), {}
            self._bounded = self._is_bounded(self._state)
        return self._state

    def _is_bounded(self, state: Mapping[str, Any]) -> bool:
        """Whether what the optimizer keeps is such that new state is finite, as `Optimizer.stays_finite` says."""
        kept: dict[str, list[torch.Tensor]] = {slot: [] for mine in self._step.kept for slot in mine.slots}
        for mine in self._step.kept:
            for slot, name in mine.slots.items():
                kept[slot] += parts_of(state[name])
        positive = [part for slot in IMPLIED.values() for part in kept.get(slot, [])]
        return within([part for parts in kept.values() for part in parts], SLOT_NORM) and all(
            bool((part >= 0).all()) for part in positive
        )

    @property
    def plan(self) -> ModulePlan:
        """Every stage of the step's way."""
        return self._module.plan

    @property
    def not_simulated(self) -> tuple[str, ...]:
        """What a step does beside its program, in words."""
        return ("looking through what a step leaves for numbers that are not finite",) if self._watched else ()

    @property
    def program(self) -> Program:
        """The steps of every device."""
        return self._module.program

    def explain(self) -> str:
        """What was decided, why, and what it costs."""
        return self._module.explain()

    def refuse_call(self, error: Exception, given: Iterable[Any] = ()) -> NoReturn:
        """Raise `error` instead of a step, which the other ranks take."""
        self._module.refuse_call(error, given)

    def __reduce__(self) -> NoReturn:
        refuse(
            "a TrainingRun can't be copied or pickled",
            why="both would overwrite the same parameters",
            fix="distribute the step once more, and load the state_dict() of this run there",
        )

    def __repr__(self) -> str:
        batch = ", ".join(self._step.inputs)
        return f"TrainingRun({batch}; {self._step.optimizer.name}, {self.steps} steps, {self._module.mesh})"
