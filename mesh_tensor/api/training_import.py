"""A torch model and its loss as a module: the buffers that it writes are inputs and results. A batch of example inputs
may come in microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import nn
from tvm import ir

from mesh_tensor.annotations.names import Fresh, renamed_parameters
from mesh_tensor.base.errors import MeshTensorError, listing, refuse, shown
from mesh_tensor.importers import ImportedModule
from mesh_tensor.importers.imported import identifiers
from mesh_tensor.importers.torch_autocast import under_autocast
from mesh_tensor.importers.torch_dropout import counted, has_seed
from mesh_tensor.importers.torch_exact import interpreted
from mesh_tensor.importers.torch_frontend import from_torch
from mesh_tensor.pipelining.flow import Flow, stated_bindings
from mesh_tensor.plan.accumulate import Microbatches
from mesh_tensor.plan.training import LOSS_SCALE_NAME, NUMBERS_NAME
from mesh_tensor.rules.operator.dropout import SEED_NAME

from .own_gradients import refuse_functions, refuse_hooks, refusing_hooks

Loss = Callable[..., torch.Tensor] | None
Tensors = tuple[torch.Tensor, ...]


def example_seed() -> torch.Tensor:
    """The seed among example inputs."""
    return torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class ImportedLoss:
    """`module` gives the loss, then the new values of `buffers`, its inputs after the batch; these by name. `loss` is
    torch's on the example inputs, for which gradients can be taken. `seeded`: some of the model drops; the module takes
    a seed after the buffers, and `loss` is that for `example_seed`. `program`: what the module was imported from."""

    module: ImportedModule
    buffers: dict[str, torch.Tensor]
    loss: torch.Tensor | None = None
    seeded: bool = False
    program: torch.export.ExportedProgram | None = None

    @property
    def given(self) -> Tensors:
        """The inputs after the batch."""
        return (*self.buffers.values(), *([example_seed()] if self.seeded else []))


@contextmanager
def imported_loss(model: Any, loss: Loss, inputs: Tensors, gradients: bool = True) -> Iterator[ImportedLoss]:
    """The module of a model and its loss; while it is used, the model's buffers are as one step leaves them, and
    afterwards as they were. `gradients`: these can be taken of torch's loss, for which activations are held. Refused
    where the model is none of torch's, there are no inputs, or it can't be imported."""
    if not isinstance(model, nn.Module):
        refuse(
            f"training_step takes a torch model, not a {type(model).__name__}",
            fix="pass a torch.nn.Module, or what from_torch gave",
        )
    refuse_hooks(model, loss)
    if not (loss is None or callable(loss)):
        refuse(
            f"loss={shown(loss)} is no function",
            where="training_step",
            fix="pass a function of the model's result and the target, such as torch.nn.functional.mse_loss, or None "
            "where the model gives its loss",
        )
    if strange := [shown(given) for given in inputs if not isinstance(given, torch.Tensor)]:
        refuse(
            f"example inputs that are no tensors: {', '.join(strange)}",
            where="training_step",
            fix="pass a tuple of tensors, the target last",
        )
    named = (*model.named_parameters(), *model.named_buffers(), *((f"input {n}", t) for n, t in enumerate(inputs)))
    if unrecorded := [name for name, tensor in named if tensor.is_inference()]:
        refuse(
            f"{listing(unrecorded)} made in torch.inference_mode",
            where="training_step",
            why="torch records no gradients with it",
            fix="make the model and its inputs outside of it",
        )
    if not inputs:
        refuse("training_step without inputs", fix="pass example inputs, of the sizes that are trained with")
    with buffers_kept(model) as before:
        with torch.set_grad_enabled(gradients), refusing_hooks():
            value = _value(model, loss, inputs)
        if not isinstance(value, torch.Tensor):
            refuse(
                f"the loss is a {type(value).__name__}, not a tensor",
                where="training_step",
                fix="return one number alone, as the mean over the batch",
            )
        refuse_functions(value)
        written = {name: kept for name, (buffer, kept) in before.items() if not torch.equal(buffer, kept)}
        if gradients:  # torch.cond records none where nothing is compiled
            _put_back(before)
            with torch.enable_grad():
                value = _value(model, loss, inputs)
        yield _imported(model, loss, inputs, written, value)


def _value(model: nn.Module, loss: Loss, inputs: Tensors) -> torch.Tensor:
    try:
        return model(*inputs) if loss is None else loss(model(*inputs[:-1]), inputs[-1])
    except Exception as error:  # whatever the model's own code raises
        refuse(
            f"the model, or its loss, raises on inputs of {' and '.join(str(tuple(one.shape)) for one in inputs)}",
            where="training_step",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            fix="pass inputs that it takes, the target last; with accumulate=, it has to take a microbatch",
        )


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The model's buffers, by name, with copies; afterwards they are as they were."""
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    try:
        yield before
    finally:
        _put_back(before)


