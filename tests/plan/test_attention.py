"""Attention to keys that are split: every device attends to its own, and what queries have of it is combined."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm import relax

import mesh_tensor as mt
from kernels.models import llama, llama_decoder
from mesh_tensor.program.steps import CollectiveStep
from tests.other_machines import machine

AXES = {"c": 4}


class Cross(nn.Module):
    """Queries attend to a memory, with a bias for every head, query and key; heads of keys are shared."""

    def __init__(self, keys, key_heads=2, causal=False, scale=None):
        super().__init__()
        self.q, self.kv, self.last = nn.Linear(8, 16), nn.Linear(8, 8 * key_heads), nn.Linear(16, 16)
        self.bias = None if causal else nn.Parameter(torch.randn(1, 4, 3, keys))
        self.more = {"is_causal": causal, "scale": scale}

    def forward(self, x, memory):
        q, (k, v) = self.q(x), self.kv(memory).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, self.bias, enable_gqa=True, **self.more)
        return self.last(y.transpose(1, 2).flatten(2))


class Attention(nn.Module):
    """Of what is given, as it is given."""

    def forward(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask)


def distributed(model, inputs, mesh, stated):
    module = mt.from_torch(torch.export.export(model.eval(), inputs), check=False)
    with machine(1):
        return mt.distribute_module(module.mod, mesh, stated, weights=module.params, poison=True)


def sent(run):
    """The kinds of collectives, and the bytes of all."""
    moved = [step for step in run.program.steps if isinstance(step, CollectiveStep) and step.kind != "slice"]
    return {step.kind for step in moved}, sum(step.bytes for step in moved)


def combined(queries, features, devices):
    """Bytes, of the largest score of every query and head, the sum of its powers, and what is weighed with them."""
    return 2 * queries * (features + 2) * 4 * (devices - 1) // devices


@pytest.mark.parametrize(("keys", "devices"), [(512, 4), (511, 3), (3, 4)])
@pytest.mark.parametrize(("key_heads", "causal", "scale"), [(2, False, None), (4, True, 0.3), (1, True, None)])
def test_keys_are_split(keys, devices, key_heads, causal, scale):
    torch.manual_seed(0)
    model, inputs = Cross(keys, key_heads, causal, scale), (torch.randn(2, 3, 8), torch.randn(2, keys, 8))
    run = distributed(model, inputs, {"c": devices}, {"memory": {"c": 1}})
    torch.testing.assert_close(run(*inputs), model(*inputs).detach(), rtol=1e-4, atol=1e-5)
    if keys > devices:
        assert sent(run) == ({"all_reduce"}, combined(2 * 3 * 4, 4, devices))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_nothing(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, dtype=dtype) for n in (3, 512, 512))
    seen = torch.rand(2, 1, 3, 512) < 0.5
    seen[0, :, 1], seen[1, :, 0, :400], seen[1, :, 2, 100:] = False, False, False
    run = distributed(Attention(), (q, k, v, seen), AXES, {"k": {"c": 2}, "v": {"c": 2}})
    assert sent(run) == ({"all_reduce"}, combined(2 * 2 * 3, 8, 4))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), seen)
    found, own = run(q, k, v, seen), F.scaled_dot_product_attention(q, k, v, seen)
    assert (found - exact).abs().max() <= 2 * (own - exact).abs().max()
    assert not found[0, :, 1].any()


@pytest.mark.parametrize(
    "stated", [{"memory": {"c": 1}}, {"memory": {"c": 1, "d": 0}}, {"memory": {"c": 1}, "x": {"d": 1}}]
)
@pytest.mark.parametrize(("keys", "key_heads", "causal"), [(64, 2, False), (61, 4, True), (61, 1, False)])
def test_gradients(stated, keys, key_heads, causal):
    torch.manual_seed(0)
    model = Cross(keys, key_heads, causal)
    inputs = torch.randn(2, 3, 8), torch.randn(2, keys, 8), torch.randn(2, 3, 16)
    step = mt.training_step(copy.deepcopy(model), F.mse_loss, inputs, optimizer="sgd", lr=1.0, check=False)
    with machine(1):
        run = mt.distribute_module(step, {"d": 2, "c": 2}, stated, poison=True)
    loss = F.mse_loss(model(*inputs[:-1]), inputs[-1])
    loss.backward()
    torch.testing.assert_close(run(*inputs), loss.detach(), rtol=1e-4, atol=1e-4)
    state = run.state_dict()
    for name, value in model.named_parameters():
        torch.testing.assert_close(state[name], (value - value.grad).detach(), rtol=1e-4, atol=1e-4)
    if len(stated) == len(stated["memory"]) == 1:
        assert "all_gather" not in sent(run)[0]


class Scored(nn.Module):
    """Attention of parameters, with a bias for every score."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(1, 2, n, 4)) for n in (3, 65, 65))
        self.bias = nn.Parameter(torch.randn(1, 2, 3, 65))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q * x, self.k, self.v, self.bias)


