"""What is put side by side and taken apart again is what it was."""

import torch
from torch import nn
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep

from .test_hindered import moved
from .test_manual import manual_module


class TwoLayers(nn.Module):
    """Biases of two layers that are put side by side for one function, as torch's attention takes them, which takes
    them apart `times` times."""

    def __init__(self, times=1, returned=False):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(12, 8))
        self.one, self.other = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))
        self.times, self.returned = times, returned

    def forward(self, x):
        one, other = self.one, self.other
        for _ in range(self.times):
            together = torch.cat((one, other))
            one, other = together.chunk(2)
        made = (x @ self.first.T + one) * (x @ self.second.T + other)
        return (made, together) if self.returned else made

    layout = {"first": {"x": 0}, "second": {"x": 0}, "one": {"x": 0}, "other": {"x": 0}}


def test_biases_stay_where_they_are():
    x = torch.randn(5, 8)
    for times in (1, 3):
        assert moved(TwoLayers(times), (x,), TwoLayers.layout) == []


def test_what_is_returned_is_put_together():
    torch.manual_seed(0)
    model, given = TwoLayers(returned=True).eval(), (torch.randn(5, 8),)
    made = mt.from_torch(torch.export.export(model, given), check=False)
    ran = mt.distribute_module(made.mod, {"x": 3}, model.layout, weights=made.params, poison=True)
    for result, meant in zip(ran(*given), model(*given), strict=True):
        torch.testing.assert_close(result, meant.detach(), rtol=1e-4, atol=1e-4)
    assert any(isinstance(step, CollectiveStep) for step in ran.program.steps)


def test_other_parts_are_made():
    """Of other sizes than those that were put together."""

    class Others(TwoLayers):
        def forward(self, x):
            one, other = torch.cat((self.one, self.other)).split([8, 16])
            return x @ self.first.T[:, :8] + one, x @ torch.cat((self.second.T, self.first.T[:, 8:]), 1) + other

    torch.manual_seed(0)
    model, given = Others().eval(), (torch.randn(5, 8),)
    made = mt.from_torch(torch.export.export(model, given), check=False)
    ran = mt.distribute_module(made.mod, {"x": 2}, model.layout, weights=made.params, poison=True)
    for result, meant in zip(ran(*given), model(*given), strict=True):
        torch.testing.assert_close(result, meant.detach(), rtol=1e-4, atol=1e-4)


def test_devices_have_their_own_of_what_they_have_alike():
    """What is put beside a tile in a manual computation is every device's own then."""

    def body(emit, tile, whole):
        parts = emit(relax.op.split(emit(relax.op.concat([tile, whole], 0)), 2, 0))
        return emit(relax.op.exp(emit(relax.TupleGetItem(parts, 1))))

    mod = manual_module(body, [(8, 4), (4, 4)], {"x": 2}, [{"x": 0}, {}], {"x": 0})
    tiles, whole = torch.randn(8, 4), torch.randn(4, 4)
    run = mt.distribute_module(mod, {"x": 2}, {}, poison=True)
    torch.testing.assert_close(run(tiles, whole), torch.cat([whole.exp()] * 2))
