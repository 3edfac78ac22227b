"""`mesh.vjp`: gradients of an operator's operands, by torch's own differentiation of the operator's torch function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.vjp import VJP, Vjp, vjp_of

from ..dtypes import torch_dtype
from .table import Function, Place, placed_torch_op, torch_function

Tensor = torch.Tensor
Derivative = Callable[[Tensor, Tensor], Tensor]
_aten = torch.ops.aten

# Of operators of one operand, by the gradient of the result and the operand: without what the operator itself gives.
_DIRECT: dict[str, Derivative] = {
    "nn.gelu": _aten.gelu_backward,
    "nn.gelu_tanh": lambda seed, x: _aten.gelu_backward(seed, x, approximate="tanh"),
    "nn.relu": lambda seed, x: _aten.threshold_backward(seed, x, 0),
    "nn.silu": _aten.silu_backward,
}


@placed_torch_op(VJP)
def _vjp(call: OpCall, place: Place) -> Function:
    """(given operands, gradients of results): the gradients of the operands that are wanted. What nothing depends on is
    zero."""
    stated = vjp_of(call)
    if len(stated.calls) == 1 and stated.calls[0][0].name in _DIRECT:
        return _direct(stated, _DIRECT[stated.calls[0][0].name])
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


def _direct(stated: Vjp, derivative: Derivative) -> Function:
    dtype = torch_dtype(stated.operands[0].dtype)
    return lambda x, seed: (derivative(seed.to(dtype), x.to(dtype)),)


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
