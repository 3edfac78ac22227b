"""Optimizers that somebody wrote, as functions of tensors: on any layout as on one device."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from tests.refusals import refusal

DATA = {"x": {"data": 0}, "target": {"data": 0}}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def adam(parameter, gradient, lr, step, *, mean, square):
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.99 * square + 0.01 * gradient * gradient
    below = (square / (1 - 0.99**step)).sqrt() + 1e-8
    return parameter - lr * mean / (1 - 0.9**step) / below, {"mean": mean, "square": square}


def scaled(parameter, gradient, lr, step, *, momentum):
    """As in LARS: by norms over the whole parameter, whatever devices have of it."""
    trust = parameter.norm() / (gradient.norm() + 1e-6)
    momentum = 0.9 * momentum + torch.clamp(trust, max=10.0) * gradient
    return parameter - lr * momentum, {"momentum": momentum}


def sign(parameter, gradient, lr, step):
    return parameter - lr * torch.sign(gradient), {}


def _torch(rule, slots, model, x, y, lr, steps):
    model = copy.deepcopy(model)
    kept = {name: {slot: torch.zeros_like(p) for slot in slots} for name, p in model.named_parameters()}
    losses = []
    for step in range(1, steps + 1):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, p in model.named_parameters():
                new, kept[name] = rule(p, p.grad, torch.tensor(lr), torch.tensor(float(step)), **kept[name])
                p.copy_(new)
    return losses, model, kept


def _case():
    torch.manual_seed(0)
    return MLP(), torch.randn(12, 12), torch.randint(0, 8, (12,))


def written(parameter, gradient, lr, step, *, momentum):
    """What it is given is written."""
    gradient.mul_(2)
    momentum.mul_(0.9).add_(gradient)
    parameter.sub_(lr * momentum)
    return parameter, {"momentum": momentum}


def exchanged(parameter, gradient, lr, step, *, now, before):
    return parameter - lr * (now + before), {"now": gradient, "before": now}


def alike(parameter, gradient, lr, step, *, a, a_b):
    """One tensor is kept twice."""
    mean = 0.5 * a + gradient
    return parameter - lr * (mean + a_b), {"a": mean, "a_b": mean}


@pytest.mark.parametrize(
    ("rule", "slots", "mesh", "layout", "zero"),
    [
        (adam, ("mean", "square"), {"data": 2}, DATA, 1),
        (scaled, ("momentum",), {"data": 2}, DATA, 3),
        (scaled, ("momentum",), {"data": 2, "model": 2}, DATA | {"up.weight": {"model": 0}}, 1),
        (sign, (), {"data": 3}, DATA | {"up.weight": {"data": 0}}, 0),
        (written, ("momentum",), {"data": 2}, DATA, 1),
        (exchanged, ("now", "before"), {"data": 2}, DATA | {"opt.now.*": {"data": 0}, "opt.before.*": {}}, 0),
        (alike, ("a", "a_b"), {"data": 2}, DATA, 1),
    ],
    ids=["adam", "norms, zero 3", "norms, both", "sign", "written", "exchanged", "alike"],
)
def test_as_by_hand(rule, slots, mesh, layout, zero):
    model, x, y = _case()
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer=rule, lr=0.02, zero=zero, check=False)
    run = mt.distribute_module(step, mesh, layout, poison=True)
    losses, theirs, kept = _torch(rule, slots, model, x, y, 0.02, 3)
    assert [run(x, y).item() for _ in range(3)] == pytest.approx(losses, abs=1e-5)
    state = run.state_dict()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-5)
        for slot in slots:
            torch.testing.assert_close(state[f"opt.{slot}.{name}"], kept[name][slot], rtol=1e-3, atol=1e-5)


def test_half_precision_is_given_a_wide_value():
    model, x, y = _case()
    model, x = model.bfloat16(), x.bfloat16()
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer=sign, lr=1e-4, check=False)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    for _ in range(2):
        run(x, y)
    state = run.state_dict()
    moved = (state["opt.master.up.weight"] - model.up.weight.detach().float()).abs()
    assert moved.max() == pytest.approx(2e-4, rel=1e-2)
    assert torch.equal(state["up.weight"], state["opt.master.up.weight"].bfloat16())


def test_a_gradient_that_is_not_finite_is_refused_though_the_function_hides_it():
    class Rooted(MLP):
        def forward(self, x):
            return super().forward(x) + torch.sqrt((self.down.bias * 0).abs()).mean()

    _, x, y = _case()
    step = mt.training_step(Rooted(), F.cross_entropy, (x, y), optimizer=sign, check=False)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    with pytest.raises(mt.MeshTensorError, match="those of 'down.bias'"):
        run(x, y)


def test_names_that_are_put_together_alike():
    """opt_a_b_w may be `a` of b_w, and `a_b` of w."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b_w = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(12, 8))
            self.opt_a_w = nn.Parameter(torch.randn(8))

        def forward(self, x):
            return x @ self.w + x.square() @ self.b_w + self.opt_a_w

    _, x, y = _case()
    step = mt.training_step(Two(), F.cross_entropy, (x, y), optimizer=alike, lr=0.02)
    model = Two()
    step.state.update({step.names[name]: p.detach().clone() for name, p in model.named_parameters()})
    run = mt.distribute_module(step, {"data": 2}, DATA)
    losses, theirs, kept = _torch(alike, ("a", "a_b"), model, x, y, 0.02, 3)
    assert [run(x, y).item() for _ in range(3)] == pytest.approx(losses, abs=1e-5)
    state = run.state_dict()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[f"opt.a_b.{name}"], kept[name]["a_b"], rtol=1e-3, atol=1e-5)


