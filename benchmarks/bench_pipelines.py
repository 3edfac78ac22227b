"""A GPT of 8 layers in 2 stages on two gloo ranks, 8 microbatches, 1F1B: a step to the gradients, beside
torch.distributed.pipelining's with the same cut. Both take turns.

python -m benchmarks.bench_pipelines
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models.gpt2 import GPT2, Config

from ._ranks import on_ranks
from ._timing import Row, header, interleaved, row, verdicts

OURS, TORCH = "gloo ranks", "torch pipelining"
Times = dict[str, list[float]]


def rows(rounds: int = 9) -> list[Row]:
    """The comparison, measured."""
    what = "GPT, 8 layers of width 128, 8 microbatches of 2 x 64, 2 stages, 1F1B, gradients"
    return [row(what, on_ranks(time_step, 128, rounds), OURS, TORCH, must=0.95)]


class Loss(torch.nn.Module):
    """The model's loss."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy, the mean over all positions."""
        return F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())


class Part(torch.nn.Module):
    """One of torch's two stages: the first layers behind the embeddings, or the last ones and the head."""

    def __init__(self, model: GPT2, last: bool) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.last = last
        self.blocks = model.blocks[half:] if last else model.blocks[:half]
        self.before = torch.nn.ModuleList([] if last else [model.wte, model.wpe])
        self.after = torch.nn.ModuleList([model.norm, model.head] if last else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens to what goes between the stages, or that to logits."""
        if not self.last:
            words, places = self.before
            x = words(x) + places(torch.arange(x.shape[1]))
        for layer in [*self.blocks, *self.after]:
            x = layer(x)
        return x


def time_step(width: int, rounds: int, microbatches: int = 8, rows: int = 2) -> Times:
    """On each of two ranks: the loss and the gradients of a batch."""
    config = Config(vocabulary=512, width=width, heads=4, layers=8, batch=rows, positions=64)
    model, rank = GPT2(config), dist.get_rank()
    tokens, labels = (torch.randint(512, (rows * microbatches, 64)) for _ in range(2))
    module = mt.from_torch(torch.export.export(Loss(model), (tokens[:rows], labels[:rows])))
    ours = mt.pipeline(
        module,
        {"m0": {"d": 1}, "m1": {"d": 1}},
        {"m0": ["model.blocks.3"], "m1": ["model.blocks.7"]},
        microbatches=microbatches,
        schedule="1f1b",
        train=True,
        ranks=True,
    )
    part = Part(model, last=rank == 1)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))

    def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)

    def theirs() -> list[torch.Tensor]:
        part.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(tokens) if rank == 0 else schedule.step(target=labels, losses=losses)
        return losses

    losses, loss = theirs(), ours(tokens, labels)
    if rank == 1:
        torch.testing.assert_close(torch.stack(losses).mean().detach(), loss, rtol=1e-4, atol=1e-4)
    gradients = ours.gradients()
    name = f"model.blocks.{7 * rank}.fc.weight"
    found = part.blocks[-1 * rank].fc.weight.grad
    assert found is not None
    torch.testing.assert_close(gradients[module.names[name]], found, rtol=1e-3, atol=1e-5)
    return interleaved({OURS: lambda: ours(tokens, labels), TORCH: theirs}, rounds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    print(header("Pipelines"))
    print(verdicts(rows(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
