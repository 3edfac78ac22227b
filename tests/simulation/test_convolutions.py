"""What convolutions hold beside their results, and what their gradients take."""

from dataclasses import replace

import pytest
import torch

import mesh_tensor as mt
from kernels.models import convnet
from mesh_tensor.base.machine import Memory, Roofline
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


def _convolved(machine, data, made, side=32):
    """Seconds of a convolution, and of the gradients of its data and its weights."""

    class Convolved(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv2d(data, made, 3, padding=1, bias=False)

        def forward(self, x):
            return self.first(x * x).square().sum()

    module = mt.from_torch(torch.export.export(Convolved(), (torch.zeros(4, data, side, side),)), check=False)
    (x,) = (p.name_hint for p in module.mod["main"].params if p.name_hint not in module.params)
    step = mt.gradient(module, wrt=[x, *module.params])
    run = mt.distribute_module(step.mod, {"x": 1}, {}, weights=module.params)
    steps = [step for step in mt.simulate(run, machine).steps if "conv2d" in step.kind]
    return [step.end - step.start for step in steps]


def test_channels_that_fill_no_block_take_as_much_as_those_that_do():
    classes = {"nn.conv2d": Roofline(flops=1.0, again=0.5), "gradient of nn.conv2d": Roofline(flops=0.5, again=0.5)}
    memory = (Memory(2**34, 1e10),)
    machine = mt.Machine("blocks", {"float32": 1e11}, memory, classes=classes, channel_block=16)
    forward, *gradients = _convolved(machine, 17, 33)
    positions, taps = 4 * 32 * 32, 9
    operations = 2 * positions * 32 * 48 * taps
    copied = 4 * (positions * (32 + 48) + 32 * 48 * taps)
    assert forward == pytest.approx(operations / 1e11 + copied / 5e9)
    assert gradients == pytest.approx(2 * [2 * operations / 1e11 + copied / 5e9])
    assert _convolved(machine, 32, 48) == pytest.approx([forward, *gradients])
    assert _convolved(replace(machine, channel_block=None), 32, 48)[0] == pytest.approx(operations / 1e11)


def test_few_channels_of_the_data_are_filled_for_their_own_gradient_only():
    classes = {"nn.conv2d": Roofline(again=1.0)}
    memory = (Memory(2**34, 1e20),)  # copies take nothing
    machine = mt.Machine("blocks", {"float32": 1e11}, memory, classes=classes, channel_block=16)
    forward, *gradients = _convolved(machine, 3, 16)
    operations = 2 * 4 * 32 * 32 * 3 * 16 * 9
    assert forward == pytest.approx(operations / 1e11)
    assert sorted(gradients) == pytest.approx([operations / 1e11, operations / 1e11 * 16 / 3])
