"""LLaMA layers as they are served, beside torch: all layers on one device; a layer on two gloo ranks, beside
parallelize_module, the same compiled, and torch with the weights cut by hand; and the next token of a decoder that
keeps its keys and values, on two ranks beside torch on one core.

python -m benchmarks.bench_served
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mesh_tensor as mt
from kernels.models import llama, llama_decoder

from ._ranks import on_ranks
from ._timing import Row, Run, header, interleaved, row, verdicts

SIZES = (512, 256, 1), (512, 256, 4), (128, 16, 1), (128, 16, 4)  # width, positions, layers
SPLIT_SIZES = (512, 256), (1024, 256)
BY_COLUMNS = "attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj"
BY_ROWS = "attn.o_proj", "mlp.down_proj"
CACHED, CONTEXT = 512, 384  # columns of the cache, and of them those with tokens
Times = dict[str, list[float]]


def rows(rounds: int = 41) -> list[Row]:
    """The comparisons, measured."""
    result = []
    for width, positions, layers in SIZES:
        what = f"{layers} layer{'s' * (layers > 1)} of {width}, {positions} positions, one device"
        times = time_one_device(width, positions, layers, rounds)
        most = 1.05 if width >= 512 else 1.3
        result.append(row(what, times, "run", "torch", must=most))
        result.append(row(what, times, "run_sequential", "torch", must=1.2))
    for width, positions in SPLIT_SIZES:
        what = f"a layer of {width}, {positions} positions, 2 ranks"
        times = on_ranks(time_layer, width, positions, rounds)
        peers = {"parallelize_module": 0.9, "torch, cut by hand": 1.0, "parallelize_module, compiled": 1.0}
        result += [row(what, times, "run", peer, must=most) for peer, most in peers.items()]
    what = f"the next token, {CONTEXT} before it, 2 layers of 512, 2 ranks"
    return [*result, row(what, on_ranks(time_token, rounds), "run", "torch, one rank", must=2.0)]


class Layers(nn.Module):
    """Blocks of a LLaMA between hidden states; `key_heads` and `heads` of a rank where it has a part of them."""

    def __init__(self, config: llama.Config) -> None:
        super().__init__()
        model = llama.build(config)
        self.layers, self.cos, self.sin = model.layers, model.cos, model.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, positions, width) -> the same."""
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


def time_one_device(width: int, positions: int, layers: int, rounds: int) -> Times:
    """Seconds of a forward pass on a mesh of one device, by `run` and `run_sequential`, and by torch."""
    model, x = _layers(width, positions, layers)
    module = _imported(model, x)
    mod, inputs = module.mod, {"x": x, **module.params}
    run = mt.distribute_module(module, {"x": 1}, {})
    calls = {
        "torch": lambda: model(x),
        "run": lambda: run(x),
        "run_sequential": lambda: mt.run_sequential(mod, inputs),
    }
    return _timed(calls, rounds, 1 if width >= 512 else 10)


def time_layer(width: int, positions: int, rounds: int) -> Times:
    """Seconds of a layer's forward pass with heads and hidden features split over the ranks, by each of the ways."""
    model, x = _layers(width, positions, 1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    shardings = {f"layers.0.{name}.weight": {"model": 0} for name in BY_COLUMNS}
    shardings |= {f"layers.0.{name}.weight": {"model": 1} for name in BY_ROWS}
    run = mt.distribute_module(_imported(model, x), mesh, shardings)
    parallel, by_hand = _parallelized(model, mesh), _cut(model)
    compiled = torch.compile(_parallelized(model, mesh))
    calls = {
        "run": lambda: run(x),
        "parallelize_module": lambda: parallel(x),
        "torch, cut by hand": lambda: by_hand(x),
        "parallelize_module, compiled": lambda: compiled(x),
    }
    return _timed({name: _together(call) for name, call in calls.items()}, rounds, 3)


def time_token(rounds: int) -> Times:
    """Seconds until a token's logits are there, with heads and cache split over the ranks; torch takes one core."""
    config = llama.Config(1024, 512, 1376, 8, 4, 2, batch=1, positions=CACHED)
    model = llama.build(config)
    decoder = llama_decoder.Decoder(copy.deepcopy(model), config).eval()
    module = mt.from_torch(llama_decoder.export(model, config))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    run = mt.distribute_module(module, mesh, llama_decoder.layout(config, "model"))
    mask = (torch.arange(CACHED) <= CONTEXT).long()[None]
    before = torch.randint(1024, (1, CONTEXT)), mask, torch.arange(CONTEXT)[None], torch.tensor(0)
    token = torch.randint(1024, (1, 1)), mask, torch.tensor([[CONTEXT]]), torch.tensor(CONTEXT)
    for call in (decoder, run):
        with torch.no_grad():
            call(*before)
    calls = {"run": lambda: run(*token), "torch, one rank": lambda: decoder(*token)}
    return _timed({name: _together(call) for name, call in calls.items()}, rounds, 5)


def _layers(width: int, positions: int, layers: int) -> tuple[nn.Module, torch.Tensor]:
    hidden = 1376 * width // 512
    model = Layers(llama.Config(16, width, hidden, 8, 4, layers, batch=1, positions=positions)).eval()
    return model, torch.randn(1, positions, width)


def _imported(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return mt.from_torch(torch.export.export(copy.deepcopy(model), (x,)))


def _parallelized(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A copy as torch.distributed.tensor.parallel splits it."""
    model = _of_half_the_heads(model)
    plan = {name: ColwiseParallel() for name in BY_COLUMNS} | {name: RowwiseParallel() for name in BY_ROWS}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def _cut(model: nn.Module) -> nn.Module:
    """A copy with this rank's parts of the weights; what its second products give is summed over the ranks."""
    model, rank = _of_half_the_heads(model), dist.get_rank()
    for layer in model.layers:
        for names, dim in ((BY_COLUMNS, 0), (BY_ROWS, 1)):
            for linear in map(layer.get_submodule, names):
                linear.weight = nn.Parameter(linear.weight.detach().chunk(2, dim)[rank].contiguous())
        for linear in map(layer.get_submodule, BY_ROWS):
            linear.register_forward_hook(_summed)
    return model


def _summed(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output


def _of_half_the_heads(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.attn.heads //= 2
        layer.attn.key_heads //= 2
    return model


def _together(call: Run) -> Run:
    def from_a_barrier() -> object:
        dist.barrier()
        return call()

    return from_a_barrier


def _timed(calls: dict[str, Callable[[], torch.Tensor]], rounds: int, repeated: int) -> Times:
    """All calls give what the first gives; then their times."""
    with torch.no_grad():
        expected, *others = [call() for call in calls.values()]
        for other in others:
            torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-4)
        return interleaved(calls, rounds=rounds, calls=repeated)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(header("Models as they are served"))
    print(verdicts(rows()))
