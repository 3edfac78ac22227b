"""Work on whole tensors, element by element, without getting in the way of the devices' threads.

Torch's own threads keep spinning for a while after an operation, on the cores that the devices' kernels need next. So
torch works with one thread at a time here, and large tensors are split over the devices' threads. Reductions of
tensors, in a fixed order, are what collectives are made of.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.reductions import PARTIAL_OPS, REDUCTIONS, Reduction
from mesh_tensor.targets.dtypes import dtype_name
from mesh_tensor.targets.tile_memory import empty_tile

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
        device_threads().run(lambda index: work(*parts[index]), len(parts))


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
    sums = torch.stack([(part if part.itemsize > 2 else part.float()).sum().double() for _, part in floats])
    if bool(sums.sum().isfinite()):
        return []
    suspects = [held for held, total in zip(floats, sums.isfinite().tolist(), strict=True) if not total]
    return list(dict.fromkeys(name for name, part in suspects if not bool(part.isfinite().all())))


def within(tensors: Iterable[torch.Tensor], norm: float) -> bool:
    """Whether the norm of the tensors together is at most `norm`; it is not where one holds NaN or infinity."""
    return bool(torch.nn.utils.get_total_norm(list(tensors)) <= norm)


Work = Callable[[int], object]


class _Job:
    """Indices are taken one by one by whoever is free; `done` hears of each that another thread finished."""

    def __init__(self, work: Work, count: int) -> None:
        self._work, self._count = work, count
        self._take = itertools.count().__next__
        self._inference = torch.is_inference_mode_enabled()
        self.done: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

    def help(self) -> None:
        if self._inference:  # else nothing could be written to tensors that the caller has made
            with torch.inference_mode():
                self._help()
        else:
            self._help()

    def _help(self) -> None:
        while (index := self._take()) < self._count:
            self.done.put((index, self._attempt(index)))

    def run(self) -> dict[int, BaseException]:
        """Do what the helpers leave over, wait for them, and give back what went wrong where."""
        outcomes = []
        while (index := self._take()) < self._count:
            outcomes.append((index, self._attempt(index)))
        outcomes += [self.done.get() for _ in range(self._count - len(outcomes))]
        return {index: error for index, error in outcomes if error is not None}

    def _attempt(self, index: int) -> BaseException | None:
        try:
            self._work(index)
        except BaseException as error:  # handed to the caller's thread
            return error
        return None


class DeviceThreads:
    """The calling thread and one helper for every further core. Helpers start with the first job that needs them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def run(self, work: Work, count: int) -> None:
        """`work(0)` ... `work(count - 1)`, at the same time as far as there are cores. All of them end before this
        does; then the error of the lowest index, if there is one, is raised."""
        helpers = min(self._threads, count) - 1
        if helpers <= 0:
            for index in range(count):
                work(index)
            return
        if len(self._helpers) < helpers:
            self._start(helpers)
        job = _Job(work, count)
        for _ in range(helpers):
            self._jobs.put(job)
        errors = job.run()
        if errors:
            raise errors[min(errors)]

    def close(self) -> None:
        """End the helpers, when they are done. A later job starts new ones."""
        with self._lock:
            helpers, self._helpers = self._helpers, []
            for _ in helpers:
                self._jobs.put(None)
            for helper in helpers:
                helper.join()

    def _start(self, helpers: int) -> None:
        with self._lock:
            torch_threads, ready = torch.get_num_threads(), threading.Semaphore(0)
            while len(self._helpers) < helpers:
                name = f"mesh_tensor-{len(self._helpers)}"
                helper = threading.Thread(target=_serve, args=(self._jobs, ready), name=name, daemon=True)
                helper.start()
                ready.acquire()
                self._helpers.append(helper)
            torch.set_num_threads(torch_threads)


def _serve(jobs: queue.SimpleQueue[_Job | None], ready: threading.Semaphore) -> None:
    torch.get_num_threads()  # else the first operation would undo what follows
    torch.set_num_threads(1)  # of this thread; and of threads to come, which the caller undoes
    torch.set_grad_enabled(False)
    ready.release()
    while (job := jobs.get()) is not None:
        job.help()
        del job  # its tensors may be in its hands alone


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_device_threads: DeviceThreads | None = None


def device_threads() -> DeviceThreads:
    """The threads that all virtual meshes of this process share."""
    global _device_threads
    if _device_threads is None:
        _device_threads = DeviceThreads(cores())
    return _device_threads


@atexit.register
def _close() -> None:
    """A helper that the end of Python finds in torch, if only to free a job's tensors, would abort the process."""
    if _device_threads is not None:
        _device_threads.close()


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _device_threads
    _device_threads = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
