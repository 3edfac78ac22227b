"""Whether a module's gradients are those of the torch model that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mesh_tensor.base.errors import refuse
from mesh_tensor.importers import ImportedModule
from mesh_tensor.plan.gradient import gradient_function
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.sequential import run_sequential

_TOLERANCE = 1e-3  # of the largest element of all gradients


@undisturbed
def check_gradients(
    model: nn.Module, inputs: Sequence[torch.Tensor], loss: Any, module: ImportedModule, trained: Sequence[str]
) -> None:
    """Refuse a module whose gradients on the inputs are not torch's. `loss` is the model's loss for them, in torch.

    What is compared with is the scale of all gradients: those that are zero but for rounding say nothing by themselves.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    theirs = {module.names[name]: parameter for name, parameter in by_name.items() if name in module.names}
    expected = torch.autograd.grad(loss, [theirs[name] for name in trained], allow_unused=True)
    made = gradient_function(module.mod, "main", trained)
    _, found = run_sequential(made, {**_named(made, inputs), **module.params})
    sizes = [float(gradient.abs().max()) for gradient in expected if gradient is not None and gradient.numel()]
    scale = max(sizes, default=0.0)
    problems = []
    for name, ours, wanted in zip(trained, found, expected, strict=True):
        wanted = torch.zeros_like(ours) if wanted is None else wanted
        off = float((ours.double() - wanted.double()).abs().max()) if ours.numel() else 0.0
        if not off <= _TOLERANCE * scale:
            problems.append(f"the gradient of {name!r} differs by {off:.2g}, where the largest of all is {scale:.2g}")
    if problems:
        refuse(
            problems,
            where="the training step, on its example inputs",
            why="torch's gradients are others, or not finite",
            fix="train in float32; write the model with other operators; check=False leaves this out",
        )


def _named(mod: Any, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    params = mod["main"].params
    return {param.name_hint: tensor for param, tensor in zip(params, inputs, strict=False)}
