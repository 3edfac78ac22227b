"""`mesh.vjp`: gradients of an operator's operands, by torch's own differentiation of the operator's torch function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.vjp import VJP, Vjp, vjp_of

from ..cpu.gelu import gelu_tanh_backward
from ..dtypes import torch_dtype
from .conv import conv_gradient
from .recorded import Recorded, halves, has_halves
from .table import Function, Place, placed_torch_op, torch_function

Tensor = torch.Tensor
Derivative = Callable[[Tensor, Tensor], Tensor]
Scatter = Callable[[Tensor, Tensor, Tensor], Tensor]  # into zeros, at indices, the gradient of the result
_aten = torch.ops.aten

# Of operators of one operand, by the gradient of the result and the operand: without what the operator itself gives.
_DIRECT: dict[str, Derivative] = {
    "nn.gelu": _aten.gelu_backward,
    "nn.gelu_tanh": gelu_tanh_backward,
    "nn.relu": lambda seed, x: _aten.threshold_backward(seed, x, 0),
    "nn.silu": _aten.silu_backward,
}

# Of operators that take elements of their first operand by indices, which torch then checks: where its gradient goes.
_SCATTERED: dict[str, Callable[[OpCall], Scatter]] = {
    "gather_elements": lambda call: _scatter_elements(call.axis(call.attr("axis"))),
    "take": lambda call: _scatter_rows(call),
}

_CONVOLUTIONS = {"nn.conv1d", "nn.conv2d", "nn.conv3d"}

# Of operators whose results, or what else they compute, their gradients need.
_RECORDED = {"nn.attention", "nn.attention_bias", "nn.layer_norm", "nn.rms_norm"}


@placed_torch_op(VJP)
def _vjp(call: OpCall, place: Place) -> Function:
    """(given operands, gradients of results): the gradients of the operands that are wanted. What nothing depends on is
    zero."""
    stated = vjp_of(call)
    if len(stated.calls) == 1 and stated.calls[0][0].name in _DIRECT:
        return _direct(stated, _DIRECT[stated.calls[0][0].name])
    if (gradient := _of_convolution(stated)) is not None:
        return gradient
    if can_be_recorded(call) and (made := _of_halves(call, place)) is not None:
        return made
    forward = _forward(stated, place)
    types = [(tensor.shape, torch_dtype(tensor.dtype)) for tensor in stated.operands]
    count = len(stated.given)

    def vjp(*tensors: Tensor) -> tuple[Tensor, ...]:
        with _recording():
            operands = _operands(stated, types, tensors[:count], tensors[0].device)
            results = forward(operands)
            return _gradients(stated, [operands[i] for i in stated.wrt], results, tensors[count:])

    is_one = len(stated.calls) == 1 and stated.calls[0][1] == (0, 1)
    scatters = is_one and stated.given == (1,) and stated.wrt == (0,) and stated.seeds == (0,)
    scatter = _SCATTERED.get(stated.calls[0][0].name) if scatters else None
    return vjp if scatter is None else _scattered(types[0], scatter(stated.forward), vjp)


def _scattered(like: tuple[tuple[int, ...], torch.dtype], scatter: Scatter, other: Function) -> Function:
    """The gradient at its places, where all indices are in range on a CPU, which looks at them; else what `other`
    gives."""
    shape, dtype = like

    def vjp(index: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        if seed.device.type == "cpu":
            with suppress(IndexError, RuntimeError):
                return (scatter(torch.zeros(shape, dtype=dtype), index.long(), seed.to(dtype)),)
        return other(index, seed)

    return vjp


def _scatter_elements(dim: int) -> Scatter:
    return lambda zeros, index, seed: zeros.scatter_add_(dim, index, seed.reshape(index.shape))


def _scatter_rows(call: OpCall) -> Scatter:
    """Of R.take, but in modes in which no index is out of range."""
    data, axis = call.inputs[0], call.attr("axis")
    dim = 0 if axis is None else call.axis(axis)
    rows = (math.prod(data.shape),) if axis is None else tuple(data.shape)

    def scatter(zeros: Tensor, index: Tensor, seed: Tensor) -> Tensor:
        if call.attr("mode", "fast") not in ("fast", "nan"):
            raise IndexError
        seed = seed.reshape(*rows[:dim], index.numel(), *rows[dim + 1 :])
        return zeros.view(rows).index_add_(dim, index.reshape(-1), seed).view(zeros.shape)

    return scatter


def recorded(call: OpCall, function: Function) -> Recorded:
    """A `mesh.vjp` of one call on whole operands, which `function` computes."""
    stated = vjp_of(call)
    by_torch = _by_autograd(stated, function)
    return halves(stated.forward, stated.wrt, by_torch) or by_torch


def _by_autograd(stated: Vjp, function: Function) -> Recorded:
    wanted, count = stated.wrt, len(stated.given)

    def forward(*operands: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        with _recording():
            leaves = [_leaf(tensor) for tensor in operands]
            for number in wanted:
                leaves[number].requires_grad_()
            made = function(*leaves)
        results = made if isinstance(made, (tuple, list)) else (made,)
        return tuple([result.detach() for result in results]), ([leaves[number] for number in wanted], results)

    def backward(*tensors: Any) -> tuple[Tensor, ...]:
        leaves, results = tensors[-1]
        with _recording():
            return _gradients(stated, leaves, results, tensors[count:-1])

    return Recorded(forward, backward)


@contextmanager
def _recording() -> Iterator[None]:
    """What is computed within has gradients, whatever the caller's mode: inference mode would record nothing."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _leaf(tensor: Tensor) -> Tensor:
    """A tensor that may require gradients, where they are recorded."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _gradients(
    stated: Vjp, leaves: Sequence[Tensor], results: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Those of the leaves, of those of results; what nothing depends on is zero."""
    ends = [(results[number], seed) for number, seed in zip(stated.seeds, seeds, strict=True)]
    ends = [(result, seed.to(result.dtype).reshape(result.shape)) for result, seed in ends if result.requires_grad]
    if not ends:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    made = torch.autograd.grad([y for y, _ in ends], leaves, [seed for _, seed in ends], allow_unused=True)
    return tuple(torch.zeros_like(leaf) if dx is None else dx for leaf, dx in zip(leaves, made, strict=True))


