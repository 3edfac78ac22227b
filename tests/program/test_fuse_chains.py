"""Chains of operators that run as one: norms that are written out, and attention with repeated heads; what looks alike
and is something else; and `fuse="off"`."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import mesh_tensor as mt


class Norms(nn.Module):
    """One form per method; `x` is (4, 6, 8), `w` (8,)."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x, w):
        return getattr(self, self.name)(x, w)

    def as_llama_has_it(self, x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def as_gemma_has_it(self, x, w):
        return x * torch.rsqrt(1e-5 + (x * x).mean(-1, keepdim=True)) * (1 + w)

    def of_a_square(self, x, w):
        return torch.rsqrt(x.square().mean(2, True) + 0.5) * x * w

    def of_another_power(self, x, w):
        return w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6))

    def of_others(self, x, w):
        return w * (x * torch.rsqrt((x * w).mean(-1, keepdim=True).abs() + 1e-6))

    def of_others_squares(self, x, w):
        return w * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6))

    def along_another_dim(self, x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))

    def along_two_dims(self, x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6))

    def plus_a_tensor(self, x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w.abs()[:1]))

    def times_a_tensor(self, x, w):
        return x * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def times_one_number(self, x, w):
        return w[:1] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def used_twice(self, x, w):
        rate = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * (x * rate), rate

    def more_dims(self, x, w):
        return torch.stack((w, w)).reshape(2, 1, 1, 8) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


ONE = {"as_llama_has_it", "as_gemma_has_it", "of_a_square"}
LAYOUTS = ({}, {"x": {"x": 0}}, {"x": {"x": 1}}, {"x": {"x": 2}}, {"w": {"x": 0}})


@pytest.mark.parametrize("name", [name for name, method in vars(Norms).items() if name[0] != "_" and name != "forward"])
def test_norms(name):
    torch.manual_seed(0)
    model, tensors = Norms(name), (torch.randn(4, 6, 8), torch.randn(8))
    mod = mt.from_torch(torch.export.export(model, tensors))
    for layouts in LAYOUTS:
        run = mt.distribute_module(mod, {"x": 3}, layouts, poison=True)
        torch.testing.assert_close(run(*tensors), model(*tensors), rtol=1e-5, atol=1e-5)
        names = [step.call.operator for step in run.program.ops]
        split = layouts in ({"x": {"x": 2}}, {"w": {"x": 0}})  # then devices add up what squares they have, or may
        if name not in ONE or not split:
            assert ("nn.rms_norm" in names) == (name in ONE)
        assert names.count("rsqrt") == (0 if "nn.rms_norm" in names else 1)


def test_a_norm_of_bfloat16_is_rounded_as_torch_does():
    torch.manual_seed(0)
    model, tensors = Norms("as_llama_has_it"), (torch.randn(4, 6, 8).bfloat16(), torch.randn(8).bfloat16())
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, tensors)), {"x": 1})
    assert torch.equal(run(*tensors), model(*tensors))


class Heads(nn.Module):
    """Attention of 6 heads with 3 of keys and values, as transformers repeats them; `order`: of what is repeated."""

    def __init__(self, order="each", causal=True, scores=False):
        super().__init__()
        self.order, self.causal, self.scores = order, causal, scores

    def forward(self, q, k, v):
        k, v = (self.repeated(each) for each in (k, v))
        bias = torch.arange(q.shape[2]).float().expand(1, 1, q.shape[2], -1) if self.scores else None
        made = scaled_dot_product_attention(q, k, v, bias, is_causal=self.causal and not self.scores)
        return made.transpose(1, 2).flatten(2)

    def repeated(self, x):
        batch, heads, positions, width = x.shape
        if self.order == "all":
            return x[:, None].expand(batch, 2, heads, positions, width).reshape(batch, 2 * heads, positions, width)
        return x[:, :, None].expand(batch, heads, 2, positions, width).reshape(batch, heads * 2, positions, width)


