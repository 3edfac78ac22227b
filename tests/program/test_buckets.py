"""Gradients go in buckets: few collectives, and the bits that each by itself would give."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.base.machine import Link
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.program.steps import WaitStep
from mesh_tensor.program.verify import peak_bytes

DATA = {"x": {"data": 0}, "target": {"data": 0}}
TENSOR = {"up.weight": {"model": 0}, "up.bias": {"model": 0}, "down.weight": {"model": 1}}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(12, 18), nn.Linear(18, 18), nn.Linear(18, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.mid(torch.tanh(self.up(x)))))


def _step(**options):
    torch.manual_seed(0)
    x, y = torch.randn(12, 12), torch.randint(0, 6, (12,))
    return mt.training_step(MLP(), F.cross_entropy, (x, y), check=False, lr=0.05, **options), x, y


def _sent(run):
    """What goes over the batch's axes."""
    collectives = [step for step in run.program.collectives if step.bytes and "model" not in step.axes]
    return Counter((step.kind, *step.axes) for step in collectives)


@pytest.mark.parametrize(
    ("mesh", "layout", "zero", "most"),
    [
        ({"data": 2}, DATA, 0, 2),
        ({"data": 3}, DATA, 1, 4),
        ({"data": 5}, DATA, 1, 5),  # what five devices don't divide evenly stays whole, and is reduced with the loss
        ({"data": 2, "model": 2}, DATA | TENSOR, 0, 2),
        ({"data": 2, "model": 2}, DATA | TENSOR, 2, 10),
        ({"pod": 2, "data": 2}, {"x": {"pod": 0, "data": 0}, "target": {"pod": 0, "data": 0}}, 1, 5),
        ({"data": 2}, DATA, 3, 4),
        ({"data": 4}, DATA, 3, 9),
        ({"data": 2, "model": 2}, DATA | TENSOR, 3, 9),
    ],
    ids=["data", "zero 1", "uneven", "both", "both, zero 2", "two axes", "zero 3", "uneven, zero 3", "both, zero 3"],
)
def test_the_bits_of_each_by_itself(mesh, layout, zero, most):
    step, x, y = _step(zero=zero, clip_norm=1.0)
    together, alone = (mt.distribute_module(step, mesh, layout, overlap=o, poison=True) for o in ("auto", "off"))
    for _ in range(2):
        assert torch.equal(together(x, y), alone(x, y))
    expected = alone.state_dict()
    for name, tensor in together.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    assert sum(_sent(together).values()) <= most < sum(_sent(alone).values())
    assert sum(step.bytes for step in together.program.steps) <= 1.1 * sum(step.bytes for step in alone.program.steps)


def _machine(start, rate):
    """One that computes so slowly that all work is split."""
    links = (Link("link", None, rate=rate, start=start),)
    return replace(CPU, name="another link", links=links, flops={"float32": 1e6})


def test_a_full_bucket_goes_before_the_backward_pass_ends():
    full = 4 * 18 * 18  # 30 times what the link sends while a collective starts
    step, x, y = _step()
    run = mt.distribute_module(step, {"data": 2}, DATA, machine=_machine(1e-6, full / 30 / 1e-6))
    words = [made.words for made in run.program.steps if made.uses]
    first = next(n for n, said in enumerate(words) if said.startswith("all_reduce(bucket"))
    assert any("matmul" in said for said in words[first:])
    assert _sent(run)["all_reduce", "data"] == 3
    assert run(x, y).isfinite()


def test_large_tensors_go_by_themselves():
    copied = 4 * 18 * 18 - 1  # read and written while a collective starts
    step, _, _ = _step()
    run = mt.distribute_module(step, {"data": 2}, DATA, machine=_machine(2 * copied / CPU.main_memory.rate, 1e9))
    alone = [made for made in run.program.collectives if "together" not in made.reason]
    assert (18, 18) in [run.program.values[made.src].shape for made in alone]
    assert _sent(run)["all_reduce", "data"] == 3


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_weights_of_a_layer_come_together_while_the_one_before_is_computed():
    """Eight products' are on their way while the eight before are computed, and none before that."""
    torch.manual_seed(0)
    model, x, y = Deep(), torch.randn(4, 8), torch.randn(4, 8)
    step = mt.training_step(model, F.mse_loss, (x, y), optimizer="sgd", lr=0.1, zero=3, check=False)
    run = mt.distribute_module(step, {"data": 2}, DATA, poison=True)
    for _ in range(2):
        assert float(run(x, y)) > 0
    steps = run.program.steps
    sent = [(n, one) for n, one in enumerate(steps) if one.starts is not None and one.starts.kind == "all_gather"]
    assert all(one.src.startswith("bucket") for _, one in sent)
    waits = {one.collective.dst: n for n, one in enumerate(steps) if isinstance(one, WaitStep)}
    for start, one in sent[1:]:
        assert 4 <= len([s for s in steps[start : waits[one.dst]] if s.is_long]) <= 16, one.words
    for (_, one), (later, _) in zip(sent[1:], sent[3:], strict=False):
        assert waits[one.dst] < later
    assert len(sent) <= 9
    (launch,) = run._module._launches
    assert launch._run.peak_bytes == peak_bytes(run.program)


def test_what_is_held_is_what_the_run_measures():
    step, x, y = _step(zero=1)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    run(x, y)
    (launch,) = run._module._launches
    assert launch._run.peak_bytes == peak_bytes(run.program)


def test_buckets_of_devices_that_compute_the_same():
    """Each has its own, on which the collective works in place."""
    torch.manual_seed(0)
    model, x, y = MLP(), torch.randn(12, 12), torch.randint(0, 6, (12,))
    step = mt.training_step(model, F.cross_entropy, (x, y), accumulate=2, optimizer="sgd", check=False)
    run = mt.distribute_module(step, {"data": 2, "model": 2}, DATA)
    assert any(one.src.startswith("bucket") and one.bytes for one in run.program.collectives)
    torch.testing.assert_close(run(x, y), F.cross_entropy(model(x), y).detach())
