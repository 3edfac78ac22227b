"""A matmul that contracts a split dim and the Megatron MLP, on two devices: a virtual mesh and two gloo ranks next to
the same by hand, with DTensors, and with JAX. All of them take turns.

python -m benchmarks.bench_ranks
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import mesh_tensor as mt

from . import jax_peers
from ._elsewhere import Elsewhere
from ._ranks import alone, on_ranks
from ._timing import Row, header, interleaved, row, verdicts
from .workloads import matmul_k_split, megatron_mlp

VIRTUAL, RANKS, BY_HAND, DTENSOR, JAX = "virtual mesh", "gloo ranks", "by hand", "DTensor", "JAX"
DEVICES = 2
_CLOSE = {"rtol": 1e-4, "atol": 1e-3}
Times = dict[str, list[float]]


def rows(rounds: int = 21) -> list[Row]:
    """All comparisons, measured."""
    matmul, mlp = on_ranks(time_matmul, 2048, rounds), on_ranks(time_mlp, 512, 2048, 8192, rounds)
    what = "K-split matmul 2048 x 2048 x 2048, float32"
    found = [
        row(what, matmul, VIRTUAL, BY_HAND, must=0.9),
        _beside_jax(what, matmul, must=1.0),
        row(what, matmul, RANKS, BY_HAND, must=1.05),
        row(what, matmul, RANKS, DTENSOR, must=1.0),
    ]
    what = "Megatron MLP 512, 2048, 8192, float32"
    return found + [
        row(what, mlp, VIRTUAL, DTENSOR, must=0.95),
        row(what, mlp, RANKS, BY_HAND, must=1.03),
        _beside_jax(what, mlp),
    ]


def time_matmul(size: int, rounds: int) -> Times:
    """On each of two ranks: a (size, size) product with the contracted dim split over them."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    here = dist.get_rank()
    local_a = a.chunk(DEVICES, dim=1)[here].contiguous()
    local_b = b.chunk(DEVICES, dim=0)[here].contiguous()
    kernel = mt.compile(matmul_k_split(size, DEVICES), target="c")
    shared_a, shared_b = _dtensors((local_a, Shard(1)), (local_b, Shard(0)))

    def by_hand() -> torch.Tensor:
        c = local_a @ local_b
        dist.all_reduce(c)
        return c

    runs = {
        RANKS: lambda: kernel.local(local_a, local_b),
        BY_HAND: by_hand,
        DTENSOR: lambda: (shared_a @ shared_b).redistribute(placements=[Replicate()]).to_local(),
    }
    return _measured(runs, a @ b, rounds, "matmul", size)


def time_mlp(tokens: int, model: int, hidden: int, rounds: int) -> Times:
    """On each of two ranks: gelu(x @ w1) @ w2 with the hidden features split over them."""
    x, w1, w2 = _mlp_operands(tokens, model, hidden)
    here = dist.get_rank()
    local_w1 = w1.chunk(DEVICES, dim=1)[here].contiguous()
    local_w2 = w2.chunk(DEVICES, dim=0)[here].contiguous()
    up, down = (mt.compile(kernel, target="c") for kernel in megatron_mlp(tokens, model, hidden, DEVICES))
    shared = _dtensors((x, Replicate()), (local_w1, Shard(1)), (local_w2, Shard(0)))

    def by_hand() -> torch.Tensor:
        y = _mlp(x, local_w1, local_w2)
        dist.all_reduce(y)
        return y

    runs = {
        RANKS: lambda: down.local(up.local(x, local_w1), local_w2),
        BY_HAND: by_hand,
        DTENSOR: lambda: _mlp(*shared).redistribute(placements=[Replicate()]).to_local(),
    }
    return _measured(runs, _mlp(x, w1, w2), rounds, "mlp", tokens, model, hidden)


def virtual_matmul(size: int) -> Callable[[], mt.MeshTensor]:
    """The product of `time_matmul` on a virtual mesh, of tensors that lie on it."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    kernel = mt.compile(matmul_k_split(size, DEVICES), target="c")
    tiles = mt.distribute(a, kernel.mesh, {"x": 1}), mt.distribute(b, kernel.mesh, {"x": 0})
    return _checked(lambda: kernel(*tiles), a @ b)


def virtual_mlp(tokens: int, model: int, hidden: int) -> Callable[[], mt.MeshTensor]:
    """The MLP of `time_mlp` on a virtual mesh, of tensors that lie on it."""
    x, w1, w2 = _mlp_operands(tokens, model, hidden)
    up, down = (mt.compile(kernel, target="c") for kernel in megatron_mlp(tokens, model, hidden, DEVICES))
    tiles = mt.distribute(x, up.mesh, {}), mt.distribute(w1, up.mesh, {"x": 1}), mt.distribute(w2, up.mesh, {"x": 0})
    return _checked(lambda: down(up(tiles[0], tiles[1]), tiles[2]), _mlp(x, w1, w2))


def _mlp_operands(tokens: int, model: int, hidden: int) -> list[torch.Tensor]:
    return [torch.randn(tokens, model), torch.randn(model, hidden) / 32, torch.randn(hidden, model) / 32]


def _mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w1, approximate="tanh") @ w2


def _dtensors(*parts: tuple[torch.Tensor, Replicate | Shard]) -> list[DTensor]:
    mesh = init_device_mesh("cpu", (DEVICES,))
    return [DTensor.from_local(local, mesh, [placement]) for local, placement in parts]


def _checked(run: Callable[[], mt.MeshTensor], expected: torch.Tensor) -> Callable[[], mt.MeshTensor]:
    torch.testing.assert_close(run().full(), expected, **_CLOSE)
    return run


def _measured(
    runs: dict[str, Callable[[], torch.Tensor]], expected: torch.Tensor, rounds: int, name: str, *sizes: int
) -> Times:
    """Times on rank 0. A run ends when all ranks are done; those of one process have processes of their own."""
    for run in runs.values():
        torch.testing.assert_close(run(), expected, **_CLOSE)
    others = {VIRTUAL: alone(Elsewhere)("benchmarks.bench_ranks", f"virtual_{name}", *sizes)}
    if jax_peers.INSTALLED:
        others[JAX] = alone(Elsewhere)("benchmarks.jax_peers", name, *sizes, environment=jax_peers.ENVIRONMENT)
    times = interleaved({**runs, **{who: alone(run) for who, run in others.items()}}, rounds)
    for who, run in others.items():
        if run is not None:  # the other ranks have none
            times[who] = run.times[-rounds:]  # after the first call, which nobody counts
            run.close()
    return times


def _beside_jax(what: str, times: Times, must: float | None = None) -> Row:
    if not jax_peers.INSTALLED:
        return Row(what, VIRTUAL, JAX, note="jax is not installed")
    return row(what, times, VIRTUAL, JAX, must)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    print(header("Two devices"))
    print(verdicts(rows(options.rounds)))
