"""Train a small GPT on a text that comes with Python, on a virtual mesh or on ranks, beside the same in plain torch.

python -m examples.train_gpt --mesh data=2,model=2 --zero 1
torchrun --nproc-per-node 4 -m examples.train_gpt --mesh data=2,model=2

`--picture curves.svg` draws the losses of both.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor import strategies

CONFIG = gpt2.Config(vocabulary=256, width=64, heads=4, layers=2, batch=16, positions=64)


def batches(seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bytes of Python's help texts, and the bytes that follow them."""
    text = torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONFIG.positions - 1, (CONFIG.batch,), generator=generator)
        rows = torch.stack([text[start : start + CONFIG.positions + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy per byte."""
    return F.cross_entropy(logits.reshape(-1, CONFIG.vocabulary), target.reshape(-1))


def train(mesh: dict[str, int], steps: int, zero: int = 0) -> list[tuple[float, float]]:
    """The losses on the mesh, and those of torch."""
    torch.manual_seed(0)
    model = gpt2.build(CONFIG)
    warmup = {"lr": 3e-3, "schedule": lambda step: min(1.0, (step + 1) / 20)}
    step = mt.training_step(model, loss_of, next(batches()), zero=zero, clip_norm=1.0, **warmup)
    layouts = []
    if "data" in mesh:
        layouts.append(strategies.data_parallel(step))
    if "model" in mesh:
        layouts.append(strategies.tensor_parallel(step, vocabulary=True))
    on_ranks = torch.distributed.is_initialized()
    where = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)) if on_ranks else mesh
    run = mt.distribute_module(step, where, strategies.combine(*layouts))

    theirs = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses = []
    for _, (ids, target) in zip(range(steps), batches(), strict=False):
        optimizer.zero_grad()
        loss = loss_of(theirs(ids), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append((run(ids, target).item(), loss.item()))
    return losses


WIDTH, HEIGHT, MARGIN = 640, 320, 48


def picture(losses: Sequence[tuple[float, float]], title: str) -> str:
    """The curves as SVG: torch's wide and pale, that of the mesh thin and dark on top of it."""
    top = max(max(pair) for pair in losses)
    across, up = (WIDTH - 2 * MARGIN) / max(1, len(losses) - 1), (HEIGHT - 2 * MARGIN) / top
    texts = [
        (MARGIN, MARGIN - 20, "start", title),
        (WIDTH - MARGIN, MARGIN, "end", "pale: torch, dark: mesh_tensor"),
        *((MARGIN - 8, HEIGHT - MARGIN - up * loss + 4, "end", f"{loss}") for loss in range(int(top) + 1)),
        *((MARGIN + across * n, HEIGHT - MARGIN + 18, "middle", f"{n}") for n in range(0, len(losses) + 1, 50)),
        (WIDTH / 2, HEIGHT - 8, "middle", "step"),
    ]
    curves = [
        " ".join(f"{MARGIN + across * n:.1f},{HEIGHT - MARGIN - up * pair[which]:.2f}" for n, pair in enumerate(losses))
        for which in (1, 0)
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" fill="none" stroke="black"/>',
        *(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{where}">{text}</text>' for x, y, where, text in texts),
        f'<polyline points="{curves[0]}" fill="none" stroke="#f2a65a" stroke-width="6"/>',
        f'<polyline points="{curves[1]}" fill="none" stroke="#1d3557" stroke-width="1.5"/>',
        "</svg>\n",
    ])  # fmt: skip


def main() -> None:
    """Print the losses now and then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="data=2", help="axes `data` and `model` with their sizes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="draw the losses of both into this file, as SVG")
    given = parser.parse_args()
    mesh = {axis: int(size) for axis, _, size in (part.partition("=") for part in given.mesh.split(","))}
    first = int(os.environ.get("RANK", 0)) == 0
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    losses = train(mesh, given.steps, given.zero)
    if first and given.picture:
        zero = f", ZeRO-{given.zero}" if given.zero else ""
        given.picture.write_text(picture(losses, f"A small GPT on {given.mesh}{zero}: cross-entropy per byte"))
    for step, (ours, theirs) in enumerate(losses):
        if first and (step % 20 == 0 or step == given.steps - 1):
            print(f"step {step:4d}  on {mesh}: {ours:.5f}  torch: {theirs:.5f}")
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
