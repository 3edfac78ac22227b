"""Steps of training on meshes against torch.autograd and torch.optim: losses, parameters, what is kept, collectives."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep
from tests.api.models import MLP

STEPS = 6


def _case(seed=0):
    torch.manual_seed(seed)
    return MLP(), torch.randn(12, 12), torch.randint(0, 8, (12,))


def _torch(model, x, y, make, clip=None, schedule=None):
    """Losses and the trained model, by torch."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
        if scheduler:
            scheduler.step()
    return losses, model


def _assert_trains(run, x, y, losses, model):
    found = [run(x, y).item() for _ in range(STEPS)]
    assert found == pytest.approx(losses, abs=1e-5)
    state = run.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
        {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1), {"lr": 0.02, "weight_decay": 0.1}),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.9)), {"lr": 0.02, "betas": (0.8, 0.9)}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    make, options = OPTIMIZERS[name]
    model, x, y = _case()
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer=name, **options)
    _assert_trains(mt.distribute_module(step, {"data": 1}), x, y, *_torch(model, x, y, make))


def test_lion():
    """torch has none: by its formula."""
    model, x, y = _case()
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="lion", lr=0.01, weight_decay=0.1)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    weight, kept = model.up.weight.detach().clone(), torch.zeros_like(model.up.weight)
    for _ in range(2):
        state = run.state_dict()
        current = copy.deepcopy(model)
        current.load_state_dict({n: state[n] for n, _ in model.named_parameters()})
        (gradient,) = torch.autograd.grad(F.cross_entropy(current(x), y), [current.up.weight])
        run(x, y)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * kept + 0.1 * gradient)
        kept = 0.99 * kept + 0.01 * gradient
    state = run.state_dict()
    torch.testing.assert_close(state["up.weight"], weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["opt.exp_avg.up.weight"], kept, rtol=1e-4, atol=1e-7)


def test_clipped_and_scheduled():
    model, x, y = _case()
    make = lambda p: torch.optim.AdamW(p, lr=0.05)  # noqa: E731
    warmup = lambda step: min(1.0, (step + 1) / 4)  # noqa: E731
    step = mt.training_step(model, F.cross_entropy, (x, y), clip_norm=0.3, schedule=warmup, lr=0.05)
    run = mt.distribute_module(step, {"data": 3}, DATA, poison=True)
    _assert_trains(run, x, y, *_torch(model, x, y, make, 0.3, warmup))


