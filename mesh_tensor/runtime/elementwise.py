"""Work on whole tensors, element by element, without getting in the way of the devices' threads.

Torch's own threads keep spinning for a while after an operation, on the cores that the devices' kernels need next. So
torch works with one thread at a time here, and large tensors are split over the devices' threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.targets.tile_memory import empty_tile

from .threads import device_threads

_ALONE = 32768  # elements: with fewer, torch never starts threads
# Elements per thread: with fewer, handing work to another thread costs more than it saves.
_CHUNK = CPU.tuning.elements_per_thread


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
