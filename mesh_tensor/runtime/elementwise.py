"""Work on whole tensors, element by element, without getting in the way of the devices' threads.

Torch's own threads keep spinning for a while after an operation, on the cores that the devices' kernels need next. So
torch works with one thread at a time here, and large tensors are split over the devices' threads. Reductions of
tensors, in a fixed order, are what collectives are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.reductions import PARTIAL_OPS, REDUCTIONS, Reduction
from mesh_tensor.targets.dtypes import dtype_name
from mesh_tensor.targets.tile_memory import empty_tile

from .threads import device_threads

_ALONE = 32768  # elements: with fewer, torch never starts threads
# Elements per thread: with fewer, handing work to another thread costs more than it saves.
_CHUNK = CPU.tuning.elements_per_thread
Combine = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def elementwise(work: Callable[..., object], *tensors: torch.Tensor) -> None:
    """`work(*tensors)`, in parts: the tensors have one shape, and `work` writes the first, every position by itself."""
    if tensors[0].is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            elementwise(work, *tensors)
            return
    size = tensors[0].numel()
    if size < _ALONE or tensors[0].device.type != "cpu":
        work(*tensors)
        return
    with _one_torch_thread():
        if size < 2 * _CHUNK:
            work(*tensors)
            return
        dim = next(dim for dim, extent in enumerate(tensors[0].shape) if extent > 1)
        extent = -(-tensors[0].shape[dim] * _CHUNK // size)
        parts = list(zip(*(tensor.split(extent, dim) for tensor in tensors), strict=True))
        device_threads().run(lambda index: _do(work, parts[index]), len(parts))


def each(work: Callable[[int], None], count: int, elements: int) -> None:
    """`work(index)` for every index below `count`, each on `elements` elements: on the devices' threads if they are
    many."""
    if elements < _ALONE:
        for index in range(count):
            work(index)
        return
    with _one_torch_thread():
        device_threads().run(work, count)


def copy(out: torch.Tensor, source: torch.Tensor) -> None:
    """`out[...] = source`."""
    elementwise(torch.Tensor.copy_, out, source)


def fill(out: torch.Tensor, value: float | int) -> torch.Tensor:
    """`out[...] = value`; gives back `out`."""
    elementwise(partial(torch.Tensor.fill_, value=value), out)
    return out


def clone(source: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    out = empty_tile(source.shape, source.dtype, source.device)
    copy(out, source)
    return out


def _do(work: Callable[..., object], tensors: tuple[torch.Tensor, ...]) -> None:
    work(*tensors)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


def not_finite(parts: Mapping[str, Iterable[torch.Tensor]]) -> list[str]:
    """The names of those of whose parts one holds NaN or infinity; integers never do.

    A sum over all elements is finite only if they are, and costs one reading. Where it is not (sums may overflow),
    elements are looked at one by one."""
    floats = [
        (name, part) for name, tensors in parts.items() for part in tensors if part.is_floating_point() and part.numel()
    ]
    if not floats:
        return []
    sums = torch.stack([_total(part) for _, part in floats])
    if bool(sums.sum().isfinite()):
        return []
    suspects = [held for held, total in zip(floats, sums.isfinite().tolist(), strict=True) if not total]
    return list(dict.fromkeys(name for name, part in suspects if not bool(part.isfinite().all())))


def within(tensors: Iterable[torch.Tensor], norm: float) -> bool:
    """Whether the norm of the tensors together is at most `norm`; it is not where one holds NaN or infinity."""
    return bool(torch.nn.utils.get_total_norm(list(tensors)) <= norm)


def _total(part: torch.Tensor) -> torch.Tensor:
    return (part if part.itemsize > 2 else part.float()).sum().double()
