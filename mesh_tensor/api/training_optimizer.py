"""What a step of training starts from: the parameters that it trains, what is kept of them; an optimizer as a function
of torch tensors; and LossScale: what the loss is multiplied with before gradients are taken, so that small ones
survive in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from tvm import ir, relax

from mesh_tensor.annotations.names import source_names
from mesh_tensor.base.errors import MeshTensorError, listing, refuse, shown
from mesh_tensor.base.optimizer import MASTER, OPTIMIZERS, Optimizer, is_number
from mesh_tensor.importers import ImportedModule
from mesh_tensor.importers.constants import Copy
from mesh_tensor.importers.torch_frontend import from_torch
from mesh_tensor.plan.training import AnyOptimizer, Kept, WrittenOptimizer
from mesh_tensor.targets.dtypes import torch_dtype

from .training_import import ImportedLoss


def trained(module: ImportedModule) -> list[str]:
    """The parameters that are trained, by name: those that require a gradient."""
    kept = {*module.state, *module.buffers, *module.frozen}
    names = [n for n, tensor in module.params.items() if tensor.is_floating_point() and n not in kept]
    if not names:
        refuse("the model has no parameter to train", fix="some parameter has to require a gradient")
    return names


def first_state(found: ImportedLoss, kept: Sequence[Kept]) -> dict[str, torch.Tensor]:
    """What steps change, before the first one: parameters, buffers, and what optimizers keep of these."""
    state = {mine.parameter: found.module.params[mine.parameter] for mine in kept} | found.buffers
    for mine in kept:
        state |= {name: _first(slot, state[mine.parameter]) for slot, name in mine.slots.items()}
    return state


def masters(module: ImportedModule, kept: Sequence[Kept], state: Mapping[str, torch.Tensor]) -> dict[str, Copy]:
    """By the parameter's name in torch: the wide copy that is trained in its place."""
    theirs = {ours: name for name, ours in module.names.items()}
    wide = {mine.parameter: mine.slots[MASTER] for mine in kept if MASTER in mine.slots}
    return {theirs.get(name, name): Copy.of(state[name], state[master]) for name, master in wide.items()}


