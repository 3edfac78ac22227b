"""Heads that what is added to their scores doesn't hinder; and sums that several take, completed once before."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt

BATCH, LENGTH, HEADS, SIZE = 4, 6, 4, 8
WIDTH = HEADS * SIZE


def checked(model, x, shardings):
    """The plan's collectives, of a run that gives torch's results."""
    model = model.eval()
    module = mt.from_torch(torch.export.export(model, (x,)))
    run = mt.distribute_module(module, {"x": 2}, shardings, poison=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    return [step.kind for step in run.program.steps if getattr(step, "bytes", 0)]


class Slopes(nn.Module):
    """Attention with a slope per head over positions, of a fused layer, as in Bloom and MPT."""

    def __init__(self, tiled):
        super().__init__()
        self.qkv, self.out, self.tiled = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), tiled

    def forward(self, x):
        parts = self.qkv(x).view(BATCH, LENGTH, HEADS, 3, SIZE).unbind(3)
        q, k, v = (part.transpose(1, 2).reshape(-1, LENGTH, SIZE) for part in parts)
        slopes = torch.pow(0.5, torch.arange(1, HEADS + 1)).view(HEADS, 1, 1) * torch.arange(LENGTH)
        several = slopes.tile(BATCH, 1, 1) if self.tiled else slopes.expand(BATCH, HEADS, 1, LENGTH).flatten(0, 1)
        made = (q @ k.transpose(1, 2) * 0.3 + several).softmax(-1) @ v
        return self.out(made.view(BATCH, HEADS, LENGTH, SIZE).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("tiled", [True, False])
def test_heads_with_slopes(tiled):
    split = {"qkv.weight": {"x": 0}, "qkv.bias": {"x": 0}, "out.weight": {"x": 1}}
    assert checked(Slopes(tiled), torch.randn(BATCH, LENGTH, WIDTH), split) == ["all_reduce"]


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}])
@pytest.mark.parametrize("dims", [{"x": 0}, {"x": 1}])
@pytest.mark.parametrize("times", [(3, 1), (1, 2), (2, 3), (2, 1, 2)])
def test_tiles_of_split_dims(mesh, dims, times):
    class Tiled(nn.Module):
        def forward(self, x, row):
            return x.tile(times), row.tile(times)

    given = torch.randn(5, 4), torch.randn(1, 4)
    module = mt.from_torch(torch.export.export(Tiled(), given))
    for layouts in ({"x": dims}, {"x": dims, "row": {"x": 1}}):
        results = mt.distribute_module(module, mesh, layouts, poison=True)(*given)
        for result, value in zip(results, given, strict=True):
            assert torch.equal(result, value.tile(times))


class SideBySide(nn.Module):
    """Two layers with attention's and MLP's places taken by pairs of matrices side by side, each behind a norm that is
    written with two differences, as in Cohere; what they begin with is a pending sum, too."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in (0, 2):
            mean = x.mean(-1, keepdim=True)
            normed = (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
            one, other = (self.downs[n](self.ups[n](normed).relu()) for n in (layer, layer + 1))
            x = x + one + other
        return x


def test_what_several_take_is_completed_once():
    split = {"first.weight": {"x": 1}, "ups.*.weight": {"x": 0}, "downs.*.weight": {"x": 1}}
    assert checked(SideBySide(), torch.randn(BATCH, LENGTH, WIDTH), split) == ["all_reduce"] * 3
