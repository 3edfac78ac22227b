"""training_step: a model, its loss and an optimizer as one module, which is laid out like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tvm import ir

from mesh_tensor.annotations.names import source_names
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.optimizer import MASTER, Optimizer
from mesh_tensor.importers import ImportedModule
from mesh_tensor.plan.training import NUMBERS_NAME, Kept, training_function

from .training_check import check_gradients
from .training_import import ImportedLoss, imported_loss

Schedule = Callable[[int], float]


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One step of training: `mod`'s function `main` takes a batch, the numbers of the step (`opt_numbers`) and `state`:
    the parameters, what the optimizer keeps for them, and buffers that the model writes; it gives the loss and the new
    state, in the same order.

    inputs      the names of the batch's tensors
    state       tensors by the names of `main`'s parameters, before the first step
    fixed       parameters that are not trained
    names       from names in torch ("fc.weight", "opt.exp_avg.fc.weight") to those
    zero        what of the state is split over the batch's axes: 0 nothing, 1 and 2 what the optimizer keeps, 3 all
    schedule    step 0, 1, ... -> what the learning rate is multiplied with
    """

    mod: ir.IRModule
    inputs: tuple[str, ...]
    state: dict[str, torch.Tensor]
    fixed: dict[str, torch.Tensor]
    names: dict[str, str]
    optimizer: Optimizer
    kept: tuple[Kept, ...]
    zero: int = 0
    schedule: Schedule | None = None

    def numbers(self, step: int) -> torch.Tensor:
        """The numbers of step 0, 1, ..."""
        lr = self.optimizer.options["lr"]
        assert isinstance(lr, float)
        factor = 1.0 if self.schedule is None else float(self.schedule(step))
        return torch.tensor(self.optimizer.numbers(step + 1, lr * factor), dtype=torch.float64)


def training_step(
    model: nn.Module | ImportedModule,
    loss: Callable[..., torch.Tensor] | None,
    inputs: Sequence[torch.Tensor] = (),
    *,
    optimizer: str = "adamw",
    zero: int = 0,
    clip_norm: float | None = None,
    schedule: Schedule | None = None,
    check: bool = True,
    **options: Any,
) -> TrainingStep:
    """A step of training as a module: forward, backward and the optimizer's step.

    Args:
        model: a torch model in the mode that it is to be trained in; or what `from_torch` gave of one that gives its
            loss.
        loss: of what the model gives for all inputs but the last one, and the last one (`F.cross_entropy`); None: what
            the model gives for all inputs is the loss.
        inputs: example inputs, of the sizes that are trained with.
        optimizer: "sgd", "momentum", "adam", "adamw" or "lion", with the formulas and defaults of torch.
        zero: 1 or 2 splits what the optimizer keeps over the axes that split the batch, 3 the parameters as well.
        clip_norm: the norm of all gradients together is not larger than this.
        schedule: from the number of the step (0, 1, ...) to what the learning rate is multiplied with.
        check: compare a step on the example inputs with torch.autograd.
        options: of the optimizer: lr, betas, eps, weight_decay, momentum, nesterov.

    Returns:
        What `distribute_module` takes: `run = mt.distribute_module(step, {"data": 2}, {"x": {"data": 0}})`; then
        `loss = run(x, y)`, again and again.

    Raises:
        MeshTensorError: an operator has no gradient, or can't be imported; a parameter has no influence on the loss;
            there is no such optimizer or option; gradients differ from torch's.
    """
    if zero not in (0, 1, 2, 3):
        refuse(f"zero={zero!r}", fix="use 0, 1, 2 or 3")
    made = Optimizer.make(optimizer, **options)
    if isinstance(model, ImportedModule):
        return _step(
            ImportedLoss(model, {name: model.params[name] for name in model.state}),
            model,
            made,
            zero,
            clip_norm,
            schedule,
        )
    with imported_loss(model, loss, tuple(inputs)) as found:
        step = _step(found, model, made, zero, clip_norm, schedule)
        if check and found.loss is not None:
            batch = (*inputs, *found.buffers.values())
            check_gradients(model, batch, found.loss, found.module, [mine.parameter for mine in step.kept])
    return step


def _step(
    found: ImportedLoss, model: Any, made: Optimizer, zero: int, clip_norm: float | None, schedule: Schedule | None
) -> TrainingStep:
    module = found.module
    mod, kept = training_function(module.mod, "main", _trained(module, model), made, clip_norm, list(found.buffers))
    state = {mine.parameter: module.params[mine.parameter] for mine in kept} | found.buffers
    for mine in kept:
        state |= {name: _first(slot, state[mine.parameter]) for slot, name in mine.slots.items()}
    params = [param.name_hint for param in mod["main"].params]
    fixed = {name: module.params[name] for name in params if name in module.params and name not in state}
    every = {**module.names, **source_names(mod["main"])}
    names = {theirs: ours for theirs, ours in every.items() if ours in state or ours in fixed}
    taken = tuple(name for name in params if name not in state and name not in fixed and name != NUMBERS_NAME)
    state = {name: state[name] for name in params if name in state}
    return TrainingStep(mod, taken, state, fixed, names, made, tuple(kept), zero, schedule)


def _trained(module: ImportedModule, model: Any) -> list[str]:
    """The parameters that are trained, by name: of a torch model those that require a gradient."""
    names = [n for n, tensor in module.params.items() if tensor.is_floating_point() and n not in module.state]
    if isinstance(model, nn.Module):
        fixed = {n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        fixed_here = {module.names[name] for name in fixed if name in module.names}
        names = [name for name in names if name not in fixed_here]
    if not names:
        refuse("the model has no parameter to train", fix="some parameter has to require a gradient")
    return names


def _first(slot: str, parameter: torch.Tensor) -> torch.Tensor:
    """A slot before the first step."""
    wide = parameter.detach().to(torch.float32 if parameter.element_size() < 4 else parameter.dtype)
    return wide.clone() if slot == MASTER else torch.zeros_like(wide)
