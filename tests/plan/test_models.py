"""Real models on meshes: what torch computes, with the collectives that people place by hand."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch.nn import functional as F

import mesh_tensor as mt
from kernels.for_modules import FASTER_ON_CPU
from kernels.models import convnet, gpt2, llama, mlp, together
from mesh_tensor.program.steps import CollectiveStep


@cache
def imported(file, config):
    """The model in torch, and as a module."""
    torch.manual_seed(0)
    model = file.build(config)
    return model, mt.from_torch(torch.export.export(model, file.example_inputs(config)))


def distributed(file, config, mesh, shardings, priority=None):
    """The model in torch, inputs of it, and the module on the mesh."""
    model, module = imported(file, config)
    mod = mt.annotate_module(module.mod, mesh, shardings, priority=priority)
    return model, file.example_inputs(config), mt.distribute_module(mod, weights=module.params)


def check(model, inputs, run):
    with torch.no_grad():
        torch.testing.assert_close(run(*inputs), model(*inputs), rtol=1e-4, atol=2e-5)


def collectives(run):
    """kind -> how often something is sent."""
    steps = [step for step in run.program.steps if isinstance(step, CollectiveStep) and step.bytes]
    return Counter(step.kind for step in steps)


def received(run):
    """Bytes that a device receives."""
    return sum(step.bytes for step in run.program.steps if isinstance(step, CollectiveStep))


@pytest.mark.parametrize("parts", [2, 4])
def test_mlp_of_the_seed(parts):
    config = mlp.Config()
    model, inputs, run = distributed(mlp, config, {"model": parts}, mlp.tensor_parallel("model"))
    check(model, inputs, run)
    assert collectives(run) == {"all_reduce": 1}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
def test_gpt2_tensor_parallel(parts, fused):
    config = gpt2.Config(fused=fused)
    model, inputs, run = distributed(gpt2, config, {"model": parts}, gpt2.tensor_parallel(config, "model"))
    check(model, inputs, run)
    assert collectives(run) == {"all_reduce": 2 * config.layers}
    hidden = config.batch * config.positions * config.width * 4
    assert received(run) == 2 * config.layers * (2 * hidden * (parts - 1) // parts)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("file", [gpt2, llama])
@pytest.mark.parametrize("sizes", [(8, 64, 64), (2, 5, 64)])
def test_as_many_collectives_for_all_sizes(file, sizes, parts):
    """Also where weights are much smaller than activations, or larger: gathering both would move fewer bytes."""
    batch, positions, width = sizes
    options = {"key_heads": 4} if file is llama else {}
    config = file.Config(width=width, heads=4, layers=1, batch=batch, positions=positions, **options)
    split = file.tensor_parallel(config, "model")
    model, inputs, run = distributed(file, config, {"model": parts}, split)
    check(model, inputs, run)
    assert collectives(run) == {"all_reduce": 2}
    if positions % parts == 0:
        run = distributed(file, config, {"model": parts}, together(split, file.sequence_parallel(config, "model")))[2]
        assert collectives(run) == {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.parametrize("parts", [2, 4])
def test_gpt2_sequence_parallel(parts):
    config = gpt2.Config()
    both = together(gpt2.tensor_parallel(config, "model"), gpt2.sequence_parallel(config, "model"))
    model, inputs, run = distributed(gpt2, config, {"model": parts}, both)
    check(model, inputs, run)
    assert collectives(run) == {"all_gather": 2 * config.layers, "reduce_scatter": 2 * config.layers}


def test_gpt2_data_parallel_sends_nothing():
    config = gpt2.Config()
    model, inputs, run = distributed(gpt2, config, {"data": 4}, gpt2.data_parallel("data"))
    check(model, inputs, run)
    assert not collectives(run)


@pytest.mark.parametrize("pair", ["data+tensor", "data+sequence", "data+vocabulary"])
def test_gpt2_in_pairs(pair):
    config = gpt2.Config()
    layouts = [gpt2.data_parallel("data"), gpt2.tensor_parallel(config, "model", vocabulary=pair == "data+vocabulary")]
    if pair == "data+sequence":
        layouts.append(gpt2.sequence_parallel(config, "model"))
    model, inputs, run = distributed(gpt2, config, {"data": 2, "model": 2}, together(*layouts))
    check(model, inputs, run)
    found = collectives(run)
    if pair == "data+tensor":
        assert found == {"all_reduce": 2 * config.layers}
    if pair == "data+sequence":
        assert found["reduce_scatter"] == 2 * config.layers


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_llama_tensor_parallel(heads):
    config = llama.Config(key_heads=heads)
    model, inputs, run = distributed(llama, config, {"model": 2}, llama.tensor_parallel(config, "model"))
    check(model, inputs, run)
    if heads > 1:
        assert collectives(run) == {"all_reduce": 2 * config.layers}


def test_llama_with_fewer_key_heads_than_devices():
    """Key heads are split over one axis, query heads over both: two all-reduces per block, as by hand."""
    config = llama.Config(key_heads=2)
    split = llama.tensor_parallel(config, "pair")
    both = {name: {"pair": dim, "model": dim} for name, layout in split.items() for dim in layout.values()}
    keys = {name: split[name] for name in split if name.split(".")[-2] in ("k_proj", "v_proj")}
    assert len(keys) == 2 * config.layers
    model, inputs, run = distributed(llama, config, {"pair": 2, "model": 2}, both | keys)
    check(model, inputs, run)
    assert collectives(run) == {"all_reduce": 2 * config.layers}


def test_llama_sequence_parallel():
    config = llama.Config()
    both = together(llama.tensor_parallel(config, "model"), llama.sequence_parallel(config, "model"))
    model, inputs, run = distributed(llama, config, {"model": 2}, both)
    check(model, inputs, run)
    assert collectives(run) == {"all_gather": 2 * config.layers, "reduce_scatter": 2 * config.layers}


class NormedAfter(llama.Block):
    """A block whose norms come last."""

    def forward(self, x, cos, sin):
        x = self.input_norm(x + self.attn(x, cos, sin))
        return self.mlp_norm(x + self.mlp(x))


@pytest.mark.parametrize("sizes", [(8, 64), (2, 6)])
def test_sequence_parallel_where_norms_come_last(sizes):
    """Positions come to the layers of heads before their weights are heard; no weight is gathered for that."""
    config = llama.Config(layers=1)
    layer, (batch, positions) = NormedAfter(config), sizes
    inputs = torch.randn(batch, positions, config.width), *torch.randn(2, positions, config.head_size)
    module = mt.from_torch(torch.export.export(layer.eval(), inputs), check=False)
    split = {name.removeprefix("layers.0."): dims for name, dims in llama.tensor_parallel(config, "model").items()}
    stated = split | {"x": {"model": 1}, "mlp_norm": {"model": 1}}
    run = mt.distribute_module(module, {"model": 2}, stated, poison=True)
    torch.testing.assert_close(run(*inputs), layer(*inputs).detach(), rtol=1e-4, atol=1e-4)
    assert collectives(run) == {"all_gather": 2, "reduce_scatter": 2}
    step = mt.training_step(layer, F.mse_loss, (*inputs, inputs[0]), optimizer="sgd", lr=0.1, check=False)
    trained = mt.distribute_module(step, {"model": 2}, stated | {"target": {"model": 1}}, poison=True)
    loss = F.mse_loss(layer(*inputs), inputs[0])
    loss.backward()
    torch.testing.assert_close(trained(*inputs, inputs[0]), loss.detach(), rtol=1e-4, atol=1e-4)
    state = trained.state_dict()
    for name, weight in layer.named_parameters():
        torch.testing.assert_close(state[name], (weight - 0.1 * weight.grad).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("file", [gpt2, llama])
def test_fully_sharded(file, dim):
    """Every weight and the batch over one axis, no priorities: every weight is gathered once, nothing else moves."""
    config = file.Config(batch=64)
    weights = dict(file.build(config).named_parameters())
    layouts = {"tokens": {"data": 0}} | {name: {"data": dim % weight.ndim} for name, weight in weights.items()}
    model, inputs, run = distributed(file, config, {"data": 2}, layouts)
    check(model, inputs, run)
    assert collectives(run) == {"all_gather": len(weights)}
    assert received(run) == sum(weight.numel() * 4 for weight in weights.values()) // 2


def test_what_is_heard_first():
    """`distribute_module` takes priorities as `annotate_module` does."""
    config = mlp.Config()
    module = mt.from_torch(torch.export.export(mlp.build(config), mlp.example_inputs(config)))
    layouts = {**mlp.data_parallel("d"), "weight1": {"d": 0}, "weight2": {"d": 0}}
    runs = [
        mt.distribute_module(module.mod, {"d": 2}, layouts, weights=module.params, priority=priority)
        for priority in (None, {"x": 1})
    ]
    assert collectives(runs[0]) == {"all_gather": 2}
    assert "all_to_all" in collectives(runs[1])
    (x,) = mlp.example_inputs(config)
    torch.testing.assert_close(runs[0](x), runs[1](x))


@pytest.mark.parametrize("parts", [2, 4])
def test_convolutional_net_by_batch(parts):
    config = convnet.Config()
    model, inputs, run = distributed(convnet, config, {"data": parts}, convnet.data_parallel("data"))
    check(model, inputs, run)
    assert not collectives(run)


def test_operators_as_kernels_where_they_are_faster():
    config = llama.Config(width=128, heads=4, key_heads=2, positions=16)
    torch.manual_seed(0)
    model, inputs = llama.build(config), llama.example_inputs(config)
    module = mt.from_torch(torch.export.export(model, inputs))
    mod = mt.annotate_module(module.mod, {"model": 2}, llama.tensor_parallel(config, "model"))
    run = mt.distribute_module(mod, weights=module.params, kernels=FASTER_ON_CPU)
    check(model, inputs, run)
    norms = 2 * config.layers + 1
    assert run.explain().count("kernel rms_norm_kernel for nn.rms_norm") == norms
    by_torch = mt.distribute_module(mod, weights=module.params)
    torch.testing.assert_close(run(*inputs), by_torch(*inputs), rtol=1e-4, atol=2e-5)