def can_be_recorded(call: OpCall) -> bool:
    """Whether what the operator has computed helps to compute its gradients."""
    stated = vjp_of(call)
    return len(stated.calls) == 1 and stated.calls[0][0].name in _RECORDED and len(stated.given) == len(stated.operands)


def keeps_alike(call: OpCall) -> bool:
    """Whether what is kept of the operator's call doesn't depend on which gradients are wanted."""
    return has_halves(vjp_of(call).forward) and _of_halves(call, Place()) is not None


def _of_halves(call: OpCall, place: Place) -> Function | None:
    """The gradients, by torch's own functions, where nothing of the operator's call was kept."""
    stated = vjp_of(call)
    function = torch_function(stated.forward, place.mesh, place.rank)
    both = halves(stated.forward, stated.wrt, _by_autograd(stated, function))
    if both is None:
        return None
    count, made = len(stated.given), both
    return lambda *tensors: made.backward(*tensors, made.forward(*tensors[:count])[1])


def _of_convolution(stated: Vjp) -> Function | None:
    """The gradient of one operand of a convolution of both."""
    (call, operands), *others = stated.calls
    linear = len(stated.wrt) == 1 and stated.given == (1 - stated.wrt[0],) and stated.seeds == (0,)
    if others or call.name not in _CONVOLUTIONS or operands != (0, 1) or not linear:
        return None
    return conv_gradient(call, stated.wrt[0], torch_dtype(stated.operands[stated.wrt[0]].dtype))


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
            tensor = _leaf(there[number]).to(dtype)
        else:
            tensor = torch.zeros((), dtype=dtype, device=device).expand(shape)
        operands.append(tensor.requires_grad_() if number in stated.wrt else tensor)
    return operands


def _forward(stated: Vjp, place: Place) -> Function:
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
    with torch.inference_mode(False):  # else none of its uses could be recorded
        return torch.from_numpy(operand.data.numpy().copy())
