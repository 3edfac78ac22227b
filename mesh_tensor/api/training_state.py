"""What a step of training starts from: the parameters that it trains, what is kept of them, and how that is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tvm import ir

from mesh_tensor.annotations.names import source_names
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.optimizer import MASTER
from mesh_tensor.importers import ImportedModule
from mesh_tensor.importers.constants import Copy
from mesh_tensor.plan.training import Kept

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
    """A slot before the first step."""
    wide = parameter.detach().to(torch.float32 if parameter.element_size() < 4 else parameter.dtype)
    return wide.clone() if slot == MASTER else torch.zeros_like(wide)
