"""Fused layers of unequal parts, and layers that take what is put side by side: stored in the order in which devices
have them, and nothing is gathered."""

import copy
from functools import cache

import pytest
import torch
from torch.nn.functional import mse_loss

import mesh_tensor as mt

from .modules import kinds


class Attention(torch.nn.Module):
    """Queries, keys and values of one weight, taken apart by `split` or by slices; fewer key heads than heads."""

    def __init__(self, heads, key_heads, sliced=False):
        super().__init__()
        self.sizes, self.sliced = [heads * 4, key_heads * 4, key_heads * 4], sliced
        self.qkv = torch.nn.Linear(12, sum(self.sizes))
        self.proj = torch.nn.Linear(heads * 4, 12)

    def forward(self, x):
        made, (q, k, _) = self.qkv(x), self.sizes
        parts = (made[..., :q], made[..., q : q + k], made[..., q + k :]) if self.sliced else made.split(self.sizes, -1)
        q, k, v = (part.view(*x.shape[:2], -1, 4).transpose(1, 2) for part in parts)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


STATED = {"qkv.weight": {"m": 0}, "qkv.bias": {"m": 0}, "proj.weight": {"m": 1}}


@cache
def imported(heads, key_heads, sliced=False):
    torch.manual_seed(0)
    model, x = Attention(heads, key_heads, sliced).eval(), torch.randn(2, 3, 12)
    return model, x, mt.from_torch(torch.export.export(model, (x,)), check=False)


def made(heads, key_heads, mesh, stated=STATED, **options):
    model, x, module = imported(heads, key_heads, **options)
    return model, x, module, mt.distribute_module(module.mod, mesh, stated, weights=module.params, poison=True)


@pytest.mark.parametrize(
    ("heads", "key_heads", "parts", "sliced"),
    [(4, 2, 2, False), (8, 4, 4, True), (8, 4, 2, True), (3, 3, 3, True)],
)
def test_one_all_reduce(heads, key_heads, parts, sliced):
    model, x, _, run = made(heads, key_heads, {"m": parts}, sliced=sliced)
    assert kinds(run.plan) == ["all_reduce"]
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    assert ("stored in another order" in run.explain()) == (heads != key_heads)


def test_over_two_axes():
    stated = {"qkv.weight": {"a": 0, "b": 0}, "qkv.bias": {"a": 0, "b": 0}, "proj.weight": {"a": 1, "b": 1}}
    model, x, _, run = made(8, 4, {"a": 2, "b": 2}, stated, sliced=True)
    assert set(kinds(run.plan)) == {"all_reduce"}
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stated", [{"qkv.weight": {"m": 0}}, {"qkv.bias": {"m": 0}}, {"qkv.weight": {"m": 1}}])
def test_other_layouts(stated):
    """Whatever is stated, and of whichever weights: the result is the same."""
    model, x, _, run = made(4, 2, {"m": 2}, stated)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_sections_that_devices_do_not_share():
    model, x, _, run = made(4, 2, {"m": 3})
    assert not run.plan.graph.stored
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_weights_that_are_passed_are_in_the_caller_s_order():
    model, x, module, _ = made(4, 2, {"m": 2})
    run = mt.distribute_module(module.mod, {"m": 2}, STATED, poison=True)
    assert not run.plan.graph.stored
    torch.testing.assert_close(run(x, *module.params.values()), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_seen_elsewhere_too():
    """What else takes the weight, or the product, takes it in its own order."""

    class Twice(Attention):
        def forward(self, x):
            return super().forward(x) + self.qkv.weight[:12].sum(0) + self.qkv(x)[..., :12]

    torch.manual_seed(0)
    model, x = Twice(4, 2).eval(), torch.randn(2, 3, 12)
    module = mt.from_torch(torch.export.export(model, (x,)))
    run = mt.distribute_module(module.mod, {"m": 2}, STATED, weights=module.params, poison=True)
    assert not run.plan.graph.stored
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_workers_take_the_caller_s_order():
    """The module for Disco's workers brings whole weights to them itself."""
    _, _, _, run = made(4, 2, {"m": 2})
    assert run.plan.graph.stored
    assert not run.plan_as_passed().graph.stored


def test_weights_are_given_back_as_they_were():
    model, x, module, run = made(4, 2, {"m": 2})
    run(x)
    assert run.plan.graph.stored
    state = run.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    doubled = {name: 2 * tensor for name, tensor in state.items()}
    run.load_state_dict(doubled)
    other = Attention(4, 2).eval()
    other.load_state_dict(doubled)
    torch.testing.assert_close(run(x), other(x).detach(), rtol=1e-4, atol=1e-5)


def test_weights_whose_memory_is_taken_over():
    model, x, module, _ = made(4, 2, {"m": 2})
    given = {name: tensor.clone() for name, tensor in module.params.items()}
    run = mt.distribute_module(module.mod, {"m": 2}, STATED, weights=given, donate=True)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(run.state_dict()[name], tensor, rtol=0, atol=0)


class Branches(torch.nn.Module):
    """Two layers side by side, as heads or as features, before one that is split by what it takes."""

    def __init__(self, first, second, heads=False):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, first), torch.nn.Linear(6, second)
        self.last, self.heads = torch.nn.Linear(first + second, 6), heads

    def forward(self, x):
        a, b = torch.tanh(self.a(x)), torch.sigmoid(self.b(x))
        if self.heads:
            return self.last(torch.cat([a.unflatten(-1, (-1, 2)), b.unflatten(-1, (-1, 2))], -2).flatten(-2))
        return self.last(torch.cat([a, b], -1))


