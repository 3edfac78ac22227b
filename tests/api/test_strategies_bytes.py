"""Strategies send what they are known to: the bytes that a device receives in a step, against closed forms.

Around a ring of n devices a device receives (n - 1) / n of what is gathered or scattered, and twice that of what is
reduced for all. A GPT of two layers is trained; its activations are (BATCH, POSITIONS, WIDTH), more rows than weights
have, so that moving weights to save an activation would not pay on any machine.
"""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor import strategies
from mesh_tensor.program.steps import CollectiveStep

BATCH, POSITIONS, WIDTH, LAYERS, CLASSES, FLOAT = 16, 32, 32, 2, 480, 4
ACTIVATION = BATCH * POSITIONS * WIDTH * FLOAT
PLACES = POSITIONS * WIDTH * FLOAT  # the table of positions: all of it is looked up
SUMS = 4 * LAYERS  # of a tensor-parallel step: after attention and after the MLP, forward and backward


def _loss(logits, target):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


def _trained(classes):
    torch.manual_seed(0)
    config = gpt2.Config(
        vocabulary=classes, width=WIDTH, heads=4, layers=LAYERS, batch=BATCH, positions=POSITIONS, fused=False
    )
    ids, target = torch.randint(classes, (2, BATCH, POSITIONS)).unbind()
    return mt.training_step(gpt2.build(config), _loss, (ids, target), check=False)


@pytest.fixture(scope="module")
def gpt():
    return _trained(CLASSES)


def _received(step, mesh, *layouts):
    """Bytes by what sends them, and over which axes."""
    run = mt.distribute_module(step, mesh, strategies.combine(*layouts))
    found = Counter()
    for one in run.program.steps:
        if isinstance(one, CollectiveStep) and one.bytes:
            found[(one.kind, *one.axes)] += one.bytes
    return found


def _gathered(nbytes, devices):
    return nbytes * Fraction(devices - 1, devices)


def _reduced(nbytes, devices):
    return 2 * _gathered(nbytes, devices)


def _numbers(devices):
    """The loss, and how many targets count, reduced; a ring takes whole numbers."""
    return math.ceil(_reduced(1, devices)) * (FLOAT + 8)


def _sizes(step):
    return {theirs: step.state[ours].numel() for theirs, ours in step.names.items() if not theirs.startswith("opt.")}


