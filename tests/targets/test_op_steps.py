"""Steps that follow each other as one function: the same bits as one by one, errors that name the step, and what torch
keeps between operators and their gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.targets.op_steps import has_own_memory, in_sections, recorded_pairs


class Block(nn.Module):
    """Both norms, and causal attention of two heads."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.proj = nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.proj(self.first(x)).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.second(x + y.transpose(1, 2).reshape(2, 6, 8))


def test_what_torch_keeps_for_gradients_changes_no_bit():
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    step = mt.training_step(Block(), F.mse_loss, (x, y))
    together, apart = (mt.distribute_module(step, {"d": 1}, poison=poison) for poison in (False, True))
    records = recorded_pairs(together.program)
    steps = [step for step in together.program.ops if step.results[0] in records]
    kept = [step.call.operator for step in steps if records[step.results[0]].gradient is not step]
    assert sorted(kept) == ["nn.attention", "nn.layer_norm", "nn.rms_norm"]
    for _ in range(2):
        assert torch.equal(together(x, y), apart(x, y))
    state = apart.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in together.state_dict().items())


def test_operators_and_what_ends_among_them_are_one_section():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    mod = mt.from_torch(torch.export.export(model, (torch.randn(4, 8),)))
    layouts = {"0.weight": {"x": 0}, "0.bias": {"x": 0}, "2.weight": {"x": 1}}
    run = mt.distribute_module(mod, {"x": 2}, layouts)
    runs = [
        [step.words.split(" (")[0] for step in run_ if "end" not in step.words]
        for run_ in in_sections(run.program.steps)
    ]
    assert [run_ for run_ in runs if run_ and "operator" in run_[0]] == [
        ["operator fused.linear", "operator nn.relu", "operator fused.linear"],
        ["operator add"],
    ]
    assert [step for run_ in in_sections(run.program.steps) for step in run_] == list(run.program.steps)


def test_an_operator_that_fails_is_named():
    class Picks(nn.Module):
        def forward(self, x, index):
            return torch.relu(x)[index + 1] * 2

    tensors = torch.randn(4, 3), torch.tensor([0, 2])
    run = mt.distribute_module(mt.from_torch(torch.export.export(Picks(), tensors)), {"x": 1})
    with pytest.raises(MeshTensorError, match="indices from 1 to 4 into a dim of 4"):
        run(tensors[0], torch.tensor([0, 3]))
    torch.testing.assert_close(run(*tensors), Picks()(*tensors))


class Loss(nn.Module):
    """Squares of a layer's results."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return (self.layer(x) ** 2).mean()


class Normed(nn.Module):
    """A norm, with a weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x, scale):
        return (nn.functional.rms_norm(x, (6,), self.weight, 1e-6) * scale).sum()


def test_gradients_are_handed_on_in_the_memory_that_they_were_made_in():
    """On one device: products that sum over rows, and sums, are views of nothing; and what they give is right."""
    torch.manual_seed(0)
    model, x = Loss(), torch.randn(5, 3, 6)
    module = mt.gradient(mt.from_torch(torch.export.export(model, (x,))))
    run = mt.distribute_module(module.mod, {"d": 1}, weights=module.params)
    outputs = [str(each.output) for each in run.program.parameters if each.output is not None]
    made = [step.call.name for step in run.program.ops if set(step.results) & set(outputs)]
    assert sorted(made) == ["einsum", "mean", "sum"]
    assert all(has_own_memory(run.program, name) for name in outputs)
    loss, found = run(x)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    torch.testing.assert_close(loss, model(x).detach())
    torch.testing.assert_close(tuple(found), expected)


def test_einsums_that_only_turn_may_be_views():
    x = torch.randn(3, 4)
    builder = relax.BlockBuilder()
    given = relax.Var("x", relax.TensorStructInfo((3, 4), "float32"))
    with builder.function("main", [given]):
        with builder.dataflow():
            turned = builder.emit_output(relax.op.einsum((given,), "ab->ba"))
        builder.emit_func_output(turned)
    run = mt.distribute_module(builder.get(), {"d": 1})
    (output,) = (str(each.output) for each in run.program.parameters if each.output is not None)
    assert not has_own_memory(run.program, output)
    result = run(x)
    result += 1
    assert torch.equal(result.t(), x + 1)


@pytest.mark.parametrize(("size", "dtype"), [(1e3, torch.float16), (2e-3, torch.float16), (1e3, torch.bfloat16)])
def test_gradients_of_rms_norms_of_16_bits(size, dtype):
    """The square of 1000 is infinite in float16, and that of 0.0002 is 0."""
    model = Normed(torch.randn(6).to(dtype))
    x, scale = (torch.randn(3, 6) * size).to(dtype), torch.arange(6).to(dtype)
    module = mt.gradient(mt.from_torch(torch.export.export(model, (x, scale))), ["x", "weight"])
    _, found = mt.distribute_module(module, {"d": 2}, {"x": {"d": 0}})(x, scale)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, model.weight)]
    made = nn.functional.rms_norm(leaves[0], (6,), leaves[1], 1e-6) * scale.double()
    for ours, meant in zip(found, torch.autograd.grad(made.sum(), leaves), strict=True):
        assert ours.dtype == dtype
        off = 8 * torch.finfo(dtype).eps * float(meant.abs().max())
        torch.testing.assert_close(ours.double(), meant, rtol=0, atol=off)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e15])
def test_gradients_of_rms_norms_of_large_numbers(size):
    """The cube of 1e-15 is 0 in float32."""
    weight = torch.randn(6)
    model = Normed(weight)
    x, scale = torch.randn(3, 6) * size, torch.arange(6.0)
    module = mt.gradient(mt.from_torch(torch.export.export(model, (x, scale))), ["x", "weight"])
    _, found = mt.distribute_module(module, {"d": 2}, {"x": {"d": 0}})(x, scale)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = torch.autograd.grad((nn.functional.rms_norm(leaves[0], (6,), leaves[1], 1e-6) * scale).sum(), leaves)
    for made, meant in zip(found, expected, strict=True):
        torch.testing.assert_close(made.double(), meant, rtol=1e-4, atol=1e-5 * float(meant.abs().max()))
