"""`mesh.vjp`: gradients of an operator's operands, by torch's own differentiation of the operator's torch function."""

from __future__ import annotations

import torch
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.vjp import VJP, Vjp, vjp_of

from ..dtypes import torch_dtype
from .table import Function, Place, placed_torch_op, torch_function

Tensor = torch.Tensor


@placed_torch_op(VJP)
def _vjp(call: OpCall, place: Place) -> Function:
    """(given operands, gradients of results): the gradients of the operands that are wanted. What nothing depends on is
    zero."""
    stated = vjp_of(call)
    forward = _forward(stated, place)
    types = [(tensor.shape, torch_dtype(tensor.dtype)) for tensor in stated.operands]
    count = len(stated.given)

    def vjp(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            operands = _operands(stated, types, tensors[:count], tensors[0].device)
            results = forward(operands)
            ends = [(results[i], seed) for i, seed in zip(stated.seeds, tensors[count:], strict=True)]
            ends = [(y, seed.to(y.dtype).reshape(y.shape)) for y, seed in ends if y.requires_grad]
            wanted = [operands[i] for i in stated.wrt]
            if not ends:
                return tuple(torch.zeros_like(x) for x in wanted)
            made = torch.autograd.grad([y for y, _ in ends], wanted, [seed for _, seed in ends], allow_unused=True)
        return tuple(torch.zeros_like(x) if dx is None else dx for x, dx in zip(wanted, made, strict=True))

    return vjp


def _operands(
    stated: Vjp, types: list[tuple[tuple[int, ...], torch.dtype]], given: tuple[Tensor, ...], device: torch.device
) -> list[Tensor]:
    """All operands, those that are wanted as leaves. What is not given is zero, as nothing depends on it."""
    there = dict(zip(stated.given, given, strict=True))
    operands = []
    for number, (shape, dtype) in enumerate(types):
        if number in there:
            tensor = there[number].detach().to(dtype)
        else:
            tensor = torch.zeros((), dtype=dtype, device=device).expand(shape)
        operands.append(tensor.requires_grad_() if number in stated.wrt else tensor)
    return operands


def _forward(stated: Vjp, place: Place) -> Function:
    """The operator, of its operands."""
    steps = [
        (torch_function(call, place.mesh, place.rank), [_source(operand) for operand in operands])
        for call, operands in stated.calls
    ]

    def forward(operands: list[Tensor]) -> tuple[Tensor, ...]:
        known = list(operands)
        results: tuple[Tensor, ...] = ()
        for function, sources in steps:
            results = function(*[known[s] if isinstance(s, int) else s for s in sources])
            known += results
        return results

    return forward


def _source(operand: int | relax.Constant) -> int | Tensor:
    if isinstance(operand, int):
        return operand
    if not isinstance(operand, relax.Constant):
        refuse(f"{operand} is no operand of mesh.vjp")
    return torch.from_numpy(operand.data.numpy().copy())
