"""Steps of training that can't be made, or taken."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.api import own_gradients
from tests.refusals import refusal


def _model():
    torch.manual_seed(0)
    return nn.Linear(4, 3), torch.randn(6, 4), torch.randint(0, 3, (6,))


@pytest.fixture(scope="module")
def run():
    model, x, y = _model()
    return mt.distribute_module(mt.training_step(model, F.cross_entropy, (x, y)), {"data": 2}, {"input": {"data": 0}})


def test_models_of_inference_mode_are_refused():
    with torch.inference_mode():
        model, x, y = _model()
    message = refusal(mt.training_step, model, F.cross_entropy, (x, y))
    assert "'weight', 'bias', 'input 0', 'input 1' made in torch.inference_mode" in message
    with torch.inference_mode():
        assert refusal(mt.training_step, model, F.cross_entropy, (x, y)) == message


def test_a_step_is_made_in_inference_mode():
    model, x, y = _model()
    with torch.inference_mode():
        step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd")
    run = mt.distribute_module(step, {"data": 2}, {"input": {"data": 0}})
    torch.testing.assert_close(run(x, y), F.cross_entropy(model(x), y).detach())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adamv"}, "there is no optimizer 'adamv'; did you mean 'adam'?"),
        ({"optimizer": "sgd", "betas": (0.9, 0.9)}, "'sgd' has no option 'betas'"),
        ({"learning_rate": 0.1}, "'adamw' has no option 'learning_rate'"),
        ({"zero": 4}, "zero=4"),
        ({"loss_scale": "static"}, "loss_scale='static'"),
        ({"loss_scale": 0}, "loss_scale=0"),
    ],
)
def test_optimizers_and_options(options, said):
    model, x, y = _model()
    message = refusal(mt.training_step, model, F.cross_entropy, (x, y), **options)
    assert said in message
    assert "fix:" in message


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.AdamW, "name it, with its options beside: optimizer='adamw', lr=1e-3"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "name it, with its options beside: optimizer='sgd', lr=1e-3"),
        (lambda p: torch.optim.RMSprop(p), "(known: 'sgd', 'momentum', 'adam', 'adamw', 'lion'); or pass a function"),
    ],
)
def test_optimizers_of_torch(make, said):
    model, x, y = _model()
    optimizer = make(model.parameters())
    assert said in refusal(mt.training_step, model, F.cross_entropy, (x, y), optimizer=optimizer)


def test_inputs_are_a_tuple():
    model, x, y = _model()
    assert "the inputs are a Tensor" in refusal(mt.training_step, model, F.cross_entropy, x)
    message = refusal(mt.training_step, model, F.cross_entropy, {"x": x, "y": y})
    assert "the inputs are a dict" in message
    assert "fix: pass a tuple of tensors, the target last: (x, y)" in message


def test_what_is_no_model():
    assert "takes a torch model, not a str" in refusal(mt.training_step, "gelu", F.cross_entropy, ())


def test_what_is_no_loss():
    model, x, y = _model()
    assert "loss='mse' is no function" in refusal(mt.training_step, model, "mse", (x, y))


@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_with_other_results(count):
    model, x, y = _model()
    for other in (x, 1):  # also where it is none of the recorded results
        loss = lambda out, target, other=other: (F.cross_entropy(out, target), other)  # noqa: E731
        message = refusal(mt.training_step, model, loss, (x, y), accumulate=count)
        assert "the loss is a tuple, not a tensor" in message


def test_what_is_no_tensor_no_schedule_and_no_loss_of_a_module():
    model, x, y = _model()
    assert "no tensors: 3.0" in refusal(mt.training_step, model, F.cross_entropy, (x, 3.0))
    for schedule in (3, torch.optim.lr_scheduler.CosineAnnealingLR):
        message = refusal(mt.training_step, model, F.cross_entropy, (x, y), schedule=schedule)
        assert f"schedule={schedule!r}" in message
        assert "as LambdaLR takes it" in message
    module = mt.from_torch(torch.export.export(model, (x,)))
    assert "of an imported module" in refusal(mt.training_step, module, F.cross_entropy, (x, y))


def test_no_inputs():
    assert "without inputs" in refusal(mt.training_step, nn.Linear(2, 2), F.cross_entropy)


def test_nothing_to_train():
    model, x, y = _model()
    assert "no parameter to train" in refusal(mt.training_step, model.requires_grad_(False), F.cross_entropy, (x, y))


def test_a_parameter_without_gradient():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.ParameterList([torch.ones(3), torch.ones(3)])

        def forward(self, x):
            return self.used(x) + 0 * (self.idle[0] * self.idle[1]).detach()

    _, x, y = _model()
    message = refusal(mt.training_step, Idle(), F.cross_entropy, (x, y))
    for number in (0, 1):
        assert f"the result does not depend on parameter 'idle.{number}'" in message
    assert "requires_grad_(False)" in message


@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients(way):
    model, x, y = _model()
    hook = getattr(model.weight, way)(lambda _: None)
    message = refusal(mt.training_step, model, F.cross_entropy, (x, y), check=False)
    assert "'weight' with hooks on gradients" in message
    hook.remove()
    mt.training_step(model, F.cross_entropy, (x, y))


@pytest.mark.parametrize("way", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_on_gradients_of_modules(way):
    """They may change nothing in the gradients that are compared with torch's, and others later."""
    linear, x, y = _model()
    model = nn.Sequential(linear, nn.Tanh())
    hooks = [getattr(each, way)(lambda *_: None) for each in (model, model[1])]
    message = refusal(mt.training_step, model, F.cross_entropy, (x, y))
    assert "'Sequential', '1' with hooks on gradients" in message
    for hook in hooks:
        hook.remove()
    mt.training_step(model, F.cross_entropy, (x, y))


