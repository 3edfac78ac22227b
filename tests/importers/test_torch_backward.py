"""torch's own graphs of forward and backward, imported: loss and gradients are torch's, also on a mesh."""

import re

import pytest
import torch
from torch import nn
from torch.export.experimental import _export_forward_backward
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import mesh_tensor as mt

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # torch's own


class Tokens(nn.Module):
    """Embeddings with padding, attention and norms."""

    def __init__(self):
        super().__init__()
        self.ids, self.norm = nn.Embedding(11, 8, padding_idx=0), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, ids):
        x = self.ids(ids)
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(F.gelu(x + attended)[:, -1])


class Picture(nn.Module):
    """Convolutions, also grouped and transposed, pooling, and norms of three kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.batch = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.groups = nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False), nn.GroupNorm(2, 4)
        self.up, self.out = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Linear(3, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.batch(self.first(x))), 3, 2, 1)
        return self.out(F.adaptive_avg_pool2d(self.up(F.silu(self.groups(self.second(x)))), 1).flatten(1))


MODELS = {
    "tokens": (Tokens, torch.tensor([[3, 0, 7, 10], [1, 3, 3, 2], [5, 6, 0, 0]])),
    "picture": (Picture, torch.randn(3, 2, 9, 9)),
}
LABELS = torch.tensor([4, 0, 2])


def joint(model, x, attend=None):
    """Loss, gradients and buffers as a program, its arguments, and what it gives."""
    names, buffers = [n for n, _ in model.named_parameters()], [n for n, _ in model.named_buffers()]

    def function(weights, kept, x, y):
        weights, kept = [w.detach().requires_grad_() for w in weights], [b.clone() for b in kept]
        values = dict(zip([*names, *buffers], [*weights, *kept], strict=True))
        loss = F.cross_entropy(torch.func.functional_call(model, values, (x,)), y, label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, weights), *kept

    given = [p.detach().clone() for p in model.parameters()], [b.clone() for b in model.buffers()], x, LABELS
    return torch.export.export(make_fx(function)(*given), given, strict=False), given, function(*given)


@pytest.mark.parametrize("name", MODELS)
def test_a_traced_graph_of_forward_and_backward(name):
    make, x = MODELS[name]
    program, given, expected = joint(make(), x)
    module = mt.from_torch(program)
    batch = module.mod["main"].params[len(pytree.tree_leaves(given)) - 2].name_hint
    for mesh, layouts in (({"d": 2}, {batch: {"d": 0}}), ({"d": 3}, {batch: {"d": 0}})):
        made = mt.distribute_module(module, mesh, layouts, poison=True)(*given)
        torch.testing.assert_close(tuple(pytree.tree_leaves(made)), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 3, 5)], ids=str)
def test_attention_with_a_mask(shape):
    q, k, v, mask = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(shape)

    def function(q, k, v, mask):
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, mask).square().sum(), leaves)

    given = q, k, v, mask
    module = mt.from_torch(torch.export.export(make_fx(function)(*given), given, strict=False))
    first = module.mod["main"].params[0].name_hint
    run = mt.distribute_module(module, {"d": 2}, {first: {"d": 0}}, poison=True)
    torch.testing.assert_close(run(*given), function(*given), rtol=1e-4, atol=1e-5)


def test_products_of_gradients_are_reduced_and_nothing_else():
    model = nn.Sequential(nn.Conv1d(3, 2, 3), nn.GELU(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 5))
    program, *_ = joint(model, torch.randn(3, 3, 8))
    module = mt.from_torch(program)
    run = mt.distribute_module(module, {"d": 3}, {module.mod["main"].params[6].name_hint: {"d": 0}})
    assert set(re.findall(r"all_gather|all_to_all|all_reduce|reduce_scatter", run.explain())) == {"all_reduce"}


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y)


def forward_and_backward(model, x):
    return _export_forward_backward(torch.export.export(Loss(model), (x, LABELS), strict=False))


def test_an_exported_forward_and_backward():
    model, x = Picture(), MODELS["picture"][1]
    module = mt.from_torch(forward_and_backward(model, x))
    assert len(module.state) == 3  # the batch norm's
    loss = F.cross_entropy(Picture.forward(model, x), LABELS)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    run = mt.distribute_module(module, {"d": 3}, {"x": {"d": 0}, "y": {"d": 0}}, poison=True)
    made, *gradients = run(x, LABELS)
    torch.testing.assert_close(made, loss.detach())
    torch.testing.assert_close(tuple(gradients), expected, rtol=1e-4, atol=1e-6)


def test_attention_whose_sums_are_its_weights_is_refused():
    # torch takes the forward apart, gives the backward weights for logarithms of sums, and its gradients are wrong.
    with pytest.raises(mt.MeshTensorError, match=r"logarithms of their sums(.|\n)*sdpa_kernel"):
        mt.from_torch(forward_and_backward(Tokens(), MODELS["tokens"][1]))


def test_a_backward_by_itself_takes_what_it_is_given():
    """What is no result of the forward operator is used as it is, and not computed again."""
    q, k, v, d = torch.randn(4, 2, 2, 5, 4).unbind()
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    x, seed = torch.randn(2, 2, 6, 6), torch.randn(2, 2, 3, 3)
    _, places = torch.ops.aten.max_pool2d_with_indices(-x, [2, 2])  # those of the smallest

    def function(d, q, k, v, out, sums, seed, x, places):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        attended = backward(d, q, k, v, out, sums, 0.0, True)
        attended = *attended, *backward(d, q, k, v, out, sums, 0.0, True, scale=0.0)
        pooled = torch.ops.aten.max_pool2d_with_indices_backward(seed, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
        return *attended, pooled

    given = d, q, k, v, out, sums, seed, x, places
    module = mt.from_torch(torch.export.export(make_fx(function)(*given), given, strict=False))
    names = [param.name_hint for param in module.mod["main"].params]
    run = mt.distribute_module(module, {"d": 2}, {names[1]: {"d": 0}, names[7]: {"d": 1}}, poison=True)
    torch.testing.assert_close(run(*given), function(*given), rtol=1e-4, atol=1e-5)


def test_an_update_written_into_the_graph():
    model, x = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), torch.randn(3, 6)

    def step(weights, mean, square, t, x, y):
        leaves = [w.detach().requires_grad_() for w in weights]
        loss = F.cross_entropy(torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), (x,)), y)
        gradients = torch.autograd.grad(loss, leaves)
        mean = [m.clone().mul_(0.9).add_(g, alpha=0.1) for m, g in zip(mean, gradients, strict=True)]
        square = [torch.lerp(s, g * g, 0.001) for s, g in zip(square, gradients, strict=True)]
        sized = [(s / (1 - 0.999**t)).sqrt().add(1e-8) for s in square]
        new = [w.addcdiv(m / (1 - 0.9**t), s, value=-0.01) for w, m, s in zip(weights, mean, sized, strict=True)]
        return loss, new, mean, square, t + 1

    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    state = weights, [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights], torch.tensor(1.0)
    given = *state, x, LABELS
    module = mt.from_torch(torch.export.export(make_fx(step)(*given), given, strict=False))
    batch, first = module.mod["main"].params[13].name_hint, module.mod["main"].params[0].name_hint
    run = mt.distribute_module(module, {"d": 2}, {batch: {"d": 0}, first: {"d": 1}}, poison=True)
    mine = theirs = given
    for _ in range(3):
        loss, *state = run(*mine)
        expected, *others = step(*theirs)
        torch.testing.assert_close(pytree.tree_leaves((loss, state)), pytree.tree_leaves((expected, others)))
        mine, theirs = (*state, x, LABELS), (*others, x, LABELS)