def test_one_tensor_that_is_kept_in_two_layouts_is_refused():
    _, x, y = _case()
    step = mt.training_step(MLP(), F.cross_entropy, (x, y), optimizer=alike, check=False)
    layouts = DATA | {"opt.a.up.weight": {"data": 0}, "opt.a_b.up.weight": {"data": 1}}
    with pytest.raises(mt.MeshTensorError, match="state the same layout for all of these") as error:
        mt.distribute_module(step, {"data": 2}, layouts)(x, y)
    assert "'opt_a_b_up_weight' lies as" in str(error.value)


def test_what_is_kept_is_looked_at_whatever_it_is_called():
    def grows(parameter, gradient, lr, step, *, exp_avg, exp_avg_sq):
        return parameter - lr * gradient, {"exp_avg": exp_avg + 3e38, "exp_avg_sq": exp_avg_sq}

    model, x, y = _case()
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer=grows, check=False)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    run(x, y)
    with pytest.raises(mt.MeshTensorError, match="too large for what is kept"):
        run(x, y)
    assert run.steps == 1


def _short(parameter, gradient, lr, step, *, kept):
    return parameter[:1], {"kept": kept}


def _lacking(parameter, gradient, lr, step, *, kept):
    return parameter, {}


class _Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Linear(8, 24)

    def forward(self, x):
        one, two, three = self.all(x).chunk(3, -1)
        return one * two.tanh() + three


def test_a_layer_in_parts_whose_norms_are_taken():
    """Of 16 bits, what replaces a weight knows nothing of its parts but that it replaces it."""
    torch.manual_seed(0)
    model, x, y = _Parts().bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    step = mt.training_step(model, lambda a, b: F.mse_loss(a.float(), b.float()), (x, y), optimizer=_scaled, lr=0.1)
    losses = []
    for mesh, layouts in (({"x": 1}, {}), ({"data": 2, "model": 2}, {"x": {"data": 0}, "all.bias": {"model": 0}})):
        run = mt.distribute_module(step, mesh, layouts)
        losses.append([float(run(x, y)) for _ in range(3)])
    assert losses[0][2] < 0.7 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def _scaled(parameter, gradient, lr, step):
    return parameter - lr * torch.clamp(parameter.norm() / (gradient.norm() + 1e-6), max=2.0) * gradient, {}


def _named(parameter, gradient, lr, step, *, master):
    return parameter, {"master": master}


def _branching(parameter, gradient, lr, step):
    return parameter - (lr if step > 1 else 2 * lr) * gradient, {}


def _dropping(parameter, gradient, lr, step):
    return parameter - lr * F.dropout(gradient, 0.5), {}


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        (_named, {}, "an optimizer that keeps 'master'"),
        (_branching, {}, "torch.export can't record the optimizer"),
        (_dropping, {}, "it drops what follows from a seed"),
        (lambda parameter, gradient: parameter, {}, "an optimizer that takes 'parameter', 'gradient'"),
        (sign, {"betas": (0.9, 0.9)}, "an optimizer that is a function has no options 'betas'"),
        (_short, {}, "the optimizer gives [((1,), torch.float32), ((8,), torch.float32)]"),
        (_lacking, {}, "return (new parameter, {'kept': ...})"),
        (7, {}, "optimizer=7"),
    ],
)
def test_what_is_refused(rule, options, said):
    model, x, y = _case()
    message = refusal(mt.training_step, model, F.cross_entropy, (x, y), optimizer=rule, check=False, **options)
    assert said in message
