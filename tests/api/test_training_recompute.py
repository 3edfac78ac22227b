"""What the backward pass computes again: the same bits, less memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.program.verify import peak_bytes
from mesh_tensor.runtime.backend import Memory
from tests.refusals import refusal

LAYERS = 3


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block(p) for _ in range(LAYERS)]), nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


DATA = {"x": {"data": 0}, "target": {"data": 0}}
MODEL = {f"blocks.{n}.{name}.weight": {"model": dim} for n in range(LAYERS) for name, dim in (("up", 0), ("down", 1))}
BATCH = torch.randn(256, 8), torch.randint(0, 5, (256,))


def _step(recompute, model=None, **options):
    torch.manual_seed(0)
    model = Net() if model is None else model
    return mt.training_step(model, F.cross_entropy, BATCH, lr=0.01, recompute=recompute, check=False, **options)


def _run(step, mesh, layout):
    run = mt.distribute_module(step, mesh, layout)
    losses = [run(*BATCH) for _ in range(2)]
    return run, [*losses, *run.state_dict().values()]


@pytest.mark.parametrize(
    ("mesh", "layout", "count", "ways"),
    [
        ({"data": 3}, DATA, 1, [("blocks.0", "blocks.2")]),
        ({"data": 2, "model": 2}, DATA | MODEL, 1, ["full", "selective"]),
        ({"data": 2}, DATA, 2, ["full"]),
    ],
    ids=["data", "both", "microbatches"],
)
def test_the_same_bits_and_less_memory(mesh, layout, count, ways):
    kept, expected = _run(_step(None, accumulate=count), mesh, layout)
    for recompute in ways:
        run, made = _run(_step(recompute, accumulate=count), mesh, layout)
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True)), recompute
        assert peak_bytes(run.program) < 0.8 * peak_bytes(kept.program)


def test_so_much_that_it_fits():
    """Each limit is kept with no more computed again than it takes: peaks fall, the last one is that of "full"."""
    runs = [_run(_step(limit), {"data": 2}, DATA) for limit in (None, 200_000, 80_000, "full")]
    assert all(torch.equal(one, other) for _, made in runs for one, other in zip(made, runs[0][1], strict=True))
    peaks = [peak_bytes(run.program) for run, _ in runs]
    assert peaks[0] > 1.2 * peaks[1] > 1.4 * peaks[2]
    assert peaks[2] == peaks[3]
    flops = [sum(step.flops for step in run.program.steps) for run, _ in runs[:3]]
    assert flops[0] < flops[1] < flops[2]


def test_patterns_mean_the_outermost():
    full, named = (str(_step(recompute).mod) for recompute in ("full", ["blocks.*"]))
    assert full == named


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x):
        return self.body(x)


def test_statistics_are_written_once():
    torch.manual_seed(0)
    model = Normed()
    expected, made = (_run(_step(recompute, model), {"data": 2}, DATA)[1] for recompute in (None, "full"))
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        ("most", "recompute='most'"),
        (["blocks.9"], "there is no value 'blocks.9'"),
        (["out.weight"], "'out.weight' names parameters alone"),
        ([3], "recompute=[3]"),
        (0, "recompute=0"),
        (1000, "the backward pass takes at least 16392 bytes that are kept"),
    ],
)
def test_what_is_refused(recompute, said):
    message = refusal(_step, recompute)
    assert said in message
    assert "fix:" in message


def test_a_model_without_layers():
    with pytest.raises(mt.MeshTensorError, match="of a model without layers"):
        _step("full", nn.Linear(8, 5))


def test_names_of_submodules_that_end_in_another():
    """Layers that are `nn.Sequential` give what their last submodule gives."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(8, 5))
    kept, names, pattern = (
        _run(_step(way, model), {"data": 2}, {"input": {"data": 0}, "target": {"data": 0}})
        for way in (None, ["0", "2"], ["?"])
    )
    assert peak_bytes(pattern[0].program) < peak_bytes(kept[0].program) * 0.8
    assert peak_bytes(names[0].program) < peak_bytes(kept[0].program)
    for mine, other, expected in zip(names[1], pattern[1], kept[1], strict=True):
        assert torch.equal(mine, expected)
        assert torch.equal(other, expected)


class Attention(nn.Module):
    """Attention of 4 heads with weights of its own: as many numbers as pairs of positions."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


def _of_attention(recompute, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 512, 32)
    model = nn.Sequential(*(Attention() for _ in range(4)))
    step = mt.training_step(model, F.mse_loss, (x, x.flip(1)), optimizer="sgd", recompute=recompute, check=False)
    run = mt.distribute_module(step, {"data": 2}, {"input": {"data": 0}, "target": {"data": 0}})
    made = []
    with monkeypatch.context() as patched:
        start = Memory.__init__
        patched.setattr(Memory, "__init__", lambda self, *given: (start(self, *given), made.append(self))[0])
        losses = [run(x, x.flip(1)) for _ in range(2)]
    return run, max(memory.peak_bytes for memory in made), [*losses, *run.state_dict().values()]


def test_weights_of_attention_are_computed_again(monkeypatch):
    """Of 512 positions they are most of what is kept; what is held while it runs is what was said."""
    first, held, expected = _of_attention(None, monkeypatch)
    assert held == peak_bytes(first.program)
    for recompute, share in (("selective", 0.8), ("auto", 0.8), ("full", 0.6)):
        run, less, made = _of_attention(recompute, monkeypatch)
        assert less == peak_bytes(run.program) < share * held
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True)), recompute