@pytest.mark.parametrize("positions", [5, 50])
@pytest.mark.parametrize("how", [{}, {"causal": False}, {"scores": True}, {"order": "all"}], ids=str)
def test_heads_that_are_shared(positions, how):
    torch.manual_seed(0)
    model = Heads(**how)
    tensors = torch.randn(2, 6, positions, 4), *torch.randn(2, 2, 3, positions, 4)
    mod = mt.from_torch(torch.export.export(model, tensors))
    for mesh, layouts in (
        ({"x": 1}, {}),
        ({"x": 2}, {"q": {"x": 0}}),
        ({"x": 3}, {"q": {"x": 1}, "k": {"x": 1}, "v": {"x": 1}}),
        ({"x": 2}, {"q": {"x": 1}}),
        ({"x": 2}, {"v": {"x": 3}, "k": {"x": 2}}),
    ):
        run = mt.distribute_module(mod, mesh, layouts, poison=True)
        torch.testing.assert_close(run(*tensors), model(*tensors), rtol=1e-5, atol=1e-5)
        if mesh == {"x": 1}:
            names = [step.call.operator for step in run.program.ops]
            shared = [name for name in names if name.startswith("fused.shared_attention")]
            assert len(shared) == (how != {"order": "all"})
            assert ("broadcast_to" in names) == (how == {"order": "all"} or bool(how.get("scores")))


def test_sizes_that_come_later():
    """A plan for others is made of the one for the first."""
    torch.manual_seed(0)
    model, sizes = Heads(), {2: torch.export.Dim("positions", min=2)}
    shape = {"q": sizes, "k": sizes, "v": sizes}
    mod = mt.from_torch(torch.export.export(model, tuple(_heads(8)), dynamic_shapes=shape))
    run = mt.distribute_module(mod, {"x": 2}, {"q": {"x": 1}})
    for positions in (8, 50, 64, 9, 70, 5):
        tensors = _heads(positions)
        torch.testing.assert_close(run(*tensors), model(*tensors), rtol=1e-5, atol=1e-5)
        assert any(step.call.name == "fused.shared_attention" for step in run.program.ops)


def _heads(positions):
    return torch.randn(2, 6, positions, 4), *torch.randn(2, 2, 3, positions, 4)


def test_gradients_are_those_of_torch():
    """What a gradient needs is made: chains are left as they are."""
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attend = Norms("as_llama_has_it"), Heads()
            self.w, self.q, self.k = nn.Parameter(torch.randn(8)), nn.Linear(8, 24), nn.Linear(8, 12)

        def forward(self, x):
            y = self.norm(x, self.w)
            q, k = (each.unflatten(2, (-1, 4)).transpose(1, 2) for each in (self.q(y), self.k(y)))
            return self.attend(q, k, k).square().mean()

    model, x = Layer(), torch.randn(4, 6, 8)
    module = mt.gradient(mt.from_torch(torch.export.export(model, (x,))))
    run = mt.distribute_module(module.mod, {"m": 2}, {"x": {"m": 0}}, weights=module.params)
    loss, found = run(x)
    torch.testing.assert_close(loss, model(x))
    for gradient, wanted in zip(found, torch.autograd.grad(model(x), list(model.parameters())), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_explain_says_what_is_one_for_what():
    model, tensors = Norms("as_llama_has_it"), (torch.randn(4, 6, 8), torch.randn(8))
    mod = mt.from_torch(torch.export.export(model, tensors))
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}})
    (line,) = [line for line in run.explain().splitlines() if "torch nn.rms_norm" in line]
    assert line.endswith("one for power, mean, add, rsqrt, multiply, multiply")
    off = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}}, fuse="off")
    assert "one for" not in off.explain()
    assert [step.call.operator for step in off.program.ops] == ["power", "mean", "add", "rsqrt", "multiply", "multiply"]
    torch.testing.assert_close(off(*tensors), run(*tensors))


@pytest.mark.parametrize("fuse", [True, False, None, "on", "never", 1])
def test_what_fuse_can_be(fuse):
    mod = mt.from_torch(torch.export.export(Norms("of_a_square"), (torch.randn(4, 6, 8), torch.randn(8))))
    with pytest.raises(mt.MeshTensorError, match=r"fuse=.* is unknown(.|\n)*'auto', or 'off'") as caught:
        mt.distribute_module(mod, {"x": 1}, fuse=fuse)
    assert repr(fuse) in str(caught.value)