DATA = {"x": {"data": 0}, "target": {"data": 0}}
TENSOR = {"up.weight": {"model": 0}, "up.bias": {"model": 0}, "down.weight": {"model": 1}}
LAYOUTS = {
    "data": ({"data": 2}, DATA, 0),
    "data, uneven": ({"data": 5}, DATA, 0),
    "zero 1": ({"data": 2}, DATA, 1),
    "zero 3": ({"data": 2}, DATA, 3),
    "model": ({"model": 2}, TENSOR, 0),
    "model, uneven": ({"model": 3}, TENSOR, 0),
    "both": ({"data": 2, "model": 2}, DATA | TENSOR, 0),
    "both, zero 1": ({"data": 2, "model": 2}, DATA | TENSOR, 1),
    "both, zero 3": ({"data": 2, "model": 2}, DATA | TENSOR, 3),
    "uneven state": ({"data": 3}, DATA | {"opt.exp_avg.*.weight": {"data": 0}, "down.weight": {"data": 1}}, 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    mesh, layout, zero = LAYOUTS[name]
    model, x, y = _case()
    step = mt.training_step(model, F.cross_entropy, (x, y), zero=zero, lr=0.05, check=False)
    run = mt.distribute_module(step, mesh, layout, poison=True)
    _assert_trains(run, x, y, *_torch(model, x, y, lambda p: torch.optim.AdamW(p, lr=0.05)))


def _collectives(run):
    return Counter(step.kind for step in run.program.steps if isinstance(step, CollectiveStep) and step.kind != "slice")


@pytest.mark.parametrize(
    ("zero", "alone", "together"),
    [
        # gradients, the sum of the losses; how many targets count, which is needed at once
        (0, {"all_reduce": 6 + 2}, {"all_reduce": 1 + 1}),
        (1, {"reduce_scatter": 6, "all_gather": 6, "all_reduce": 2}, {"reduce_scatter": 1, "all_gather": 1}),
        (2, {"reduce_scatter": 6, "all_gather": 6, "all_reduce": 2}, {"reduce_scatter": 1, "all_gather": 1}),
        # weights that are small come together; the last layer's stays until its gradient is taken
        (3, {"reduce_scatter": 6, "all_gather": 6, "all_reduce": 2}, {"reduce_scatter": 1, "all_gather": 1}),
    ],
)
def test_collectives(zero, alone, together):
    model, x, y = _case()
    step = mt.training_step(model, F.cross_entropy, (x, y), zero=zero, check=False)
    assert _collectives(mt.distribute_module(step, {"data": 2}, DATA, overlap="off")) == alone
    run = mt.distribute_module(step, {"data": 2}, DATA)
    assert _collectives(run) == {"all_reduce": 2} | together
    assert f"{6 + (zero == 0)} together (" in run.explain()


@pytest.mark.parametrize(("zero", "clip", "accumulate"), [(1, 0.5, 1), (3, None, 2)])
def test_zero_where_devices_do_not_divide_the_weights(zero, clip, accumulate):
    torch.manual_seed(0)
    eps = 1e-4  # a step of a gradient that is all but 0 is not its sign
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    x, y = torch.randn(12, 256), torch.randint(0, 256, (12,))
    step = mt.training_step(
        model, F.cross_entropy, (x, y), lr=1e-3, eps=eps, zero=zero, clip_norm=clip, accumulate=accumulate, check=False
    )
    run = mt.distribute_module(step, {"data": 3}, {"input": {"data": 0}, "target": {"data": 0}}, poison=True)
    ports = {value.name: value.tile_shape for value in run.program.values.values()}
    assert ports["opt_exp_avg_p_0_weight"] == (86, 256)
    assert ports["p_0_weight"] == ((86, 256) if zero == 3 else (256, 256))
    losses, theirs = _torch(model, x, y, lambda p: torch.optim.AdamW(p, lr=1e-3, eps=eps), clip)
    _assert_trains(run, x, y, losses, theirs)


@pytest.mark.parametrize("layout", [{}, {"none": {"data": 1}}])
def test_a_parameter_of_no_elements(layout):
    class Rows(MLP):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.randn(0, 12))

        def forward(self, x):
            return super().forward(torch.cat([x, self.none])) + self.none.sum()

    _, x, y = _case()
    model = Rows()
    step = mt.training_step(model, F.cross_entropy, (x, y), lr=0.02, zero=1, clip_norm=1.0)
    run = mt.distribute_module(step, {"data": 2}, DATA | layout)
    losses, theirs = _torch(model, x, y, lambda p: torch.optim.AdamW(p, lr=0.02), 1.0)
    _assert_trains(run, x, y, losses, theirs)


def test_state_goes_from_mesh_to_mesh_bit_for_bit():
    model, x, y = _case()
    step = mt.training_step(model, F.cross_entropy, (x, y), zero=1, lr=0.05, check=False)
    first = mt.distribute_module(step, {"data": 2}, DATA)
    for _ in range(3):
        first(x, y)
    state = first.state_dict()
    assert int(state["opt.step"]) == 3
    again, other = (mt.distribute_module(step, mesh, DATA) for mesh in ({"data": 2}, {"data": 4}))
    for run in (again, other):
        run.load_state_dict(state)
        for name, tensor in run.state_dict().items():
            assert torch.equal(tensor, state[name]), name
    loss = first(x, y)
    assert torch.equal(again(x, y), loss)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    torch.testing.assert_close(other(x, y), loss)


def test_a_models_state_goes_into_a_run():
    """What the optimizer keeps, and the number of steps, stay."""
    model, x, y = _case()
    step = mt.training_step(model, F.cross_entropy, (x, y), zero=1)
    run = mt.distribute_module(step, {"data": 2}, {"x": {"data": 0}})
    run(x, y)
    other, before = _case(1)[0], run.state_dict()
    with pytest.raises(mt.MeshTensorError, match="strict=False keeps what is missing"):
        run.load_state_dict(other.state_dict())
    with pytest.raises(mt.MeshTensorError, match="there is no 'up.wieght'; did you mean 'up.weight'?"):
        run.load_state_dict({"up.wieght": other.up.weight}, strict=False)
    run.load_state_dict(other.state_dict(), strict=False)
    expected = before | other.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.state_dict().items())
    assert run.steps == 1
    assert run(x, y).item() == pytest.approx(F.cross_entropy(other(x), y).item(), abs=1e-5)


