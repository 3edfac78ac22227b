"""training_step: a model, its loss and an optimizer as one module, which is laid out like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import nn
from tvm import ir

from mesh_tensor.annotations.named_values import NamedValues
from mesh_tensor.annotations.names import source_names
from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.optimizer import is_number
from mesh_tensor.importers import ImportedModule
from mesh_tensor.importers.constants import Constants
from mesh_tensor.plan.recompute import AUTO, FULL, SELECTIVE
from mesh_tensor.plan.training import LOSS_SCALE_NAME, NUMBERS_NAME, AnyOptimizer, Kept, training_function
from mesh_tensor.rules.operator.dropout import SEED_NAME

from .training_checks import check_gradients, check_loss
from .training_import import ImportedLoss, Parts, check_names, imported_loss, microbatches_of, microbatches_of_module
from .training_optimizer import COUNTS, LossScale, Rule, any_optimizer, first_state, masters, names_held, trained

Schedule = Callable[[int], float]
_LARGEST_LR = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False, repr=False)
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
    loss_scale  that of the first step
    seed        from which what is dropped follows, with the number of the step; None: nothing is
    copies      the name of a value of the forward part -> those of the same in later microbatches, and computed again
    constants   what the step has a copy of, which the model should not write before it is distributed
    complex_inputs  those of the batch's tensors that may be complex; None: all
    """

    mod: ir.IRModule
    inputs: tuple[str, ...]
    state: dict[str, torch.Tensor]
    fixed: dict[str, torch.Tensor]
    names: dict[str, str]
    optimizer: AnyOptimizer
    kept: tuple[Kept, ...]
    zero: int = 0
    schedule: Schedule | None = None
    loss_scale: LossScale | None = None
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seed: int | None = None
    constants: Constants = field(default_factory=Constants)
    complex_inputs: frozenset[str] | None = None

    def __repr__(self) -> str:
        return f"TrainingStep({', '.join(self.inputs)}; {len(self.kept)} parameters)"

    def dropout_seed(self, step: int) -> torch.Tensor:
        """What dropouts of step 0, 1, ... follow from."""
        assert self.seed is not None
        return torch.tensor((self.seed << 32) + step)

    def numbers(self, step: int) -> torch.Tensor:
        """The numbers of step 0, 1, ..."""
        lr = self.optimizer.options["lr"]
        assert isinstance(lr, (int, float))
        factor: object = 1.0 if self.schedule is None else self.schedule(step)
        if isinstance(factor, torch.Tensor) and factor.numel() == 1:
            factor = factor.item()
        rate = lr * float(factor) if isinstance(factor, Real) else float("nan")
        if not abs(rate) <= _LARGEST_LR:
            refuse(f"schedule({step}) is {shown(factor)}", fix="return what the learning rate is multiplied with")
        return torch.tensor(self.optimizer.numbers(step + 1, rate), dtype=torch.float64)


