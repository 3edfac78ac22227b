"""What convolutions hold beside their results, and what their gradients take."""

import pytest
import torch

import mesh_tensor as mt
from kernels.models import convnet
from mesh_tensor.program.verify import peak_bytes


def test_convolutions_hold_more_where_they_copy():
    config = convnet.Config(4, 3, 16, 16)
    x = torch.zeros(4, 3, 16, 16)
    module = mt.from_torch(torch.export.export(convnet.build(config), (x,)), check=False)
    run = mt.distribute_module(module.mod, {"x": 1}, {}, weights=module.params)
    gpu, cpu = mt.simulate(run, "h100"), mt.simulate(run, "cpu")
    assert gpu.peak_bytes == max(gpu.held) == peak_bytes(run.program)
    # While the second one runs: weights and input, its data and result, and both and its weights in blocks; of these,
    # the result in blocks stays till it is copied.
    made = 4 * 4 * 32 * 8 * 8
    data, weights = 4 * 4 * 16 * 16 * 16, 4 * 32 * 16 * 3 * 3
    given = sum(run.program.stored[name].tile_bytes for name in run.program.inputs)
    assert cpu.peak_bytes == max(cpu.held) == given + data + made + (data + weights + made) - made
    assert mt.Machine.from_text(mt.Machine.preset("cpu").to_text()).channel_block == 16


def test_the_gradient_of_an_operand_takes_a_convolution():
    class Squares(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (torch.nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))

        def forward(self, x):
            return self.second(self.first(x)).square().sum()

    module = mt.from_torch(torch.export.export(Squares(), (torch.zeros(4, 16, 32, 32),)), check=False)
    run = mt.distribute_module(mt.gradient(module).mod, {"x": 1}, {}, weights=module.params)
    taken = {group.kind: group for group in mt.simulate(run, "h100").groups()}
    forward, backward = taken["nn.conv2d"], taken["gradient of nn.conv2d"]
    assert (forward.count, backward.count) == (2, 3)  # nobody wants that of the first one's data
    assert backward.seconds / 3 == pytest.approx(forward.seconds / 2)