def _put_back(before: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, kept in before.values():
            if not torch.equal(buffer, kept):  # torch counts what is written, even with the same
                buffer.copy_(kept)


class WithLoss(nn.Module):
    """A model and its loss as one module, whose parameters have the model's own names. It takes the batch, then values
    for `buffers`; it gives the loss, then what becomes of these."""

    def __init__(self, model: nn.Module, loss: Loss, buffers: list[str]) -> None:
        super().__init__()
        self.training = model.training
        self.__dict__["_parameters"], self.__dict__["_buffers"] = model._parameters, model._buffers
        self.__dict__["_modules"] = model._modules
        self.__dict__["_of"] = model, loss, buffers

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The loss, and the buffers."""
        model, loss, names = self.__dict__["_of"]
        batch = inputs[: len(inputs) - len(names)]
        given, target = (batch, ()) if loss is None else (batch[:-1], batch[-1:])
        values = {name: value.clone() for name, value in zip(names, inputs[len(batch) :], strict=True)}
        made = torch.func.functional_call(model, values, given) if names else model(*given)
        result = made if loss is None else loss(made, *target)
        return (result, *values.values()) if names else result


def _imported(
    model: nn.Module, loss: Loss, inputs: Tensors, written: dict[str, torch.Tensor], value: torch.Tensor
) -> ImportedLoss:
    given = (*inputs, *written.values())
    # Torch takes inputs that are one tensor for one input, which later batches (what is read, its target) are not.
    recorded = tuple(one.clone() if any(one is other for other in given[:n]) else one for n, one in enumerate(given))
    try:
        program = torch.export.export(WithLoss(model, loss, list(written)), recorded, strict=False)
        program = under_autocast(counted(program))
    except MeshTensorError:
        raise
    except Exception as error:  # whatever torch, or the model's own code, raises while it is recorded
        refuse(
            "torch.export can't record the model with its loss",
            why=str(error).strip().partition("\n")[0],
            fix="write both without sizes or branches that depend on data (as F.gaussian_nll_loss and F.ctc_loss have)",
        )
    seeded = has_seed(program)
    if seeded:
        value = loss_of(program, model, (*given, example_seed()))
    module = from_torch(program)
    names: Any = list(signature(model.forward).parameters)[: len(inputs)]
    names += [f"input_{n}" for n in range(len(names), len(inputs))]
    if loss is not None:
        names[len(inputs) - 1] = "target"
    count = len(given)
    taken = [param.name_hint for param in module.mod["main"].params[count:]]
    fresh = Fresh([*taken, NUMBERS_NAME, LOSS_SCALE_NAME, SEED_NAME])
    names = [fresh.name(name) for name in names]
    ours = identifiers(list(written), [*taken, *names])
    module = _renamed(module, [*names, *ours.values()])
    module = replace(module, names={**module.names, **ours})
    return ImportedLoss(module, {ours[name]: kept for name, kept in written.items()}, value, seeded, program)


def check_names(module: ImportedModule, slots: Sequence[str], counts: Collection[str]) -> None:
    """Refuse a module with names that a step has for what it keeps: per parameter `slots`, and the numbers `counts`."""
    own, theirs = {NUMBERS_NAME, LOSS_SCALE_NAME}, {ours: name for name, ours in reversed(module.names.items())}
    names = [param.name_hint for param in module.mod["main"].params]
    clashes = [name for name in names if name in own or (name == SEED_NAME and name in module.params)]
    kept = {*counts, *(f"opt.{slot}.{name}" for slot in slots for name in module.names)}
    problems = [f"{theirs.get(name, name)!r} is called as something of the step's own" for name in clashes]
    problems += [f"{name!r} is called as something that the step keeps" for name in module.names if name in kept]
    if problems:
        refuse(problems, where="training_step", fix="give it another name in the model")


def loss_of(program: torch.export.ExportedProgram, model: nn.Module, given: Tensors) -> torch.Tensor:
    """What a program gives first, of the model's own parameters, so that gradients can be taken."""
    values = {**program.state_dict, **program.constants, **dict(model.named_parameters(remove_duplicate=False))}
    with torch.enable_grad():
        return interpreted(program, values, given)[0]


def _renamed(module: ImportedModule, names: list[str]) -> ImportedModule:
    """The module, whose first parameters have these names."""
    mod, func = module.mod.clone(), module.mod["main"]
    old = [param.name_hint for param in func.params[: len(names)]]
    mod.update_func(mod.get_global_var("main"), renamed_parameters(mod, func, dict(zip(old, names, strict=True))))
    return replace(module, mod=mod)


@dataclass(frozen=True, eq=False)
class Parts:
    """`count` microbatches; `first`: the inputs of one, of a model of torch; `rows`: per input whether it has rows;
    `whole`: the module of a whole batch, of such a model."""

    count: int
    first: tuple[torch.Tensor, ...]
    rows: tuple[bool, ...]
    whole: ir.IRModule | None = None

    def named(self, mod: ir.IRModule, per_microbatch: Sequence[str], written: int) -> Microbatches:
        """By the names that the inputs have as the first parameters of `main`; values of `per_microbatch` are those of
        each, and so are the last results, the new values of as many parameters that are `written`."""
        names = [param.name_hint for param in mod["main"].params[: len(self.rows)]]
        inputs = tuple(n for n, has in zip(names, self.rows, strict=True) if has)
        flow = Flow(mod, "main")
        stated = stated_bindings(flow, per_microbatch)
        by_itself = frozenset(flow.above([*stated, *flow.results[1:][:written]])) if stated else frozenset()
        return Microbatches(self.count, inputs, self.whole, tuple(stated), by_itself)


def _check_count(count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        refuse(f"accumulate={shown(count)}", fix="use a number of microbatches, from 1 on")


def microbatches_of(inputs: tuple[torch.Tensor, ...], count: int) -> Parts:
    """The inputs in `count` parts: those as long as the first one are taken apart, all others are the same for all."""
    _check_count(count)
    sizes = [tensor.shape[0] if tensor.ndim else None for tensor in inputs]
    batch = next((size for size in sizes if size is not None), None)
    if batch is None or batch % count:
        refuse(
            f"accumulate={count}, but a batch of {batch} rows",
            why="microbatches are equally large",
            fix="use a divisor of the number of rows",
        )
    rows = tuple(size == batch for size in sizes)
    first = tuple(t[::count].contiguous() if has else t for t, has in zip(inputs, rows, strict=True))
    return Parts(count, first, rows)


def microbatches_of_module(module: ImportedModule, count: int) -> Parts:
    """`count` microbatches, each of the size that the module was imported with. Inputs as long as the first one have
    rows, all others are the same for all."""
    _check_count(count)
    params = module.mod["main"].params
    shapes = [tuple(param.struct_info.shape or ()) for param in params if param.name_hint not in module.params]
    rows = next((shape[0] for shape in shapes if shape), None)
    if not hasattr(rows, "value"):
        refuse(
            f"accumulate={count} of a module whose inputs have {'no rows' if rows is None else f'{rows} rows'}",
            fix="import it for one microbatch, of known size",
        )
    has_rows = tuple(bool(shape) and hasattr(shape[0], "value") and shape[0] == rows for shape in shapes)
    return Parts(count, (), has_rows)