def test_gradients_that_are_not_finite():
    class Root(nn.Linear):
        def forward(self, x):
            return torch.sqrt(super().forward(x) * 0)

    torch.manual_seed(0)
    message = refusal(mt.training_step, Root(4, 3), F.cross_entropy, (torch.randn(6, 4), torch.randint(0, 3, (6,))))
    assert "the gradient of 'weight' differs by nan" in message
    assert "not finite" in message


class _Doubled(torch.autograd.Function):
    """Its gradient is twice that of what it computes, which an export does not tell."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class _Small(nn.Linear):
    """The gradient of `weight` is little on the scale of that of `bias`."""

    def forward(self, x):
        small = x @ _Doubled.apply(self.weight).T if self.is_doubled else x @ self.weight.T
        return self.factor * small + self.bias


@pytest.mark.parametrize("check", [True, False])
def test_functions_with_a_backward_of_their_own(check):
    """It may be the same in the gradients that are compared with torch's, and another later."""
    model, x, y = _model()
    model.forward = lambda x: _Doubled.apply(nn.functional.linear(x, model.weight, model.bias))
    message = refusal(mt.training_step, model, F.cross_entropy, (x, y), check=check)
    assert "'_Doubled' with a backward of its own (torch.autograd.Function)" in message
    assert "write it with torch's operators" in message