@pytest.mark.parametrize("lies", [lambda t: t, lambda t: mt.distribute(t.detach(), {"data": 2}, {"data": 0})])
def test_parameters_in_16_bits_are_loaded_with_the_copies_that_are_trained_in_their_place(lies):
    """The next step goes on from these: what was loaded would be lost."""
    torch.manual_seed(0)
    model, other = nn.Linear(6, 3).bfloat16(), nn.Linear(6, 3).bfloat16()
    x, y = torch.randn(4, 6).bfloat16(), torch.randint(0, 3, (4,))
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd", lr=0.25)
    run = mt.distribute_module(step, {"data": 2}, {"input": {"data": 0}})
    run(x, y)
    before, theirs = run.state_dict(), other.state_dict()
    with pytest.raises(mt.MeshTensorError, match="'weight' is another than 'opt.master.weight'"):
        run.load_state_dict(before | theirs)
    run.load_state_dict({name: lies(tensor) for name, tensor in theirs.items()}, strict=False)
    assert all(torch.equal(run.state_dict()[f"opt.master.{name}"], tensor.float()) for name, tensor in theirs.items())
    run(x, y)
    moved = torch.autograd.grad(F.cross_entropy(other(x), y), list(other.parameters()))
    for (name, tensor), gradient in zip(other.named_parameters(), moved, strict=True):
        expected = tensor.detach().float() - 0.25 * gradient.float()
        torch.testing.assert_close(run.state_dict()[f"opt.master.{name}"], expected, atol=5e-3, rtol=0)
    run.load_state_dict({name: tensor for name, tensor in before.items() if "master" in name}, strict=False)
    assert all(torch.equal(run.state_dict()[name], before[name]) for name in theirs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda weight: nn.parameter.UninitializedParameter(), "a parameter that is not initialised yet"),
        (lambda weight: torch.nested.nested_tensor([weight[0], weight[1]]), "a nested tensor"),
        (lambda weight: weight.to_sparse(), "layout torch.sparse_coo"),
        (lambda weight: weight.to("meta"), "is on device meta"),
    ],
)
def test_other_than_plain_tensors_are_no_state(made, said):
    model, x = nn.Linear(6, 3).bfloat16(), torch.randn(4, 6).bfloat16()
    run = mt.distribute_module(mt.training_step(model, F.mse_loss, (x, torch.randn(4, 3).bfloat16())), {"data": 2}, {})
    before = run.state_dict()
    for strict in (True, False):
        with pytest.raises(mt.MeshTensorError, match=said):
            run.load_state_dict(before | {"weight": made(before["weight"])}, strict=strict)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.state_dict().items())


def test_models_parameters_stay():
    model, x, y = _case()
    before = copy.deepcopy(model.state_dict())
    run = mt.distribute_module(mt.training_step(model, F.cross_entropy, (x, y), check=False), {"data": 2}, DATA)
    taken = run.state_dict()
    run(x, y)
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor)
        assert torch.equal(taken[name], tensor)