def test_gradient_of_a_bias_that_every_score_has_its_own_of():
    """It is what the gradients of queries and keys are made of, too."""
    torch.manual_seed(0)
    model, inputs = Scored(), (torch.randn(4), torch.randn(1, 2, 3, 4))
    step = mt.training_step(copy.deepcopy(model), F.mse_loss, inputs, optimizer="sgd", lr=1.0, check=False)
    with machine(1):
        run = mt.distribute_module(step, {"c": 3}, {"k": {"c": 2}, "v": {"c": 2}, "bias": {"c": 3}}, poison=True)
    run(*inputs)
    assert "all_gather" not in sent(run)[0]
    F.mse_loss(model(inputs[0]), inputs[1]).backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(run.state_dict()[name], (value - value.grad).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "window", "split"), [(None, 8, "k"), ("TopLeft", 8, "k"), ("Other", None, "k"), ("Other", None, "q")]
)
def test_masks_that_attention_is_not_run_with_are_refused(mask, window, split):
    builder = relax.BlockBuilder()
    q, k, v = (
        relax.Var(name, relax.TensorStructInfo((1, n, 2, 4), "float32"))
        for name, n in zip("qkv", (4, 64, 64), strict=True)
    )
    with builder.function("main", [q, k, v]):
        builder.emit_func_output(builder.emit(relax.op.nn.attention(q, k, v, causal_mask=mask, window_size=window)))
    stated = {split: {"c": 1}} | ({"v": {"c": 1}} if split == "k" else {})
    with machine(1), pytest.raises(mt.MeshTensorError, match="nn.attention with causal_mask"):
        mt.distribute_module(builder.get(), {"c": 2}, stated)(*(torch.randn(1, n, 2, 4) for n in (4, 64, 64)))


def test_few_queries_that_are_split_over_the_same_axis():
    """They are gathered, and what they have of all keys is scattered."""
    torch.manual_seed(0)
    model, inputs = Cross(512, causal=True), (torch.randn(2, 4, 8), torch.randn(2, 512, 8))
    run = distributed(model, inputs, AXES, {"memory": {"c": 1}, "x": {"c": 1}, "last": {"c": 1}})
    torch.testing.assert_close(run(*inputs), model(*inputs).detach(), rtol=1e-4, atol=1e-5)
    assert sent(run)[0] == {"all_gather", "all_reduce", "reduce_scatter"}


@pytest.mark.parametrize(("heads", "stated"), [(2, {"c": 2}), (4, {"d": 1, "c": 2}), (1, {"d": 2, "c": 2})])
def test_tokens_from_a_cache_whose_positions_are_split(heads, stated):
    """Nothing of the cache is sent for a token, whether devices split heads of queries or not."""
    torch.manual_seed(0)
    config = llama.Config(vocabulary=16, width=32, hidden=32, heads=4, key_heads=heads, layers=1, batch=2, positions=96)
    model = llama.build(config)
    module = mt.from_torch(llama_decoder.export(model, config), check=False)
    layouts = {"keys_*": stated, "values_*": stated}
    if heads == 4:
        layouts |= {f"model.{name}": layout for name, layout in llama.tensor_parallel(config, "d").items()}
    with machine(1):
        run = mt.distribute_module(module, {"d": 2, "c": 2}, layouts)
        ids = torch.randint(0, 16, (2, 4))
        tokens = mt.generate(run, ids, max_new_tokens=4)
    assert torch.equal(tokens, mt.generate(mt.distribute_module(module, {"d": 1}, {}), ids, max_new_tokens=4))
    kinds, received = sent(run)
    assert kinds == {"all_reduce"}
    if heads != 4:
        assert received == combined(2 * 4, 8, 2 if heads == 2 else 4)


def test_no_keys():
    q, k, v = (torch.randn(1, 2, n, 4) for n in (3, 0, 0))
    module = mt.from_torch(torch.export.export(Attention(), (q, k, v, None)), check=False)
    with machine(1):
        run = mt.distribute_module(module.mod, {"c": 2}, {"k": {"c": 2}, "v": {"c": 2}}, poison=True)
        assert torch.equal(run(q, k, v), torch.zeros(1, 2, 3, 4))