def test_hooks_on_gradients_of_what_is_computed():
    """As those that limit gradients on their way, which do nothing to small ones."""

    class Limited(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            if made.requires_grad:
                made.register_hook(lambda gradient: gradient.clamp(-1, 1))
            return made

    _, x, y = _model()
    for check in (True, False):
        message = refusal(mt.training_step, Limited(4, 3), F.cross_entropy, (x, y), check=check)
        assert "the model sets hooks on gradients of what it computes (1)" in message


def _twice(module, given, made=None):
    return tuple(2 * each for each in given)


def test_hooks_on_gradients_of_modules_that_are_not_the_models():
    """Of its loss, of all modules, and of one that it has without torch's knowing."""
    model, x, y = _model()
    loss, act = nn.CrossEntropyLoss(), nn.Tanh()
    loss.register_full_backward_pre_hook(_twice)
    assert "'CrossEntropyLoss' with hooks on gradients" in refusal(mt.training_step, model, loss, (x, y), check=False)
    handle = nn.modules.module.register_module_full_backward_pre_hook(_twice)
    try:
        message = refusal(mt.training_step, model, F.cross_entropy, (x, y), check=False)
    finally:
        handle.remove()
    assert "'all modules of torch' with hooks on gradients" in message
    act.register_full_backward_hook(_twice)
    forward = model.forward
    model.forward = lambda x: act(forward(x))
    message = refusal(mt.training_step, model, F.cross_entropy, (x, y), check=False)
    assert "a module that the model doesn't know as its own, with hooks on gradients" in message


def test_hooks_on_nodes_of_autograd():
    class Limited(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            if made.requires_grad:
                made.grad_fn.register_prehook(lambda gradients: (gradients[0].clamp(-1e-3, 1e-3),))
            return made

    _, x, y = _model()
    message = refusal(mt.training_step, Limited(4, 3), F.cross_entropy, (x, y), check=False)
    assert "the model asks for the grad_fn of what it computes (1)" in message


def test_what_is_compiled_hides_nothing():
    class Hooked(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            if made.requires_grad:
                made.register_hook(lambda gradient: 2 * gradient)
            return made

    class Doubled(nn.Linear):
        def forward(self, x):
            return _Doubled.apply(super().forward(x))

    _, x, y = _model()
    for inner, said in ((Hooked, "sets hooks on gradients"), (Doubled, "'_Doubled' with a backward of its own")):
        model = nn.Sequential(torch.compile(inner(4, 3), backend="aot_eager"))
        assert said in refusal(mt.training_step, model, F.cross_entropy, (x, y), check=False)


def test_a_function_whose_gradient_is_known_to_be_that_of_what_it_computes(monkeypatch):
    """Bloom's GELU, in transformers."""
    model, x, y = _model()
    model.forward = lambda x: _Cubed.apply(nn.functional.linear(x, model.weight, model.bias))
    assert "'_Cubed' with a backward of its own" in refusal(mt.training_step, model, F.cross_entropy, (x, y))
    monkeypatch.setattr(own_gradients, "_BLOOM", f"{__name__}._Cubed")
    mt.training_step(model, F.cross_entropy, (x, y))


def test_checkpoints_that_compute_without_gradients():
    """Also where all weights have a gradient by another way."""
    model, x, y = _model()

    class Again(nn.Sequential):
        def forward(self, x):
            whole = super().forward
            return whole(x) + torch.utils.checkpoint.checkpoint(whole, x.clone().requires_grad_(), use_reentrant=True)

    message = refusal(mt.training_step, Again(model), F.cross_entropy, (x, y), check=False)
    assert "a checkpoint with use_reentrant=True" in message
    assert "fix: use_reentrant=False" in message


def test_checkpoints_of_torchs():
    """Their backward is that of what they compute."""
    model, x, y = _model()

    class Again(nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    again = mt.training_step(Again(model), F.cross_entropy, (x, y))
    first = mt.training_step(nn.Sequential(model), F.cross_entropy, (x, y))
    runs = [mt.distribute_module(step, {"x": 2}, {}) for step in (again, first)]
    assert runs[0](x, y) == runs[1](x, y)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_a_wrong_gradient_of_a_small_scale(monkeypatch, dtype, factor):
    monkeypatch.setattr(_Doubled, "__module__", "torch.like")
    torch.manual_seed(0)
    model, batch = _Small(4, 3).to(dtype), (torch.randn(6, 4, dtype=dtype), torch.randint(0, 3, (6,)))
    model.is_doubled, model.factor = False, factor
    mt.training_step(model, F.cross_entropy, batch)
    model.is_doubled = True
    message = refusal(mt.training_step, model, F.cross_entropy, batch)
    assert "the gradient of 'weight' differs by" in message
    assert "and that of all" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_that_are_zero_but_for_rounding_are_right(dtype):
    """That of what all classes have in common, and of the bias before a norm over the batch."""

    class Shifted(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.shift = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return super().forward(x) + self.shift

    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(8)] if dtype == torch.float32 else []
    model = Shifted(nn.Linear(4, 8), *norms, nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    mt.training_step(model, F.cross_entropy, (torch.randn(6, 4, dtype=dtype), torch.randint(0, 3, (6,))))


@pytest.mark.parametrize("weights", [{}, {"weight": torch.zeros(3, 4)}])
def test_weights_to_start_from(weights):
    """They were not looked at, and the run started from the model's."""
    model, x, y = _model()
    step = mt.training_step(model, F.cross_entropy, (x, y))
    message = refusal(mt.distribute_module, step, {"data": 2}, weights=weights)
    assert "weights are given for a step of training" in message
    assert "run.load_state_dict(...)" in message


def test_zero_without_a_split_batch():
    model, x, y = _model()
    step = mt.training_step(model, F.cross_entropy, (x, y), zero=1)
    message = refusal(mt.distribute_module, step, {"data": 2})
    assert 'zero=1, but no axis of Mesh({"data": 2}) splits the batch' in message
    assert "{'input': {axis: 0}}" in message


def test_names_of_layouts():
    model, x, y = _model()
    step = mt.training_step(model, F.cross_entropy, (x, y))
    assert "'wieght'" in refusal(mt.distribute_module, step, {"data": 2}, {"wieght": {"data": 0}})
    assert "without a mesh" in refusal(mt.distribute_module, step)


def test_batches(run):
    _, x, y = _model()
    assert "1 tensors and none for a batch of 'input', 'target'" in refusal(run, x)
    assert "parameter 'input': (5, 4), but expected (6, 4) float32" in refusal(run, x[:5], y)
    assert run.steps == 0


def test_states(run):
    state = run.state_dict()
    short = {name: tensor for name, tensor in state.items() if name != "opt.exp_avg.bias"}
    assert "'opt.exp_avg.bias' is missing" in refusal(run.load_state_dict, short)
    assert "there is no 'wait'" in refusal(run.load_state_dict, state | {"wait": torch.ones(3)})
    message = refusal(run.load_state_dict, state | {"bias": torch.ones(4), "weight": state["weight"].double()})
    assert "'bias' is (4,) torch.float32, but has to be (3,) torch.float32" in message
    assert "'weight' is (3, 4) torch.float64" in message


def test_states_of_other_frozen_parameters():
    """They would be left out without a word, and losses be others."""
    model, x, y = _model()
    model.bias.requires_grad_(False)
    run = mt.distribute_module(mt.training_step(model, F.cross_entropy, (x, y)), {"data": 2})
    state = run.state_dict()
    run.load_state_dict(state)
    run.load_state_dict({name: tensor for name, tensor in state.items() if name != "bias"})
    for other in (state["bias"] + 1, state["bias"].double(), torch.zeros(4), None):
        message = refusal(run.load_state_dict, state | {"bias": other})
        assert "'bias' is not trained, and is another than the model's" in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"clip_norm": "1"}, "clip_norm='1'"),
        ({"lr": "high", "betas": (0.9, 1.0)}, "'adamw' with lr='high', betas=(0.9, 1.0)"),
        ({"lr": float("nan")}, "'adamw' with lr=nan"),
        ({"betas": 0.9, "weight_decay": -1}, "'adamw' with betas=0.9, weight_decay=-1"),
    ],
)
def test_numbers_that_mean_nothing(options, said):
    model, x, y = _model()
    assert said in refusal(mt.training_step, model, F.cross_entropy, (x, y), **options)


def test_states_and_schedules_without_numbers():
    model, x, y = _model()
    step = mt.training_step(model, F.cross_entropy, (x, y), schedule=lambda step: None, check=False)
    run = mt.distribute_module(step, {"data": 1})
    assert "schedule(0) is None" in refusal(run, x, y)
    state = run.state_dict()
    for wrong in (torch.tensor([1, 2]), "x", torch.tensor(-4), torch.tensor(float("nan"))):
        assert "'opt.step' is " in refusal(run.load_state_dict, {**state, "opt.step": wrong})
    assert "is no state" in refusal(run.load_state_dict, [1, 2])


def test_schedules_of_any_number():
    model, x, y = _model()
    for factor, size in ((torch.tensor([0.5]), 0.5), (np.float32(0.5), 0.5), (np.int64(1), 1.0), (-1.0, 1.0)):
        step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd", schedule=lambda n, f=factor: f, lr=2.0)
        assert abs(step.numbers(0)[0]) == 2 * size
    for factor in (float("inf"), 1e300, 1j, "1", torch.ones(2)):
        step = mt.training_step(model, F.cross_entropy, (x, y), schedule=lambda n, f=factor: f, lr=2.0)
        assert "what the learning rate is multiplied with" in refusal(step.numbers, 0)


def test_a_large_negative_learning_rate_loses_no_state():
    model, x, y = _model()
    step = mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd", schedule=lambda n: -3e38 * n, lr=1.0)
    run = mt.distribute_module(step, {"data": 1})
    run(10 * x, y)
    assert "not finite" in refusal(run, 10 * x, y)
    assert run.steps == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.state_dict().values())


@pytest.mark.parametrize(
    ("name", "optimizer"), [("opt.step", "sgd"), ("opt.exp_avg.w", "adam"), ("opt_numbers", "sgd")]
)
def test_parameters_that_are_called_as_what_a_step_keeps(name, optimizer):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, inner = nn.Parameter(torch.randn(4, 3)), self
            *path, last = name.split(".")
            for part in path:
                inner.add_module(part, nn.Module())
                inner = inner.get_submodule(part)
            inner.register_parameter(last, nn.Parameter(torch.randn(3)))

        def forward(self, x):
            return x @ self.w + self.get_parameter(name)

    _, x, y = _model()
    assert f"{name!r} is called as something" in refusal(
        mt.training_step, Named(), F.cross_entropy, (x, y), optimizer=optimizer
    )


def test_losses_that_torch_does_not_export():
    model, x, _ = _model()
    said = refusal(mt.training_step, model, lambda o, t: F.gaussian_nll_loss(o, t, o.square()), (x, torch.randn(6, 3)))
    assert "torch.export can't record the model with its loss" in said
    assert "data-dependent" in said
