"""training_step: a model, its loss and an optimizer as one module, which is laid out like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import nn
from tvm import ir

from mesh_tensor.annotations.names import Fresh, renamed_parameters
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.optimizer import MASTER, Optimizer
from mesh_tensor.importers import ImportedModule
from mesh_tensor.importers.torch_frontend import from_torch
from mesh_tensor.plan.training import NUMBERS_NAME, Kept, training_function

from .training_check import check_gradients

Schedule = Callable[[int], float]


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One step of training: `mod`'s function `main` takes a batch, the numbers of the step (`opt_numbers`) and `state`:
    the parameters and what the optimizer keeps for them; it gives the loss and the new state, in the same order.

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
    module = model if isinstance(model, ImportedModule) else _imported(model, loss, tuple(inputs))
    trained = _trained(module, model)
    mod, kept = training_function(module.mod, "main", trained, made, clip_norm)
    state = {name: module.params[name] for name in trained}
    for mine in kept:
        state |= {name: _first(slot, state[mine.parameter]) for slot, name in mine.slots.items()}
    func = mod["main"]
    params = [param.name_hint for param in func.params]
    names = {str(theirs): str(ours) for theirs, ours in func.attrs["mesh_tensor_names"].items()}
    fixed = {name: module.params[name] for name in params if name in module.params and name not in state}
    names = {theirs: ours for theirs, ours in names.items() if ours in state or ours in fixed}
    taken = tuple(name for name in params if name not in state and name not in fixed and name != NUMBERS_NAME)
    state = {name: state[name] for name in params if name in state}
    step = TrainingStep(mod, taken, state, fixed, names, made, tuple(kept), zero, schedule)
    if check and isinstance(model, nn.Module):
        check_gradients(model, inputs, _loss_of(model, loss, tuple(inputs)), module, trained)
    return step


class WithLoss(nn.Module):
    """A model and its loss as one module, whose parameters have the model's own names."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.training = model.training
        self.__dict__["_parameters"], self.__dict__["_buffers"] = model._parameters, model._buffers
        self.__dict__["_modules"] = model._modules
        self.__dict__["_of"] = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The loss."""
        model, loss = self.__dict__["_of"]
        return loss(model(*inputs[:-1]), inputs[-1])


def _loss_of(
    model: nn.Module, loss: Callable[..., torch.Tensor] | None, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    with torch.enable_grad():
        return model(*inputs) if loss is None else loss(model(*inputs[:-1]), inputs[-1])


def _imported(model: Any, loss: Callable[..., torch.Tensor] | None, inputs: tuple[torch.Tensor, ...]) -> ImportedModule:
    if not isinstance(model, nn.Module):
        refuse(
            f"training_step takes a torch model, not a {type(model).__name__}",
            fix="pass a torch.nn.Module, or what from_torch gave",
        )
    if not inputs:
        refuse("training_step without inputs", fix="pass example inputs, of the sizes that are trained with")
    if loss is None:
        return from_torch(torch.export.export(model, inputs, strict=False))
    module = from_torch(torch.export.export(WithLoss(model, loss), inputs, strict=False))
    return _with_input_names(module, _names(model.forward)[: len(inputs) - 1], len(inputs))


def _names(function: Any) -> list[str]:
    """Of its parameters."""
    return list(signature(function).parameters)


def _with_input_names(module: ImportedModule, names: list[str], count: int) -> ImportedModule:
    """The inputs under the names that the model has for them; the last one is the "target"."""
    mod, func = module.mod, module.mod["main"]
    taken = [param.name_hint for param in func.params[count:]]
    fresh, old = Fresh(taken), [param.name_hint for param in func.params[:count]]
    wanted = [names[n] if n < len(names) else f"input_{n}" for n in range(count - 1)]
    new = dict(zip(old, [fresh.name(name) for name in [*wanted, "target"]], strict=True))
    mod = mod.clone()
    mod.update_func(mod.get_global_var("main"), renamed_parameters(mod, func, new))
    return replace(module, mod=mod)


def _trained(module: ImportedModule, model: Any) -> list[str]:
    """The parameters that are trained, by name: of a torch model those that require a gradient."""
    names = [name for name, tensor in module.params.items() if tensor.is_floating_point()]
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
