"""Operators whose results are as large as the data says. Where a module says how large they are (R.match_cast; the
operators are those of `mesh.` then), data that says otherwise is refused when it is met."""

from __future__ import annotations

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import OpCall

from .table import Function, torch_op

Tensor = torch.Tensor


@torch_op("nonzero", "mesh.nonzero")
def _nonzero(call: OpCall) -> Function:
    return _as_said(call, lambda x: x.nonzero().t().contiguous())


@torch_op("dynamic_strided_slice", "mesh.dynamic_strided_slice")
def _dynamic_strided_slice(call: OpCall) -> Function:
    def cut(x: Tensor, begin: Tensor, end: Tensor, strides: Tensor) -> Tensor:
        for dim, one in enumerate(zip(begin.tolist(), end.tolist(), strides.tolist(), strict=True)):
            places = range(*slice(*one).indices(x.shape[dim]))
            x = x.index_select(dim, torch.tensor(list(places), dtype=torch.int64, device=x.device))
        return x

    return _as_said(call, cut)


@torch_op("unique", "mesh.unique")
def _unique(call: OpCall) -> Function:
    """Values in ascending order, then what else is asked for, in Relax's order; the first of equals counts."""
    _, first, inverse, counts, axis = [None if kind == "" else kind for kind in _numbers(call)]

    def unique(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        flat = x.reshape(-1) if axis is None else x
        dim = 0 if axis is None else int(axis) % x.ndim
        values, places, numbers = torch.unique(flat, sorted=True, return_inverse=True, return_counts=True, dim=dim)
        every = torch.arange(flat.shape[dim], device=x.device)
        least = torch.full_like(numbers, flat.shape[dim]).scatter_reduce(0, places, every, "amin")
        asked = [(first, least), (inverse, places), (counts, numbers)]
        made = (values, *(one for wanted, one in asked if wanted))
        return made if len(made) > 1 else values

    return _as_said(call, unique)


def _numbers(call: OpCall) -> tuple:
    """sorted, return_index, return_inverse, return_counts, and the axis, if there is one."""
    literals = tuple(call.literals)[call.operator.startswith("mesh.") :]  # without the function's name
    return (*literals, *("",) * (5 - len(literals)))


def _as_said(call: OpCall, function: Function) -> Function:
    """The function, whose results have to be as large as is said of them, if anything is."""
    said = [out.shape for out in call.outputs]

    def checked(*operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = function(*operands)
        results = made if isinstance(made, tuple) else (made,)
        found = [tuple(result.shape) for result in results]
        if said and found != said:
            name = call.operator.removeprefix("mesh.")
            facts = [", ".join(map(str, shapes)) for shapes in (found, said)]
            refuse(
                f"R.{name} gives {facts[0]}, but the module says {facts[1]}",
                why="the data says how large the result is, and the module was laid out for what R.match_cast says",
                fix="call it with such data, or state another size",
            )
        return made

    return checked
