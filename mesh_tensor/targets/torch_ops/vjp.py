"""`mesh.vjp`: gradients of an operator's operands, by torch's own differentiation of the operator's torch function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

# Of operators whose results, or what else they compute, their gradients need.
_RECORDED = {"nn.attention", "nn.attention_bias", "nn.layer_norm", "nn.rms_norm"}


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


@dataclass(frozen=True)
class Recorded:
    """A call and its gradients, where torch keeps for these what it has computed for that.

    forward   of the call's operands: its results, and what is kept
    backward  of what `mesh.vjp` takes, and of what is kept: the gradients
    """

    forward: Callable[..., tuple[tuple[Tensor, ...], Any]]
    backward: Callable[..., tuple[Tensor, ...]]


def recorded(call: OpCall, function: Function) -> Recorded:
    """A `mesh.vjp` of one call on whole operands, which `function` computes."""
    stated = vjp_of(call)
    wanted, count = stated.wrt, len(stated.given)

    def forward(*operands: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        with torch.enable_grad():
            leaves = [tensor.detach() for tensor in operands]
            for number in wanted:
                leaves[number].requires_grad_()
            made = function(*leaves)
        results = made if isinstance(made, (tuple, list)) else (made,)
        return tuple([result.detach() for result in results]), ([leaves[number] for number in wanted], results)

    def backward(*tensors: Any) -> tuple[Tensor, ...]:
        leaves, results = tensors[-1]
        seeds = zip(stated.seeds, tensors[count:-1], strict=True)
        ends = [(results[number], seed) for number, seed in seeds if results[number].requires_grad]
        if not ends:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        given = [seed.to(result.dtype).reshape(result.shape) for result, seed in ends]
        made = torch.autograd.grad([result for result, _ in ends], leaves, given, allow_unused=True)
        return tuple(torch.zeros_like(leaf) if dx is None else dx for leaf, dx in zip(leaves, made, strict=True))

    return Recorded(forward, backward)


def can_be_recorded(call: OpCall) -> bool:
    """Whether what the operator has computed helps to compute its gradients."""
    stated = vjp_of(call)
    return len(stated.calls) == 1 and stated.calls[0][0].name in _RECORDED and len(stated.given) == len(stated.operands)


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
