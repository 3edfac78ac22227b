"""What a call costs besides its kernels and collectives, on two gloo ranks: with tensors so small that nothing else
takes time, and at the first call with a new size of a kernel with symbolic dims. Next to the same by hand, with the
same collective, and to DTensor. A collective's own time changes from call to call by more than a dispatch takes, and
depends on what went before: where the question is what comes on top of it, it is timed apart.

python -m benchmarks.bench_dispatch
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import tilelang.language as T
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.runtime.ranks.carriers import Messages

from ._ranks import on_ranks
from ._timing import Row, header, interleaved, row, verdicts

LOCAL, DTENSORS, BY_HAND, DTENSOR = "local tensors", "DTensors", "by hand", "DTensor"
DEVICES, TINY = 2, 8
_CALLS = 50  # per round
Times = dict[str, list[float]]
_Run = Callable[[DTensor, torch.Tensor], torch.Tensor]  # of a DTensor, or of the part of it that this rank holds


def rows(rounds: int = 41) -> list[Row]:
    """All comparisons, measured."""
    tiny, new, around = (on_ranks(time_, rounds) for time_ in (time_tiny, time_new_sizes, time_around_collectives))
    what = f"call with tiny tensors: K-split matmul {TINY} x {TINY} x {TINY}"
    return [
        row(f"{what}, without its collective", around, LOCAL, BY_HAND, within=50e-6),
        row(what, tiny, LOCAL, BY_HAND),
        row(what, tiny, LOCAL, DTENSOR),
        row(what, tiny, DTENSORS, DTENSOR),
        row("first call with a new size: M-split matmul", new, LOCAL, DTENSOR, must=0.1),
        row("first call with a new size: M-split matmul", new, DTENSORS, DTENSOR),
    ]


def time_tiny(rounds: int) -> Times:
    """On each of two ranks: a product with the contracted dim split. Its collective sends each rank's tile to the
    other."""
    return interleaved(_tiny_runs(), rounds, _CALLS)


def time_around_collectives(rounds: int) -> Times:
    """The same calls, without the seconds from a collective's start to its end."""
    inside = [0.0]
    times: Times = {LOCAL: [], BY_HAND: []}
    with (
        patch.object(dist, "all_to_all_single", _timed(dist.all_to_all_single, inside)),
        patch.object(Messages, "__call__", _timed_messages(Messages.__call__, inside)),
    ):
        runs = _tiny_runs()
        for turn in range(rounds):
            for who in list(times)[:: -1 if turn % 2 else 1]:
                inside[0] = 0.0
                start = time.perf_counter()
                for _ in range(_CALLS):
                    runs[who]()
                times[who].append((time.perf_counter() - start - inside[0]) / _CALLS)
    return times


def _timed(collective: Callable[..., Any], inside: list[float]) -> Callable[..., Any]:
    """The collective; the seconds from its start to the end of the wait for it are added to `inside`."""

    def timed(*args: Any, **options: Any) -> _Work | None:
        start = time.perf_counter()
        work = collective(*args, **options)
        if work is not None:
            return _Work(work, start, inside)
        inside[0] += time.perf_counter() - start
        return None

    return timed


def _timed_messages(carry: Callable[..., Callable[[], None]], inside: list[float]) -> Callable[..., Any]:
    """The same of the messages that a kernel's collective is made of."""

    def timed(*args: Any) -> Callable[[], None]:
        start = time.perf_counter()
        wait = carry(*args)

        def timed_wait() -> None:
            wait()
            inside[0] += time.perf_counter() - start

        return timed_wait

    return timed


@dataclass(frozen=True)
class _Work:
    work: dist.Work
    start: float
    inside: list[float]

    def wait(self, *timeout: Any) -> None:
        self.work.wait(*timeout)
        self.inside[0] += time.perf_counter() - self.start


def _tiny_runs() -> dict[str, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    a, b = torch.randn(TINY, TINY), torch.randn(TINY, TINY)
    here = dist.get_rank()
    local_a, local_b = a.chunk(DEVICES, 1)[here].contiguous(), b.chunk(DEVICES, 0)[here].contiguous()
    func = matmul(TINY, TINY, TINY, 16, 16, 16)
    kernel = mt.compile(mt.annotate(func, {"x": DEVICES}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}), target="c")
    mesh = init_device_mesh("cpu", (DEVICES,), mesh_dim_names=("x",))
    shared_a, shared_b = (DTensor.from_local(t, mesh, [p]) for t, p in ((local_a, Shard(1)), (local_b, Shard(0))))
    received = torch.empty(TINY, TINY)
    partial, splits = torch.empty(TINY, TINY), [0 if member == here else TINY * TINY for member in range(DEVICES)]

    def by_hand() -> torch.Tensor:
        torch.mm(local_a, local_b, out=partial)
        dist.all_to_all_single(received.view(-1), partial.view(-1), splits, splits)
        return partial.add_(received)

    runs: dict[str, Callable[[], torch.Tensor]] = {
        BY_HAND: by_hand,
        LOCAL: lambda: kernel.local(local_a, local_b),
        DTENSORS: lambda: kernel(shared_a, shared_b).to_local(),
        DTENSOR: lambda: (shared_a @ shared_b).redistribute(placements=[Replicate()]).to_local(),
    }
    for run in runs.values():
        torch.testing.assert_close(run(), a @ b, rtol=1e-4, atol=1e-4)
    return runs


def time_new_sizes(rounds: int) -> Times:
    """On each of two ranks: a product with the rows split, of another size every time. Sizes of the same kinds (even
    and uneven, multiples of the kernel's blocks) were there before, so that the kernels are compiled."""
    mesh, width = init_device_mesh("cpu", (DEVICES,), mesh_dim_names=("x",)), 16
    weight = DTensor.from_local(torch.randn(width, width), mesh, [Replicate()])
    dist.broadcast(weight.to_local(), 0)
    sizes = range(8 * width, 8 * width + rounds + 1)
    tensors = [distribute_tensor(torch.randn(rows, width), mesh, [Shard(0)]) for rows in sizes]
    func = matmul(T.dynamic("M"), width, width, 16, 16, 16)
    layouts = {"A": {"x": 0}, "B": {}, "C": {"x": 0}}
    by_dtensor, by_local = (mt.compile(mt.annotate(func, {"x": DEVICES}, layouts), target="c") for _ in range(2))

    local_weight = weight.to_local()
    runs: dict[str, _Run] = {
        LOCAL: lambda tensor, part: by_local.local(part, local_weight, shapes={"A": tensor.shape}),
        DTENSORS: lambda tensor, part: by_dtensor(tensor, weight),
        DTENSOR: lambda tensor, part: tensor @ weight,
    }
    for rows in (2 * width, 2 * width + 1, 2 * width + 2):
        before = distribute_tensor(torch.randn(rows, width), mesh, [Shard(0)])
        for run in runs.values():
            run(before, before.to_local())
    return _first_calls(runs, tensors)


def _first_calls(runs: dict[str, _Run], tensors: Sequence[DTensor]) -> Times:
    """Seconds of each run on each tensor."""
    times: Times = {who: [] for who in runs}
    for number, tensor in enumerate(tensors):
        results, part = [], tensor.to_local()
        for who in list(runs)[:: -1 if number % 2 else 1]:
            dist.barrier()
            start = time.perf_counter()
            result = runs[who](tensor, part)
            times[who].append(time.perf_counter() - start)
            results.append(result.to_local() if isinstance(result, DTensor) else result)
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-4)
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    print(header("Calls"))
    print(verdicts(rows(options.rounds)))
