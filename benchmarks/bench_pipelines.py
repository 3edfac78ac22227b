"""A GPT of 8 layers in 2 stages on two gloo ranks, 8 microbatches, 1F1B: a step to the gradients, beside
torch.distributed.pipelining's with the same cut; in 4 stages on four ranks, and in 2 stages per rank, interleaved; then
both of 2 stages split over two ranks each, heads and features, as torch.distributed.tensor.parallel splits them. Both
take turns; each row is there by the clock on the wall, which takes as many free cores as there are ranks, and by the
CPU time of rank 0's process.

python -m benchmarks.bench_pipelines
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models.gpt2 import GPT2, Config

from ._ranks import on_ranks
from ._timing import Row, Run, header, interleaved, row, seconds, verdicts

OURS, TORCH = "gloo ranks", "torch pipelining"
LAYERS, MICROBATCHES, ROWS = 8, 8, 2
WIDTHS = 128, 256
Times = dict[str, list[float]]
Clocks = dict[str, Times]


def rows(rounds: int = 7) -> list[Row]:
    """The comparison, measured."""
    cases = [
        *((f"width {width}", clocks, 0.95) for width, clocks in on_ranks(time_steps, rounds).items()),
        ("width 128, 4 stages on 4 ranks", on_ranks(time_step, 128, rounds, count=4), None),
        ("width 128, 4 stages, interleaved", on_ranks(time_step, 128, rounds, 2), None),
        ("width 128, 2-way tensor parallel", on_ranks(time_split, 128, rounds, count=4), None),
    ]
    return [
        row(f"{what}, {clock}", times, OURS, TORCH, must=must if clock == "wall" else None)
        for what, clocks, must in cases
        for clock, times in clocks.items()
    ]


class Loss(torch.nn.Module):
    """The model's loss."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy, the mean over all positions."""
        return F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())


class Part(torch.nn.Module):
    """One of torch's stages: as many layers as each has, the first behind the embeddings, the last before the head."""

    def __init__(self, model: GPT2, number: int, count: int) -> None:
        super().__init__()
        each = LAYERS // count
        self.blocks = model.blocks[number * each : (number + 1) * each]
        self.before = torch.nn.ModuleList([] if number else [model.wte, model.wpe])
        self.after = torch.nn.ModuleList([model.norm, model.head] if number == count - 1 else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens to what goes between the stages, or that to logits."""
        if len(self.before):
            words, places = self.before
            x = words(x) + places(torch.arange(x.shape[1]))
        for layer in [*self.blocks, *self.after]:
            x = layer(x)
        return x


def time_steps(rounds: int) -> dict[int, Clocks]:
    """By width, `time_step`."""
    return {width: time_step(width, rounds) for width in WIDTHS}


def time_step(width: int, rounds: int, chunks: int = 1) -> Clocks:
    """On each rank, with `chunks` stages: the loss and the gradients of a batch."""
    model, rank, ranks = _model(width), dist.get_rank(), dist.get_world_size()
    count = ranks * chunks
    parts = {number: Part(model, number, count) for number in range(rank, count, ranks)}
    stages = [PipelineStage(part, number, count, torch.device("cpu")) for number, part in parts.items()]
    return _times(model, parts, stages, count, [{"d": 1}] * ranks, {}, rounds)


def time_split(width: int, rounds: int) -> Clocks:
    """On each of four ranks, two per stage."""
    model, mesh = _model(width), init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "t"))
    number = dist.get_rank() // 2
    part = Part(copy.deepcopy(model), number, 2)
    columns, sums = ColwiseParallel(), RowwiseParallel()
    plan = {"attn.q": columns, "attn.k": columns, "attn.v": columns, "attn.proj": sums, "fc": columns, "proj": sums}
    for block in part.blocks:
        parallelize_module(block, mesh["t"], plan)
        block.attn.heads //= 2
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    columns_of = {f"*.{name}.{kind}": {"t": 0} for name in ("q", "k", "v", "fc") for kind in ("weight", "bias")}
    layouts = {**columns_of, "*.proj.weight": {"t": 1}}
    return _times(model, {number: part}, [stage], 2, [{"t": 2}] * 2, layouts, rounds)


def _model(width: int) -> GPT2:
    return GPT2(Config(vocabulary=512, width=width, heads=4, layers=LAYERS, batch=ROWS, positions=64))


def _times(
    model: GPT2,
    parts: dict[int, Part],
    stages: list[PipelineStage],
    count: int,
    meshes: list[dict[str, int]],
    layouts: dict,
    rounds: int,
) -> Clocks:
    """By clock the times of both on this rank, which has these of `count` stages, in turns, once their losses and
    gradients agree."""
    tokens, labels = (torch.randint(512, (ROWS * MICROBATCHES, 64)) for _ in range(2))
    module = mt.from_torch(torch.export.export(Loss(model), (tokens[:ROWS], labels[:ROWS])))
    ours = mt.pipeline(
        module,
        {f"m{i}": mesh for i, mesh in enumerate(meshes)},
        [f"model.blocks.{LAYERS * (i + 1) // count - 1}" for i in range(count - 1)],
        layouts,
        microbatches=MICROBATCHES,
        schedule="1f1b" if len(stages) == 1 else "interleaved",
        train=True,
        ranks=True,
    )

    def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    schedule: Any = (
        Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of)
        if len(stages) == 1
        else ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)  # type: ignore[arg-type]
    )

    def theirs() -> list[torch.Tensor]:
        for part in parts.values():
            part.zero_grad()
        losses: list[torch.Tensor] = []
        given = [tokens] if 0 in parts else []
        schedule.step(*given, target=labels, losses=losses) if count - 1 in parts else schedule.step(*given)
        return losses

    losses, loss = theirs(), ours(tokens, labels)
    if count - 1 in parts:
        torch.testing.assert_close(torch.stack(losses).mean().detach(), loss, rtol=1e-4, atol=1e-4)
    gradients = ours.gradients()
    number, part = next(iter(parts.items()))
    name = f"model.blocks.{LAYERS // count * number}.fc.weight"
    found: Any = part.blocks[0].fc.weight.grad
    assert found is not None
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    torch.testing.assert_close(gradients[module.names[name]], whole, rtol=1e-3, atol=1e-5)
    spent: list[float] = []

    def by_both(run: Run, calls: int) -> float:
        dist.barrier()  # or one waits for what the other rank still does of the turn before
        before = time.process_time()
        seconds_ = seconds(run, calls)
        spent.append(time.process_time() - before)
        return seconds_

    runs: dict[str, Run] = {OURS: lambda: ours(tokens, labels), TORCH: theirs}
    wall = interleaved(runs, rounds, clock=by_both)
    turns = [name for turn in range(rounds) for name in list(runs)[:: -1 if turn % 2 else 1]]
    cpu = {name: [each for whose, each in zip(turns, spent, strict=True) if whose == name] for name in runs}
    return {"wall": wall, "CPU": cpu}


def main() -> None:
    """Print the table."""
    what = "GPT, 8 layers, 8 microbatches of 2 x 64, 2 stages, 1F1B, gradients"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    print(f"{header('Pipelines')}{what}\n")
    print(verdicts(rows(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