def _parameters(step, layout=(), devices=1, without=()):
    """Bytes of what a device has of the parameters, of which some are split over `devices`."""
    split = {name for name in layout if layout[name]}
    sizes = {name: size for name, size in _sizes(step).items() if name not in without}
    return FLOAT * sum(size // (devices if name in split else 1) for name, size in sizes.items())


@pytest.mark.parametrize("devices", [2, 4])
def test_data(gpt, devices):
    """Every gradient is reduced once."""
    expected = {("all_reduce", "data"): _reduced(_parameters(gpt), devices) + _numbers(devices)}
    assert _received(gpt, {"data": devices}, strategies.data_parallel(gpt)) == expected


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("level", [1, 2])
def test_zero_of_what_the_optimizer_keeps(gpt, level, devices):
    """Gradients are scattered and new parameters gathered, as much as data parallelism; but what was looked up of
    positions is summed for all, before each device adds it to its rows."""
    found = _received(strategies.zero(gpt, level), {"data": devices}, strategies.data_parallel(gpt))
    rest = _parameters(gpt, without=["wpe.weight"])
    assert found == {
        ("reduce_scatter", "data"): _gathered(rest, devices),
        ("all_gather", "data"): _gathered(rest + PLACES, devices),
        ("all_reduce", "data"): _reduced(PLACES, devices) + _numbers(devices),
    }


@pytest.mark.parametrize("devices", [2, 4])
def test_zero_of_parameters(gpt, devices):
    """Weights are gathered for the forward pass, and once more on the way back, but for those that are there still
    (the last layer's), or are not needed (biases', and tables')."""
    found = _received(strategies.zero(gpt, 3), {"data": devices}, strategies.data_parallel(gpt))
    whole, rest = _parameters(gpt), _parameters(gpt, without=["wpe.weight"])
    assert found.pop(("reduce_scatter", "data")) == _gathered(rest, devices)
    assert found.pop(("all_reduce", "data")) == _reduced(PLACES, devices) + _numbers(devices)
    assert found.keys() == {("all_gather", "data")}
    assert _gathered(whole, devices) <= found.total() <= _gathered(2 * whole, devices)


@pytest.mark.parametrize("devices", [2, 4])
def test_tensor(gpt, devices):
    expected = {("all_reduce", "model"): _reduced(SUMS * ACTIVATION, devices)}
    assert _received(gpt, {"model": devices}, strategies.tensor_parallel(gpt)) == expected


@pytest.mark.parametrize("devices", [2, 4])
def test_tensor_with_the_vocabulary(gpt, devices):
    """More are the tables, which have no more rows than are looked up, and the gradient of what the logits are made of;
    and of each token the largest logit, the sum of all, the target's, and the sum of their gradients."""
    token = BATCH * POSITIONS * FLOAT
    expected = {
        ("all_reduce", "model"): _reduced((SUMS + 1) * ACTIVATION + 4 * token, devices),
        ("all_gather", "model"): _gathered(CLASSES * WIDTH * FLOAT + PLACES, devices),
    }
    assert _received(gpt, {"model": devices}, strategies.tensor_parallel(gpt, vocabulary=True)) == expected


def test_tensor_with_a_vocabulary_of_more_rows_than_are_looked_up():
    """What is looked up of it is summed."""
    expected = {
        ("all_reduce", "model"): _reduced((SUMS + 2) * ACTIVATION + 4 * BATCH * POSITIONS * FLOAT, 2),
        ("all_gather", "model"): _gathered(PLACES, 2),
    }
    step = _trained(4096)
    assert _received(step, {"model": 2}, strategies.tensor_parallel(step, vocabulary=True)) == expected


def test_tensor_of_a_part_of_a_model(gpt):
    layout = {n: one for n, one in strategies.tensor_parallel(gpt).items() if n.startswith("blocks.1.")}
    expected = {("all_reduce", "model"): _reduced(4 * ACTIVATION, 2)}
    assert _received(gpt, {"model": 2}, layout) == expected


def _seen_in_part(step, layout):
    """Bytes of the parameters of which devices see some positions: those that tensor parallelism does not split."""
    return _parameters(step, without=[name for name in layout if layout[name]])


@pytest.mark.parametrize("devices", [2, 4])
def test_sequence(gpt, devices):
    """Instead of being reduced, activations are scattered and gathered; a device has the gradient of its positions."""
    tensor = strategies.tensor_parallel(gpt)
    expected = {
        ("all_gather", "model"): _gathered(SUMS * ACTIVATION + PLACES, devices),
        ("reduce_scatter", "model"): _gathered(SUMS * ACTIVATION, devices),
        ("all_reduce", "model"): _reduced(_seen_in_part(gpt, tensor) - PLACES, devices) + _numbers(devices),
    }
    assert _received(gpt, {"model": devices}, tensor, strategies.sequence_parallel(gpt)) == expected


@pytest.mark.parametrize("devices", [2, 4])
def test_context(gpt, devices):
    """Keys and values are gathered, their gradients are summed where they go, and each device attends from its own
    positions; the gradient of the table of positions is gathered."""
    expected = {
        ("all_gather", "context"): _gathered(2 * LAYERS * ACTIVATION + PLACES, devices),
        ("reduce_scatter", "context"): _gathered(2 * LAYERS * ACTIVATION, devices),
        ("all_reduce", "context"): _reduced(_parameters(gpt) - PLACES, devices) + _numbers(devices),
    }
    assert _received(gpt, {"context": devices}, strategies.context_parallel(gpt)) == expected


def test_data_and_tensor(gpt):
    """Each by itself, of half of the rows and of what a device has of the parameters."""
    tensor = strategies.tensor_parallel(gpt)
    expected = {
        ("all_reduce", "model"): _reduced(SUMS * ACTIVATION // 2, 2),
        ("all_reduce", "data"): _reduced(_parameters(gpt, tensor, 2), 2) + _numbers(2),
    }
    assert _received(gpt, {"data": 2, "model": 2}, strategies.data_parallel(gpt), tensor) == expected


def test_data_and_sequence(gpt):
    tensor = strategies.tensor_parallel(gpt)
    found = _received(
        gpt,
        {"data": 2, "model": 2},
        strategies.data_parallel(gpt),
        tensor,
        strategies.sequence_parallel(gpt, also={"data": 0}),
    )
    moved = _gathered(SUMS * ACTIVATION // 2, 2)
    assert found.pop(("all_gather", "model")) == moved + _gathered(PLACES, 2)  # the gradient of the table of positions
    assert found.pop(("reduce_scatter", "model")) == moved
    # Gradients: of tensors that tensor parallelism splits over the data's devices, of all others over all.
    split = _parameters(gpt, tensor, 2) - _seen_in_part(gpt, tensor)
    both = _reduced(_seen_in_part(gpt, tensor) - PLACES, 4) + _numbers(4)
    assert found == {
        ("all_reduce", "data", "model"): both,
        ("all_reduce", "data"): _reduced(split, 2) + _reduced(PLACES // 2, 2),  # of positions first those of a device
    }


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")], ids=" ".join)
def test_data_and_tensor_with_zero(gpt, level, axes):
    """What tensor parallelism splits by rows is split by columns as well; but vectors that it splits stay so, and their
    gradients are reduced for all of the data's devices."""
    tensor = strategies.tensor_parallel(gpt)
    found = _received(strategies.zero(gpt, level), dict.fromkeys(axes, 2), strategies.data_parallel(gpt), tensor)
    vectors = [name for name, layout in tensor.items() if layout and name.endswith("bias")]
    alike = _parameters(gpt, {name: tensor[name] for name in vectors}, 2) - _parameters(gpt, without=vectors)
    rest = _parameters(gpt, tensor, 2, without=[*vectors, "wpe.weight"])
    assert found.pop(("all_reduce", "model")) == _reduced(SUMS * ACTIVATION // 2, 2)
    assert found.pop(("all_reduce", "data")) == _reduced(alike + PLACES, 2) + _numbers(2)
    assert found.pop(("reduce_scatter", "data")) == _gathered(rest, 2)
    times = 1 if level == 1 else 2
    assert found.keys() == {("all_gather", "data")}
    assert _gathered(rest + PLACES, 2) <= found.total() <= _gathered(times * (rest + PLACES), 2)


def test_data_and_tensor_and_context(gpt):
    tensor = strategies.tensor_parallel(gpt)
    found = _received(
        gpt,
        {"data": 2, "model": 2, "context": 2},
        strategies.data_parallel(gpt),
        tensor,
        strategies.context_parallel(gpt),
    )
    gradients = _parameters(gpt, tensor, 2, without=["wpe.weight"])
    assert found == {
        ("all_reduce", "model"): _reduced(SUMS * ACTIVATION // 4, 2),
        ("all_gather", "context"): _gathered(2 * LAYERS * ACTIVATION // 4 + PLACES, 2),
        ("reduce_scatter", "context"): _gathered(2 * LAYERS * ACTIVATION // 4, 2),
        ("all_reduce", "data", "context"): _reduced(gradients, 4) + _numbers(4),
        ("all_reduce", "data"): _reduced(PLACES // 2, 2),  # of positions first those of a device
    }


class Experts(nn.Module):
    """Every token is given to all experts, whose results are weighed."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 64))
        self.down = nn.Parameter(torch.randn(4, 64, WIDTH))

    def forward(self, x):
        x = self.first(x)
        each = torch.relu(x @ self.up.unsqueeze(1)) @ self.down.unsqueeze(1)
        return torch.einsum("ebtw,bte->btw", each, self.gate(x).softmax(-1))


@pytest.mark.parametrize("devices", [2, 4])
def test_experts(devices):
    """What experts give is added up, and on the way back the gradient of the layer before, which is less than that of
    its result; of each token a sum over the gates, and the gates' gradients."""
    x, y = torch.randn(2, BATCH, POSITIONS, WIDTH).unbind()
    step = mt.training_step(Experts(), F.mse_loss, (x, y), check=False)
    found = _received(step, {"expert": devices}, strategies.expert_parallel(step, ["up", "down"]))
    token, first = BATCH * POSITIONS * FLOAT, WIDTH * (WIDTH + 1) * FLOAT
    assert found == {
        ("all_reduce", "expert"): _reduced(ACTIVATION + first + token, devices),
        ("all_gather", "expert"): _gathered(4 * token, devices),
    }
