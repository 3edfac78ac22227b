"""Whether a training step computes what torch does, on its example inputs: its gradients, and the loss of a batch in
microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mesh_tensor.base.errors import refuse
from mesh_tensor.importers.imported import MORE_ROUNDING
from mesh_tensor.importers.torch_dropout import kept_whole
from mesh_tensor.importers.torch_exact import in_float64, interpreted
from mesh_tensor.importers.torch_program import dtypes_inside
from mesh_tensor.plan.gradient import gradient_function
from mesh_tensor.rules.operator.dropout import without_dropout
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.sequential import run_sequential
from mesh_tensor.targets.dtypes import as_floats, torch_dtype

from .training_import import ImportedLoss, Tensors, WithLoss, buffers_kept, loss_of

_TOLERANCE = 1e-3  # of the largest element of a gradient, or of the loss
_NARROW_TOLERANCE = 5e-2  # in 16 bits
_ROUNDING, _NARROW_ROUNDING = 1e-6, 2e-3  # of the largest element of all gradients


@undisturbed
def check_gradients(model: nn.Module, found: ImportedLoss, inputs: Tensors, trained: list[str]) -> None:
    """Refuse a module whose gradients on the inputs are not torch's.

    Each is compared on its own scale. One that is further off may be zero but for rounding, what is left of larger
    numbers: it must not be further off than a few times what torch's own is from that in float64, and little on the
    scale of all gradients. One in float32 may be as far off as those in 16 bits where what the program computes in
    these has a part in it: where torch's own is no nearer to that in float64.
    """
    module, loss, program = found.module, found.loss, found.program
    assert loss is not None
    assert program is not None
    by_name = dict(model.named_parameters(remove_duplicate=False))
    theirs = {module.names[name]: parameter for name, parameter in by_name.items() if name in module.names}
    wanted = [theirs[name] for name in trained]
    expected = torch.autograd.grad(loss, wanted, allow_unused=True)
    made = gradient_function(module.mod, "main", trained)
    _, ours = run_sequential(made, {**_named(made, inputs), **module.params})
    gradients = [torch.zeros_like(g) if e is None else e for g, e in zip(ours, expected, strict=True)]
    off, sizes = [_largest(g, e) for g, e in zip(ours, gradients, strict=True)], [_largest(e) for e in gradients]
    is_narrow = any(dtype.is_floating_point and dtype.itemsize <= 2 for dtype in dtypes_inside(program))
    tolerances = [_TOLERANCE if e.itemsize > 2 else _NARROW_TOLERANCE for e in gradients]
    is_near = [o <= t * size for o, t, size in zip(off, tolerances, sizes, strict=True)]
    rounded = _rounded(program, model, inputs, wanted) if not all(is_near) else []
    scale = max(sizes, default=0.0)
    problems = []
    for n, name in enumerate(trained if rounded else ()):
        if is_narrow and MORE_ROUNDING * rounded[n] >= _TOLERANCE * sizes[n]:
            tolerances[n] = _NARROW_TOLERANCE
        least = (_ROUNDING if tolerances[n] == _TOLERANCE else _NARROW_ROUNDING) * scale
        allowed = min(tolerances[n] * scale, max(MORE_ROUNDING * rounded[n], least))
        if not (is_near[n] or off[n] <= tolerances[n] * sizes[n] or off[n] <= allowed):
            size = f"its largest element is {sizes[n]:.2g}, and that of all {scale:.2g}"
            problems.append(f"the gradient of {name!r} differs by {off[n]:.2g}, where {size}")
    if problems:
        refuse(
            problems,
            where="the training step, on its example inputs",
            why="torch's gradients are others, or not finite",
            fix="train in float32; write the model with other operators; check=False leaves this out",
        )


def _largest(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """The largest absolute value, or difference; of complex numbers, of either part."""
    if not tensor.numel():
        return 0.0
    mine = as_floats(tensor).double()
    return float((mine if other is None else mine - as_floats(other).double()).abs().max())


@undisturbed
def check_loss(
    model: nn.Module,
    loss: Any,
    inputs: Sequence[torch.Tensor],
    mod: Any,
    state: Mapping[str, torch.Tensor],
    drops: bool,
) -> None:
    """Refuse a step whose loss on the inputs, which are a whole batch, is not torch's. Where the model `drops`, both
    are taken without that."""
    with torch.no_grad(), buffers_kept(model):
        if drops:
            program = torch.export.export(WithLoss(model, loss, []), tuple(t.view_as(t) for t in inputs), strict=False)
            expected = kept_whole(program).module()(*inputs)
            mod = without_dropout(mod, "main")
        else:
            expected = model(*inputs) if loss is None else loss(model(*inputs[:-1]), inputs[-1])
    params, given = mod["main"].params, _named(mod, inputs) | dict(state)
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
    return {param.name_hint: as_floats(tensor) for param, tensor in zip(params, inputs, strict=False)}


def _rounded(
    program: torch.export.ExportedProgram, model: nn.Module, inputs: Tensors, wanted: Sequence[nn.Parameter]
) -> list[float]:
    """By how much a program's gradients in torch differ from those in float64; infinite, where there are none."""

    copies = {parameter: in_float64(parameter).requires_grad_() for parameter in wanted}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {name: in_float64(value) for name, value in {**program.state_dict, **program.constants}.items()}
    values |= {name: copies[p] if p in copies else in_float64(p) for name, p in parameters.items()}
    made = torch.autograd.grad(loss_of(program, model, inputs), wanted, allow_unused=True)
    try:
        with torch.enable_grad():
            loss = interpreted(program, values, [in_float64(tensor) for tensor in inputs], exact=True)[0]
        exact = torch.autograd.grad(loss, list(copies.values()), allow_unused=True)
    except (RuntimeError, TypeError):  # parts of it need their own dtypes
        return [math.inf] * len(wanted)
    pairs = zip(made, exact, strict=True)
    return [0.0 if mine is None or wider is None else _largest(mine, wider) for mine, wider in pairs]