@torch.inference_mode(False)  # torch's own gradients are recorded
def training_step(
    model: nn.Module | ImportedModule,
    loss: Callable[..., torch.Tensor] | None,
    inputs: Sequence[torch.Tensor] = (),
    *,
    optimizer: str | Rule = "adamw",
    zero: int = 0,
    clip_norm: float | None = None,
    schedule: Schedule | None = None,
    accumulate: int = 1,
    per_microbatch: Sequence[str] = (),
    loss_scale: float | str | None = None,
    seed: int = 0,
    recompute: str | int | Sequence[str] | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    check: bool = True,
    **options: Any,
) -> TrainingStep:
    """One step of training as a module: forward, backward and the optimizer's update.

    Args:
        model: a torch model in the mode that it is to be trained in; or what `from_torch` gave of one that gives its
            loss.
        loss: a function of the model's output for all inputs but the last one, and the last one, e.g.
            `F.cross_entropy`; None: the model's output for all inputs is the loss.
        inputs: example inputs, of the shapes that training uses.
        optimizer: "sgd", "momentum", "adam", "adamw" or "lion", with the formulas and defaults of torch; or a function
            `rule(parameter, gradient, lr, step, *, average) -> (new parameter, {"average": ...})` of torch tensors.
        zero: the level of ZeRO: 1 or 2 splits the optimizer state over the axes that split the batch, 3 the parameters
            as well.
        clip_norm: scale the gradients down so that their norm, over all parameters, is at most this.
        schedule: a function of the number of the step (0, 1, ...), whose result multiplies the learning rate.
        accumulate: gradient accumulation: the number of microbatches that the batch is split into, which run one after
            the other. Loss and gradients are those of the whole batch. An imported module has the size of a microbatch.
        per_microbatch: submodules that mix the rows of a microbatch, as a batch norm does in training, and may do so.
            Loss and gradients are then not the whole batch's, but what torch computes for one microbatch after the
            other; buffers that the model updates (running statistics) go from each microbatch to the next.
        loss_scale: for 16-bit training: the loss is multiplied by this before the backward pass, and the gradients are
            divided by it. A number, or "dynamic": a step whose gradients overflow is skipped, and the scale reduced.
        recompute: activation checkpointing: which activations the backward pass computes again instead of keeping
            them. "full": all but the results of layers; "selective": those that take few operations; "auto": as many
            of these as keep the least memory; a number: as many as keep at most so many bytes, on all devices
            together; or names or patterns of submodules (the outermost that match), whose results are kept, and all
            others before the last of them are not. Results are the same, bit for bit.
        seed: of dropout: what is dropped depends on the seed, the number of the step and the position in the global
            tensor, so not on the mesh.
        reduce_dtype: the dtype in which gradients are reduced over devices: "bfloat16" or "float16" sends half as much,
            and rounds every gradient; None: float32 or wider.
        check: compare the gradients on the example inputs with those of torch.autograd.
        options: of the optimizer: lr, betas, eps, weight_decay, momentum, nesterov.

    Returns:
        The step, for `distribute_module`: `run = mt.distribute_module(step, {"data": 2}, {"x": {"data": 0}})`; then
        each `loss = run(x, y)` takes one step.

    Raises:
        MeshTensorError: an operator has no gradient, or can't be imported; a parameter has no influence on the loss;
            there is no such optimizer or option; gradients differ from torch's.
    """
    if zero not in (0, 1, 2, 3):
        refuse(f"zero={zero!r}", fix="use 0, 1, 2 or 3")
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        refuse(f"clip_norm={shown(clip_norm)}", fix="use the largest norm that gradients may have, a number above 0")
    if isinstance(schedule, type) or not (schedule is None or callable(schedule)):
        fix = "use a function from the number of the step (0, 1, ...) to a factor, as LambdaLR takes it"
        refuse(f"schedule={shown(schedule)}", fix=fix)
    if isinstance(inputs, (torch.Tensor, Mapping)):
        refuse(f"the inputs are a {type(inputs).__name__}", fix="pass a tuple of tensors, the target last: (x, y)")
    made = any_optimizer(optimizer, options)
    scale, dtype = LossScale.make(loss_scale), _narrow(reduce_dtype)
    asked = _Asked(made, zero, clip_norm, schedule, scale, _checked_seed(seed), recompute, dtype, per_microbatch)
    if isinstance(model, ImportedModule):
        if loss is not None:
            refuse(
                f"loss={shown(loss)} of an imported module",
                where="training_step",
                why="what it gives is the loss already",
                fix="pass None, and import the model with its loss; or pass the torch model",
            )
        parts = None if accumulate == 1 else microbatches_of_module(model, accumulate)
        return _step(ImportedLoss(model, {name: model.params[name] for name in model.state}), asked, parts)
    if per_microbatch:
        refuse(
            f"per_microbatch={shown(per_microbatch)} of a torch model",
            where="training_step",
            why="it is recorded for the whole batch, too, where its norms make other values",
            fix="pass what from_torch gives of the model with its loss, exported for one microbatch",
        )
    batch = tuple(inputs)
    parts = None if accumulate == 1 else microbatches_of(batch, accumulate)
    if parts is not None:
        with imported_loss(model, loss, batch, gradients=False) as found:
            parts = replace(parts, whole=found.module.mod)
    with imported_loss(model, loss, batch if parts is None else parts.first) as found:
        step = _step(found, asked, parts)
        if check and found.loss is not None:
            given = (*(batch if parts is None else parts.first), *found.given)
            check_gradients(model, found, given, [mine.parameter for mine in step.kept])
    if parts is not None:
        check_loss(model, loss, batch, step.mod, step.state | step.fixed, found.seeded)
    return step