def test_a_step_that_raises_leaves_the_state():
    model, x, y = _case()
    run = mt.distribute_module(mt.training_step(model, F.cross_entropy, (x, y), check=False), {"data": 2}, DATA)
    run(x, y)
    before = run.state_dict()
    with pytest.raises(mt.MeshTensorError):
        run(x[:4], y)
    with pytest.raises(mt.MeshTensorError, match="the loss is nan") as error:
        run(x * float("nan"), y)
    assert "'up.weight'" in str(error.value)
    assert run.steps == 1
    for name, tensor in run.state_dict().items():
        assert torch.equal(tensor, before[name])


class Rooted(nn.Module):
    """Its loss is finite where the gradient of `root` is not: at 0."""

    def __init__(self):
        super().__init__()
        self.layer, self.root = nn.Linear(12, 8), nn.Parameter(torch.ones(4))

    def forward(self, x, target):
        return F.cross_entropy(self.layer(x), target) + torch.sqrt(self.root.abs()).mean()


@pytest.mark.parametrize(
    ("optimizer", "mesh", "layout", "zero", "clip"),
    [
        ("sgd", {"data": 1}, {}, 0, None),
        ("momentum", {"data": 2}, DATA, 1, 1.0),
        ("adamw", {"data": 2}, DATA, 3, None),
        ("lion", {"data": 3}, DATA | {"root": {"data": 0}}, 0, 1.0),
    ],
)
def test_a_gradient_that_is_not_finite_leaves_the_state(optimizer, mesh, layout, zero, clip):
    _, x, y = _case()
    model = Rooted()
    step = mt.training_step(model, None, (x, y), optimizer=optimizer, zero=zero, clip_norm=clip, check=False)
    run = mt.distribute_module(step, mesh, layout, poison=True)
    run(x, y)
    before = run.state_dict()
    before["root"][3] = 0.0
    run.load_state_dict(before)
    with pytest.raises(mt.MeshTensorError, match="not finite") as error:
        run(x, y)
    assert "those of 'root'\n" in str(error.value)
    assert "step 2, whose loss is" in str(error.value)
    assert "torch.sqrt(x.clamp(min=eps))" in str(error.value)
    assert run.steps == 1
    for name, tensor in run.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    before["root"][3] = 1.0
    run.load_state_dict(before)
    run(x, y)


@pytest.mark.parametrize(
    ("optimizer", "clip", "mesh", "zero"), [("sgd", None, {"data": 1}, 0), ("adamw", 0.3, {"data": 2}, 1)]
)
def test_a_loss_scale_that_is_a_number_changes_nothing(optimizer, clip, mesh, zero):
    model, x, y = _case()
    plain, scaled = (
        mt.training_step(
            model, F.cross_entropy, (x, y), optimizer=optimizer, clip_norm=clip, zero=zero, check=False, loss_scale=s
        )
        for s in (None, 1024)
    )
    runs = [mt.distribute_module(step, mesh, DATA) for step in (plain, scaled)]
    for _ in range(3):
        losses = [run(x, y) for run in runs]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    first, second = (run.state_dict() for run in runs)
    assert set(first) == set(second)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-5, atol=1e-7)
    assert [run.loss_scale for run in runs] == [None, 1024.0]


