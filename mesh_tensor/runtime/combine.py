"""Reductions of tensors, element by element and in a fixed order: what collectives are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.reductions import PARTIAL_OPS, REDUCTIONS, Reduction
from mesh_tensor.targets.dtypes import dtype_name

from .elementwise import elementwise

Combine = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def combiner(op: str, dtype: torch.dtype) -> Combine:
    """`combine(out, sources)`: out = sources[0] op sources[1] op ..., from left to right, so that runs agree bit for
    bit. `out` may be `sources[0]` itself. Floats narrower than 32 bits accumulate in float32 and are rounded once."""
    if op not in PARTIAL_OPS:
        refuse(f"unknown reduction {op!r}", fix=f"use one of {listing(tuple(PARTIAL_OPS))}")
    record = REDUCTIONS[op]
    if not record.takes(dtype_name(dtype)):
        refuse(
            f"{op!r} has no meaning for {dtype}", fix="reduce real numbers with max and min, integers with bitwise ops"
        )
    apply: Callable[..., torch.Tensor] = getattr(torch, record.function)
    work: Callable[..., None] = partial(_fold, apply)
    if dtype.is_floating_point and dtype.itemsize == 1:
        work = partial(_widened, apply)
    elif dtype.is_floating_point and dtype.itemsize == 2 and record.rounds:
        work = partial(_half, apply)
    elif dtype in _SIGNED:
        work = _unsigned(record, apply, dtype)
    return lambda out, sources: elementwise(work, out, *sources)


def _fold(apply: Callable[..., torch.Tensor], out: torch.Tensor, *sources: torch.Tensor) -> None:
    if len(sources) == 1:
        if out is not sources[0]:
            out.copy_(sources[0])
        return
    apply(sources[0], sources[1], out=out)
    for source in sources[2:]:
        apply(out, source, out=out)


def _half(apply: Callable[..., torch.Tensor], out: torch.Tensor, *sources: torch.Tensor) -> None:
    if len(sources) <= 2:  # torch computes one operation on halves in float32
        _fold(apply, out, *sources)
    else:
        _widened(apply, out, *sources)


def _widened(apply: Callable[..., torch.Tensor], out: torch.Tensor, *sources: torch.Tensor) -> None:
    total = sources[0].to(torch.float32)
    for source in sources[1:]:
        apply(total, source.to(torch.float32), out=total)
    out.copy_(total)


def _unsigned(record: Reduction, apply: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., None]:
    """Torch computes little on unsigned integers: go by their signed bit patterns, in an order-preserving form."""
    signed = _SIGNED[dtype]
    if record.operands != "ordered":
        return lambda out, *sources: _fold(apply, out.view(signed), *(source.view(signed) for source in sources))
    flip = torch.iinfo(signed).min

    def combine(out: torch.Tensor, *sources: torch.Tensor) -> None:
        ordered = [source.view(signed) ^ flip for source in sources]
        _fold(apply, ordered[0], *ordered)
        out.view(signed).copy_(ordered[0] ^ flip)

    return combine
