"""Whether a module's gradients are those of the torch model that it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mesh_tensor.base.errors import refuse
from mesh_tensor.importers import ImportedModule
from mesh_tensor.importers.torch_dropout import kept_whole
from mesh_tensor.plan.gradient import gradient_function
from mesh_tensor.rules.operator.dropout import without_dropout
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.sequential import run_sequential
from mesh_tensor.targets.dtypes import torch_dtype

from .training_import import WithLoss

_TOLERANCE = 1e-3  # of the largest element of all gradients, or of the loss
_NARROW_TOLERANCE = 5e-2  # of a loss in 16 bits


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


@undisturbed
def check_loss(
    model: nn.Module,
    loss: Any,
    inputs: Sequence[torch.Tensor],
    mod: Any,
    state: Mapping[str, torch.Tensor],
    drops: bool,
) -> None:
    """Refuse a step whose loss on the inputs, which are a whole batch, is not torch's: numbers of Python's in the loss,
    as a size that it divides by, are those of a microbatch. Where the model `drops`, both are taken without that."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad():
        if drops:
            program = torch.export.export(WithLoss(model, loss, []), tuple(inputs), strict=False)
            expected = kept_whole(program).module()(*inputs)
            mod = without_dropout(mod, "main")
        else:
            expected = model(*inputs) if loss is None else loss(model(*inputs[:-1]), inputs[-1])
        for buffer, kept in buffers:
            buffer.copy_(kept)
    params = mod["main"].params
    given = {p.name_hint: tensor for p, tensor in zip(params, inputs, strict=False)} | dict(state)
    given |= {
        p.name_hint: torch.ones([int(size) for size in p.struct_info.shape], dtype=torch_dtype(p.struct_info.dtype))
        for p in params
        if p.name_hint not in given
    }
    found, *_ = run_sequential(mod, given)
    tolerance = _TOLERANCE if expected.itemsize > 2 else _NARROW_TOLERANCE
    if not abs(float(found) - float(expected)) <= tolerance * abs(float(expected)):
        refuse(
            f"the loss of the batch in microbatches is {float(found):.6g}, but {float(expected):.6g} in torch",
            where="the training step, on its example inputs",
            why="the loss, or the model, looks at the size of the batch",
            fix="write it as a mean over rows, as the mean of a tensor, or leave accumulate out",
        )


def _named(mod: Any, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    params = mod["main"].params
    return {param.name_hint: tensor for param, tensor in zip(params, inputs, strict=False)}