def names_held(module: ImportedModule, mod: ir.IRModule, held: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The names of what is held, by torch's name for it, or else its own."""
    every = {**module.names, **source_names(mod["main"])}
    names = {theirs: ours for theirs, ours in every.items() if ours in held}
    called = set(names.values())
    return names | {ours: ours for ours in held if ours not in called}


def _first(slot: str, parameter: torch.Tensor) -> torch.Tensor:
    wide = parameter.detach().to(torch.float32 if parameter.element_size() < 4 else parameter.dtype)
    return wide.clone() if slot == MASTER else torch.zeros_like(wide)


Rule = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
_POSITIONAL = ("parameter", "gradient", "lr", "step")


def any_optimizer(given: str | Rule, options: Mapping[str, Any]) -> AnyOptimizer:
    """The optimizer of that name, or that a function is."""
    if isinstance(given, str):
        return Optimizer.make(given, **options)
    kind = given if isinstance(given, type) else type(given)
    if issubclass(kind, torch.optim.Optimizer):
        like = [name for name in OPTIMIZERS if name == kind.__name__.lower()]
        refuse(
            f"optimizer={kind.__name__} of torch.optim",
            why="a step has an optimizer's formula in it, and what it keeps lies on the mesh",
            fix=f"name it, with its options beside: optimizer={(like or ['adamw'])[0]!r}, lr=1e-3 "
            f"(known: {listing(list(OPTIMIZERS))}); or pass a function",
        )
    if not callable(given):
        refuse(f"optimizer={shown(given)}", fix="use the name of an optimizer, or a function")
    unknown = [name for name in options if name != "lr"]
    if unknown:
        refuse(
            f"an optimizer that is a function has no options {listing(unknown)}", fix="pass lr alone, or bind the rest"
        )
    name, slots = getattr(given, "__name__", "function"), _slots(given)

    def function(shape: tuple[int, ...], dtype: str) -> relax.Function:
        return _imported(given, name, slots, shape, torch_dtype(dtype))

    lr = options.get("lr", 1e-3)
    if not is_number(lr):
        refuse(f"an optimizer with lr={shown(lr)}", fix="use a number from 0 on")
    return WrittenOptimizer(name, slots, function, {"lr": float(lr)})


def _slots(rule: Rule) -> tuple[str, ...]:
    """What it keeps per parameter: its keyword-only parameters."""
    params = list(signature(rule).parameters.values())
    first = [p.name for p in params if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    rest = [p.name for p in params if p.kind is Parameter.KEYWORD_ONLY]
    if len(first) != len(_POSITIONAL) or len(first) + len(rest) != len(params):
        refuse(
            f"an optimizer that takes {listing([p.name for p in params])}",
            fix="def rule(parameter, gradient, lr, step, *, average): ...; return new_parameter, {'average': ...}: "
            "what comes after the asterisk is kept per parameter, and zero at first",
        )
    if MASTER in rest:
        refuse(
            f"an optimizer that keeps {MASTER!r}",
            why="that is what the value in float32 of a parameter in 16 bits is called",
            fix="give what it keeps another name",
        )
    return tuple(rest)


class _Step(nn.Module):
    """The rule of tensors in order."""

    def __init__(self, rule: Rule, slots: tuple[str, ...]) -> None:
        super().__init__()
        self._rule, self._slots = rule, slots

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The new parameter, the new slots. The rule may write what it is given."""
        given = [tensor.clone() for tensor in tensors]
        found = self._rule(*given[:4], **dict(zip(self._slots, given[4:], strict=True)))
        if not isinstance(found, tuple) or len(found) != 2 or set(found[1]) != set(self._slots):
            refuse(
                f"the optimizer gives {shown(found)}",
                fix=f"return (new parameter, {{{', '.join(f'{slot!r}: ...' for slot in self._slots)}}})",
            )
        return found[0], *(found[1][slot] for slot in self._slots)


def _imported(rule: Rule, name: str, slots: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The rule for a parameter of that type, as a function of a module."""
    parameter, gradient = torch.rand(shape, dtype=dtype), torch.rand(shape, dtype=dtype)
    kept = [torch.rand(shape, dtype=dtype) for _ in slots]
    numbers = torch.tensor(1e-3), torch.tensor(1.0)
    module = from_torch(_exported(rule, name, slots, (parameter, gradient, *numbers, *kept)))
    function = module.mod["main"]
    if len(function.params) != 4 + len(slots):
        refuse(
            "it drops what follows from a seed",
            where=f"optimizer {name!r}",
            fix="make random numbers before the step, and pass them with the batch",
        )
    fields = getattr(function.struct_info.ret, "fields", [function.struct_info.ret])
    found = [(tuple(map(int, field.shape)), torch_dtype(field.dtype)) for field in fields]
    if module.params or found != [(shape, dtype)] * (1 + len(slots)):
        refuse(
            f"for a parameter {shape} {dtype} the optimizer gives {found}"
            + (f", and brings tensors {listing(list(module.params))}" if module.params else ""),
            where=f"optimizer {name!r}",
            fix="what it gives has the parameter's shape and dtype; numbers of its own are Python's",
        )
    if not isinstance(function.struct_info.ret, relax.TupleStructInfo):
        function = _as_tuple(function)
    return function.without_attr("global_symbol")


def _exported(rule: Rule, name: str, slots: tuple[str, ...], given: Any) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(_Step(rule, slots), given, strict=False)
    except MeshTensorError:
        raise
    except Exception as error:  # whatever torch, or the rule's own code, raises while it is recorded
        return refuse(
            "torch.export can't record the optimizer",
            where=f"optimizer {name!r}",
            why=str(error).strip().partition("\n")[0],
            fix="write it without branches on values: torch.where(step > 1, ..., ...); lr and step are tensors",
        )


def _as_tuple(function: relax.Function) -> relax.Function:
    builder = relax.BlockBuilder()
    body, result = function.body, relax.TupleStructInfo([function.struct_info.ret])
    inner = relax.SeqExpr(body.blocks, relax.Tuple([body.body]))
    return builder.normalize(relax.Function(function.params, inner, result, function.is_pure, function.attrs))


STEP, LOSS_SCALE, GOOD_STEPS = "opt.step", "opt.loss_scale", "opt.loss_scale_steps"
COUNTS = (STEP, LOSS_SCALE, GOOD_STEPS)  # what of a run's state is a number
_FIRST, _LARGEST, _INTERVAL = 2.0**16, 2.0**24, 2000  # torch.amp.GradScaler's first scale and interval


@dataclass(frozen=True)
class LossScale:
    """A scale; a dynamic one is halved by a step whose gradients overflow, which is left out, and doubled after every
    `interval` steps that do not.

    good   steps without an overflow since it was changed

    >>> LossScale.make("dynamic").after_overflow().value
    32768.0
    """

    value: float
    dynamic: bool = False
    good: int = 0
    interval: int = _INTERVAL

    @staticmethod
    def make(given: object) -> LossScale | None:
        """What `loss_scale=` says: None, a number above 0, or "dynamic"."""
        if given is None:
            return None
        if given == "dynamic":
            return LossScale(_FIRST, dynamic=True)
        if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < float("inf"):
            return LossScale(float(given))
        return refuse(f"loss_scale={shown(given)}", fix='use "dynamic", a number above 0, or None')

    def state(self) -> dict[str, torch.Tensor]:
        """What of it a run keeps."""
        if not self.dynamic:
            return {}
        return {LOSS_SCALE: torch.tensor(self.value, dtype=torch.float64), GOOD_STEPS: torch.tensor(self.good)}

    def loaded(self, state: Mapping[str, Any]) -> LossScale:
        """This one as a run's state has it, if that has one."""
        if not self.dynamic or not {LOSS_SCALE, GOOD_STEPS} <= state.keys():
            return self
        return replace(self, value=float(state[LOSS_SCALE]) or 1.0, good=int(state[GOOD_STEPS]))

    @property
    def can_fall(self) -> bool:
        """Whether a smaller one is to be tried."""
        return self.dynamic and self.value > 1.0

    def after_overflow(self) -> LossScale:
        """The scale of the next step, after one that was left out."""
        return replace(self, value=max(1.0, self.value / 2), good=0)

    def after_step(self) -> LossScale:
        """The scale of the next step, after one that was taken."""
        if not self.dynamic:
            return self
        if self.good + 1 < self.interval:
            return replace(self, good=self.good + 1)
        return replace(self, value=min(_LARGEST, self.value * 2), good=0)