@dataclass(frozen=True)
class _Asked:
    optimizer: AnyOptimizer
    zero: int
    clip_norm: float | None
    schedule: Schedule | None
    loss_scale: LossScale | None
    seed: int
    recompute: str | int | Sequence[str] | None
    reduce_dtype: str | None
    per_microbatch: Sequence[str] = ()


def _narrow(dtype: object) -> str | None:
    """What gradients are added up in, if in less than float32."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in (*NARROW, "float32"):
        refuse(f"reduce_dtype={shown(dtype)}", fix=f"use {listing(list(NARROW))}, or leave it out: float32")
    return name if name in NARROW else None


def _checked_seed(seed: object) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**31:
        refuse(f"seed={shown(seed)}", fix="use a whole number from 0 to 2**31 - 1")
    return seed


def _step(found: ImportedLoss, asked: _Asked, parts: Parts | None = None) -> TrainingStep:
    module = found.module
    check_names(module, asked.optimizer.slots, COUNTS)
    if parts is not None and not asked.per_microbatch:
        _check_writes_nothing(found)
    made = training_function(
        module.mod,
        "main",
        trained(module),
        asked.optimizer,
        asked.clip_norm,
        list(found.buffers),
        scaled=asked.loss_scale is not None,
        microbatches=None if parts is None else parts.named(module.mod, asked.per_microbatch, len(found.buffers)),
        recompute=_recomputed(module.mod, asked.recompute),
        reduce_dtype=asked.reduce_dtype,
    )
    params = [param.name_hint for param in made.mod["main"].params]
    state = first_state(found, made.kept)
    fixed = {name: module.params[name] for name in params if name in module.params and name not in state}
    ours_alone = {*state, *fixed, NUMBERS_NAME, LOSS_SCALE_NAME, SEED_NAME}
    return TrainingStep(
        made.mod,
        tuple(name for name in params if name not in ours_alone),
        {name: state[name] for name in params if name in state},
        fixed,
        names_held(module, made.mod, {**state, **fixed}),
        asked.optimizer,
        tuple(made.kept),
        asked.zero,
        asked.schedule,
        asked.loss_scale,
        made.copies,
        asked.seed if SEED_NAME in params else None,
        Constants({**module.constants.copied, **masters(module, made.kept, state)}),
        module.complex_inputs,
    )


def _check_writes_nothing(found: ImportedLoss) -> None:
    written = [name for name, ours in found.module.names.items() if ours in found.buffers]
    if found.buffers:
        refuse(
            f"accumulate= of a model that writes {listing(written)}",
            why="statistics of a microbatch are not those of the batch",
            fix="pass what from_torch gives for one microbatch, with per_microbatch=[names of batch norms], if that is "
            "meant; else leave accumulate out, or use norms that look at each row by itself",
        )


def _recomputed(mod: ir.IRModule, recompute: str | int | Sequence[str] | None) -> str | int | list[str]:
    """What is computed again: in a word, by how many bytes are kept, or by the names of the values that are."""
    if recompute in (FULL, SELECTIVE, AUTO):
        return str(recompute)
    if isinstance(recompute, int) and not isinstance(recompute, bool) and recompute > 0:
        return recompute
    wanted = [] if recompute is None else recompute
    if isinstance(wanted, str) or not isinstance(wanted, Sequence) or not all(isinstance(n, str) for n in wanted):
        refuse(
            f"recompute={shown(recompute)}",
            fix=f"use {FULL!r}, {SELECTIVE!r}, {AUTO!r}, a number of bytes, or a list of names of submodules",
        )
    meant, problems = NamedValues(mod, "main").meant_by(wanted)
    params = {param.name_hint for param in mod["main"].params}
    kept = {name: [value for other, (_, value), _ in meant if other == name and value not in params] for name in wanted}
    problems += [f"{name!r} names parameters alone" for name, values in kept.items() if not values and not problems]
    if problems:
        refuse(problems, where="recompute", fix="name submodules that give one tensor, as 'blocks.*'")
    found = {value for values in kept.values() for value in values}
    named = {theirs: ours for theirs, ours in source_names(mod["main"]).items() if ours in found}
    # A submodule's value may be that of one inside it, too: "0" and "0.4" of nn.Sequential.
    outermost = {ours for name, ours in named.items() if not any(name.startswith(f"{outer}.") for outer in named)}
    return [value for value in found if value in outermost or value not in named.values() or value in wanted]