SIDE_BY_SIDE = {f"{name}.{kind}": {"m": 0} for name in "ab" for kind in ("weight", "bias")} | {"last.weight": {"m": 1}}


def unfused(found):
    return [kind for kind in found if kind != "slice"]


@pytest.mark.parametrize(("first", "second"), [(8, 4), (4, 4)])
@pytest.mark.parametrize("heads", [False, True])
def test_side_by_side(first, second, heads):
    torch.manual_seed(0)
    model, x = Branches(first, second, heads).eval(), torch.randn(3, 5, 6)
    module = mt.from_torch(torch.export.export(model, (x,)), check=False)
    run = mt.distribute_module(module.mod, {"m": 2}, SIDE_BY_SIDE, weights=module.params, poison=True)
    assert kinds(run.plan) == ["all_reduce"]
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.state_dict()["last.weight"], model.last.weight.detach(), rtol=0, atol=0)


def test_of_one_branch_alone():
    """Devices that have none of one branch's features take them from the others."""
    torch.manual_seed(0)
    model, x = Branches(4, 3).eval(), torch.randn(3, 5, 6)
    module = mt.from_torch(torch.export.export(model, (x,)), check=False)
    run = mt.distribute_module(module.mod, {"m": 2}, SIDE_BY_SIDE, weights=module.params, poison=True)
    assert not run.plan.graph.stored
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def trained(model, x, mesh, stated, **options):
    """Two steps beside torch's; the run."""
    target = torch.randn_like(model(x)).detach()
    step = mt.training_step(copy.deepcopy(model), mse_loss, (x, target), check=False, **options)
    run = mt.distribute_module(step, mesh, stated)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(run(x, target), loss.detach(), rtol=1e-4, atol=1e-5)
    state = run.state_dict()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(state[name], tensor.detach(), rtol=1e-4, atol=1e-5)
    return run


MOMENTUM = {"optimizer": "momentum", "lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(("mesh", "sliced"), [({"m": 2}, False), ({"d": 2, "m": 2}, True)])
def test_steps_of_training(mesh, sliced):
    """What is kept for such weights is in their order, too; it is given back, and taken, in the caller's."""
    torch.manual_seed(0)
    model, x = Attention(4, 2, sliced), torch.randn(2, 3, 12)
    stated = STATED | ({"x": {"d": 0}, "target": {"d": 0}} if "d" in mesh else {})
    run = trained(model, x, mesh, stated, **MOMENTUM)
    reduced = 1 if mesh == {"m": 2} else 2  # the second product; gradients of the batch's parts
    assert unfused(kinds(run.plan)) == ["all_reduce"] * reduced
    assert len(run.plan.graph.stored) == 8  # weight, bias, their momenta, and what replaces these
    state = run.state_dict()
    target = torch.randn(2, 3, 12)
    wanted = run(x, target)
    run.load_state_dict(state)
    torch.testing.assert_close(run(x, target), wanted, rtol=0, atol=0)


def test_training_side_by_side():
    torch.manual_seed(0)
    run = trained(Branches(8, 4), torch.randn(3, 5, 6), {"m": 2}, SIDE_BY_SIDE, **MOMENTUM)
    assert unfused(kinds(run.plan)) == ["all_reduce"]


@pytest.mark.parametrize("how", ["split", "slices", "glu"])
def test_training_of_equal_parts(how):
    """What is in the parts' gradients is split as what is in the parts."""

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(6, 16), torch.nn.Linear(8, 6)

        def forward(self, x):
            made = self.up(x)
            if how == "glu":
                return self.down(torch.nn.functional.glu(made))
            gate, up = made.chunk(2, -1) if how == "split" else (made[..., :8], made[..., 8:])
            return self.down(torch.sigmoid(gate) * up)

    torch.manual_seed(0)
    stated = {"up.weight": {"m": 0}, "up.bias": {"m": 0}, "down.weight": {"m": 1}}
    run = trained(Gated(), torch.randn(3, 5, 6), {"m": 4}, stated, **MOMENTUM)
    assert unfused(kinds(run.plan)) == ["all_reduce"]
