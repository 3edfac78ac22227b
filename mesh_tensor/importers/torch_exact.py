"""What a program computes in torch, also in float64: that tells rounding from what is another result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree


def interpreted(
    program: torch.export.ExportedProgram, values: Mapping[str, Any], given: Sequence[Any], *, exact: bool = False
) -> Any:
    """What the program's graph gives for the inputs `given`, its weights and constants being `values`, by name.
    `exact`: every conversion to floats is one to float64."""
    inputs = iter(given)
    taken = [
        next(inputs) if spec.kind == InputKind.USER_INPUT else values[str(spec.target)]
        for spec in program.graph_signature.input_specs
    ]
    return (_InFloat64 if exact else torch.fx.Interpreter)(program.graph_module).run(*taken)


def results_in_float64(program: torch.export.ExportedProgram, given: Sequence[Any]) -> list[torch.Tensor]:
    """The results for these inputs, in float64, of a program that writes nothing; none of them, where parts of it need
    their own dtypes."""
    values = {name: in_float64(value) for name, value in {**program.state_dict, **program.constants}.items()}
    try:
        with torch.no_grad():
            made = interpreted(program, values, [in_float64(value) for value in given], exact=True)
    except (RuntimeError, TypeError):
        return []
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def in_float64(value: Any) -> Any:
    """A copy of a tensor of floats in float64, of complex numbers so, too; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64, copy=True)


class _InFloat64(torch.fx.Interpreter):
    """Takes every conversion to floats as one to float64, those of autocast among them."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.wrap_with_autocast:
            _device, _dtype, _enabled, _cached, graph, *operands = args
            return _InFloat64(graph).run(*operands)
        args, kwargs = pytree.tree_map(_wide, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _wide(arg: Any) -> Any:
    """float64, or complex numbers of two, in place of a dtype of floats."""
    if not isinstance(arg, torch.dtype) or not (arg.is_floating_point or arg.is_complex):
        return arg
    return torch.complex128 if arg.is_complex else torch.float64
