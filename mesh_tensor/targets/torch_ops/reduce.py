"""Reductions and scans along dims; operators that sort, or look up where a value would stand in a sorted tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.targets.dtypes import torch_dtype

from .table import Function, torch_op

Tensor = torch.Tensor
Reduction = Callable[[Tensor, tuple[int, ...], bool, torch.dtype], Tensor]


def _sum(x: Tensor, dims: tuple[int, ...], keep: bool, dtype: torch.dtype) -> Tensor:
    return torch.sum(x, dims, keepdim=keep, dtype=dtype)


def _prod(x: Tensor, dims: tuple[int, ...], keep: bool, dtype: torch.dtype) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = torch.prod(x, dim, keepdim=keep, dtype=dtype)
    return x


def _mean(x: Tensor, dims: tuple[int, ...], keep: bool, dtype: torch.dtype) -> Tensor:
    """Of integers: their sum, divided as C does."""
    if dtype.is_floating_point:
        return torch.mean(x, dims, keepdim=keep)
    count = math.prod(x.shape[dim] for dim in dims)
    return torch.div(_sum(x, dims, keep, dtype), count, rounding_mode="trunc")


def _variance(x: Tensor, dims: tuple[int, ...], keep: bool, dtype: torch.dtype) -> Tensor:
    """Of the population: divided by the number of elements."""
    if dtype.is_floating_point:
        return torch.var(x, dims, correction=0, keepdim=keep)
    return _mean((x - _mean(x, dims, True, dtype)).square(), dims, keep, dtype)


_REDUCTIONS: dict[str, Reduction] = {
    "sum": _sum,
    "prod": _prod,
    "mean": _mean,
    "variance": _variance,
    "std": lambda *args: torch.sqrt(_variance(*args)),
    "max": lambda x, dims, keep, _: torch.amax(x, dims, keepdim=keep),
    "min": lambda x, dims, keep, _: torch.amin(x, dims, keepdim=keep),
}


@torch_op(*_REDUCTIONS)
def _reduction(call: OpCall) -> Function:
    reduce = _REDUCTIONS[call.name]
    dims, keep = call.axes(call.attr("axis")), bool(call.attr("keepdims"))
    dtype = torch_dtype(call.outputs[0].dtype)
    if not dims:  # torch takes no dims for all dims; each element is a reduction of its own
        one_more = len(call.inputs[0].shape)
        return lambda x: reduce(x.unsqueeze(-1), (one_more,), False, dtype)
    return lambda x: reduce(x, dims, keep, dtype)


@torch_op("argmax", "argmin")
def _arg(call: OpCall) -> Function:
    """The first of equal ones. Without a dim, the position in the flattened tensor."""
    find = torch.argmax if call.name == "argmax" else torch.argmin
    dim, keep, shape = call.attr("axis"), bool(call.attr("keepdims")), call.outputs[0].shape
    if dim is None:
        return lambda x: find(x).reshape(shape)
    return lambda x: find(x, dim, keepdim=keep)


@torch_op("cumsum", "cumprod")
def _scan(call: OpCall) -> Function:
    """Exclusive: of the elements before each."""
    scan, neutral = (torch.cumsum, 0) if call.name == "cumsum" else (torch.cumprod, 1)
    axis, dtype, exclusive = call.attr("axis"), torch_dtype(call.outputs[0].dtype), call.attr("exclusive", False)
    dim = 0 if axis is None else call.axis(axis)

    def run(x: Tensor) -> Tensor:
        x = x.reshape(-1) if axis is None else x
        if not exclusive:
            return scan(x, dim, dtype=dtype)
        first = torch.full_like(x.narrow(dim, 0, min(1, x.shape[dim])), neutral)
        return scan(torch.cat([first, x.narrow(dim, 0, max(0, x.shape[dim] - 1))], dim), dim, dtype=dtype)

    return run


@torch_op("median")
def _median(call: OpCall) -> Function:
    """The lower one of an even number; along a dim also where it stands, of equal ones the first in a stable order.
    Where there are NaN it is the first of them."""
    dims, keep, shape = call.attr("axis"), bool(call.attr("keepdims")), call.outputs[0].shape
    if not dims:
        return lambda x: _medians(x.reshape(-1), 0)[0].reshape(shape)
    (dim,) = call.axes(dims)
    return lambda x: tuple(t if keep else t.squeeze(dim) for t in _medians(x, dim))


def _medians(x: Tensor, dim: int) -> list[Tensor]:
    found, count = torch.sort(x, dim=dim, stable=True), x.shape[dim]
    nans = torch.isnan(x).sum(dim, keepdim=True)  # which come last
    at = torch.where(nans > 0, count - nans, (count - 1) // 2)
    return [each.gather(dim, at) for each in found]


@torch_op("sort", "argsort")
def _sort(call: OpCall) -> Function:
    """Stable."""
    dim, descending, field = call.attr("axis"), bool(call.attr("descending")), int(call.name == "argsort")
    return lambda x: torch.sort(x, dim=dim, descending=descending, stable=True)[field]


@torch_op("topk")
def _topk(call: OpCall) -> Function:
    """By a stable sort: of equal elements the first come first."""
    dim, largest = call.axis(call.attr("axis")), bool(call.attr("largest"))
    k = call.outputs[0].shape[dim]
    fields = {"both": (0, 1), "values": (0,), "indices": (1,)}[call.attr("ret_type")]

    def topk(x: Tensor) -> tuple[Tensor, ...]:
        found = torch.sort(x, dim=dim, descending=largest, stable=True)
        return tuple(found[field].narrow(dim, 0, k) for field in fields)

    return topk


@torch_op("bucketize")
def _bucketize(call: OpCall) -> Function:
    right = bool(call.attr("right"))
    return lambda x, boundaries: torch.bucketize(x, boundaries, right=right)