def test_a_dynamic_loss_scale_leaves_out_steps_that_overflow():
    """Float16 gradients overflow at first, and then do not; torch's scaler finds the same scale."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(12, 8).half(), (torch.randn(12, 12) * 40).half(), torch.randint(0, 8, (12,))

    def loss(out, target):
        return F.cross_entropy(out.float(), target, reduction="sum")

    step = mt.training_step(model, loss, (x, y), optimizer="sgd", lr=1e-4, check=False, loss_scale="dynamic")
    run = mt.distribute_module(step, {"data": 2}, {"input": {"data": 0}, "target": {"data": 0}}, poison=True)
    before, scale = run.state_dict(), 65536.0
    while not all(
        (g * scale).half().isfinite().all() for g in torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    ):
        taken = run(x, y)
        assert taken.isfinite()
        assert run.steps == 0
        after = run.state_dict()
        assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if "loss_scale" not in name)
        scale /= 2
        assert run.loss_scale == scale == after["opt.loss_scale"]
    assert run.skipped > 1
    run(x, y)
    assert (run.steps, run.loss_scale) == (1, scale)
    assert not torch.equal(run.state_dict()["weight"], before["weight"])
    other = mt.distribute_module(step, {"data": 1}, {})
    other.load_state_dict(run.state_dict())
    assert (other.loss_scale, other.state_dict()["opt.loss_scale_steps"]) == (scale, 1)


def test_state_that_is_infinite_from_the_start_may_stay_so():
    model, x, y = _case()
    with torch.no_grad():
        model.down.bias[0] = float("-inf")
    y = y.clamp(min=1)
    step = mt.training_step(model, F.cross_entropy, (x, y), check=False)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    assert run(x, y).isfinite()
    assert run.state_dict()["down.bias"][0] == float("-inf")


def test_half_precision_keeps_a_wide_value():
    model, x, y = _case()
    model, x = model.bfloat16(), x.bfloat16()
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd", lr=1e-4)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    first = run.state_dict()
    for _ in range(3):
        run(x, y)
    last = run.state_dict()
    moved = (last["opt.master.up.weight"] - first["opt.master.up.weight"]).abs().max()
    assert 0 < moved < 1e-2
    assert last["up.weight"].dtype == torch.bfloat16
    assert torch.equal(last["up.weight"], last["opt.master.up.weight"].bfloat16())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_tensor_is_the_example_of_input_and_target(accumulate):
    """As of an autoencoder; torch.export takes both for one."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    run = mt.distribute_module(mt.training_step(model, F.mse_loss, (x, x), accumulate=accumulate), {"data": 1}, {})
    noisy = x + torch.randn(8, 4)
    torch.testing.assert_close(run(noisy, x), F.mse_loss(model(noisy), x).detach())


@pytest.mark.parametrize("is_imported", [False, True])
def test_frozen_parameters_and_tied_weights(is_imported):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.scale = nn.Embedding(7, 5), nn.Parameter(torch.ones(5), requires_grad=False)
            self.out = nn.Linear(5, 7, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids, target=None):
            made = self.out(torch.tanh(self.table(ids) * self.scale))
            return made if target is None else F.cross_entropy(made, target)

    torch.manual_seed(1)
    model, ids, y = Tied(), torch.randint(0, 7, (8,)), torch.randint(0, 7, (8,))
    if is_imported:
        step = mt.training_step(mt.from_torch(torch.export.export(model, (ids, y))), None, optimizer="sgd", lr=0.5)
    else:
        step = mt.training_step(model, F.cross_entropy, (ids, y), optimizer="sgd", lr=0.5)
    run = mt.distribute_module(step, {"data": 2}, {"ids": {"data": 0}, "target": {"data": 0}}, poison=True)
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.SGD([theirs.table.weight], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(theirs(ids), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(run(ids, y), loss.detach())
    state = run.state_dict()
    assert set(state) == {"table.weight", "out.weight", "scale", "opt.step"}
    torch.testing.assert_close(state["out.weight"], theirs.table.weight.detach())


class ConvNet(nn.Module):
    """With batch norms in training."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, affine=False)
        self.pool, self.out = nn.MaxPool2d(2), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.norm2(self.second(x)) + x)
        return self.out(self.pool(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ({"data": 2}, DATA),
        ({"data": 4}, DATA),
        ({"model": 2}, {"first.weight": {"model": 0}, "second.weight": {"model": 0}}),
    ],
    ids=["data", "data, uneven", "channels"],
)
def test_batch_norm_sees_the_whole_batch(mesh, layout):
    torch.manual_seed(0)
    model, x, y = ConvNet().train(), torch.randn(6, 3, 6, 6), torch.randint(0, 5, (6,))
    before = copy.deepcopy(model.state_dict())
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="momentum", lr=0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    run = mt.distribute_module(step, mesh, layout, poison=True)
    losses, theirs = _torch(model, x, y, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    _assert_trains(run, x, y, losses, theirs)
    state = run.state_dict()
    assert set(theirs.state_dict()) <= set(state)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
