"""Models that compute in several dtypes: as torch does, or refused by name."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep
from tests.importers.models import Function


class Block(nn.Module):
    """A norm in float32, whatever comes, and linear layers."""

    def __init__(self, autocast=None, width=64):
        super().__init__()
        self.up, self.down, self._autocast = nn.Linear(width, 96), nn.Linear(96, width), autocast

    def forward(self, x):
        wide = x.float()
        x = x + (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        if self._autocast is None:
            return self.down(self.up(x).relu()).cumsum(-1)
        with torch.autocast("cpu", dtype=self._autocast):
            return self.down(self.up(x).relu()).float().cumsum(-1)


@pytest.mark.parametrize(
    ("dtype", "autocast", "off"),
    [(torch.float64, None, 1e-6), (torch.float32, torch.bfloat16, 1e-2), (torch.float32, torch.float16, 2e-3)],
)
def test_several_dtypes(dtype, autocast, off):
    torch.manual_seed(0)
    model, x = Block(autocast).to(dtype).eval(), torch.randn(4, 6, 64, dtype=dtype)
    module = mt.from_torch(torch.export.export(model, (x,)))
    expected = model(x).detach()
    layouts = {"x": {"x": 0}}, {"up.weight": {"x": 0}, "up.bias": {"x": 0}, "down.weight": {"x": 1}}
    for layout in layouts:
        found = mt.distribute_module(module, {"x": 2}, layout)(x)
        assert found.dtype == expected.dtype
        assert float((found - expected).abs().max()) <= off * float(expected.abs().max())


class Autocast(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's own, of its rms_norm
@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (nn.LayerNorm(6), "nn.layer_norm"),
        (nn.RMSNorm(6), "nn.rms_norm"),
        (nn.GroupNorm(2, 8), "nn.group_norm"),
        (nn.BatchNorm1d(8).eval(), "nn.batch_norm"),
        (nn.BatchNorm1d(8, track_running_stats=False).eval(), "nn.instance_norm"),
    ],
)
def test_norms_under_autocast(norm, name):
    """They take bfloat16 beside weights in float32: one operator each, that rows go through without being gathered."""
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    model, x = Autocast(nn.Conv1d(4, 8, 3), norm), torch.randn(4, 4, 8)
    module = mt.from_torch(torch.export.export(model, (x,)))
    assert f"R.{name}(" in module.mod.script()
    expected = model(x).detach()
    run = mt.distribute_module(module, {"x": 2}, {"x": {"x": 0}} if name != "nn.instance_norm" else {})
    found = run(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert not any(isinstance(step, CollectiveStep) for step in run.program.steps)


class Recorded(nn.Module):
    """Parts under no_grad, under another autocast and under none; a buffer that is written, an input and None given."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.own = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        wide = self.down(F.gelu(self.up(x)))
        with torch.no_grad():
            fixed = self.up(x)
        with torch.autocast("cpu", enabled=False):
            exact = self.own(wide.float())
        with torch.autocast("cpu", dtype=torch.float16):
            other = self.own(x)
        self.seen += wide.float().mean(0)
        return self.norm(wide), fixed, exact, other, wide.prod(-1), torch.cat([wide, x]), x, None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [{"x": {"d": 0}}, {"up.weight": {"d": 0}, "down.weight": {"d": 1}}])
def test_recorded_under_autocast(dtype, layout):
    torch.manual_seed(0)
    model, x = Recorded(), torch.randn(6, 8)
    with torch.autocast("cpu", dtype=dtype):
        program = torch.export.export(model, (x,))
        expected = copy.deepcopy(model)(x)
    run = mt.distribute_module(mt.from_torch(program), {"d": 2}, layout)
    found = run(x)
    assert found[-1] is None
    assert [one.dtype for one in found[:-1]] == [one.dtype for one in expected[:-1]]
    assert [one.dtype for one in found[1:4]] == [dtype, torch.float32, torch.float16]
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


class Entering(nn.Module):
    """What is inside of it runs under autocast, and its last layer without."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.down(torch.relu(self.up(x)))
            with torch.autocast("cpu", enabled=False):
                return self.norm(x.float())


@pytest.mark.parametrize("entering", [True, False])
def test_submodules_are_known_under_autocast(entering):
    model, x = Entering() if entering else Block(), torch.randn(4, 8 if entering else 64)
    with nullcontext() if entering else torch.autocast("cpu", dtype=torch.bfloat16):
        module = mt.from_torch(torch.export.export(model, (x,)))
    names = set(module.mod["main"].attrs["mesh_tensor_names"])
    assert {name for name, _ in model.named_children()} <= names
    stages = {"m0": ["up"], "m1": ["down"]}
    run = mt.pipeline(module, {"m0": {"d": 2}, "m1": {"d": 2}}, stages, microbatches=1)
    expected = mt.distribute_module(module, {"d": 2})(x)
    torch.testing.assert_close(run(x), expected, rtol=0, atol=0)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.up(x))


def test_dropout_recorded_under_autocast():
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(64, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module, whole = mt.from_torch(torch.export.export(model, (x,))), 2 * model.up(x)
    found = mt.distribute_module(module, {"d": 2}, {"x": {"d": 0}})(x, torch.tensor(3))
    assert found.dtype == torch.bfloat16
    kept = found != 0
    assert 0.4 < float(kept.float().mean()) < 0.6
    torch.testing.assert_close(found[kept], whole[kept])


def test_recorded_under_several_autocasts():
    """Dtypes that no one autocast gives, which a graph that somebody has changed may have."""
    model, x = Block().eval(), torch.randn(2, 3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = torch.export.export(model, (x,))
    linear, other = [n for n in program.graph.nodes if n.target is torch.ops.aten.linear.default]
    narrow, wide = linear.meta["val"], other.meta["val"]
    other.meta["val"] = wide.to(torch.float32)
    said = r"aten.linear.default takes float32 and gives torch.bfloat16 \(value 'linear'\)"
    with pytest.raises(mt.MeshTensorError, match=f"{said}(?s:.*)gave torch.float32, not torch.bfloat16 .*'linear_1'"):
        mt.from_torch(program)
    other.meta["val"], linear.meta["val"] = wide, narrow.to(torch.float16)
    with pytest.raises(
        mt.MeshTensorError, match=r"not all of it under that of torch.float16(?s:.*)enter torch.autocast"
    ):
        mt.from_torch(program)


def test_whole_numbers_have_to_be_equal():
    from mesh_tensor.importers.imported import refuse_differences

    one, other = torch.tensor([1, 2]), torch.tensor([1, 3])
    with pytest.raises(mt.MeshTensorError, match="result 0 differs from torch's"):
        refuse_differences(one, [other], "torch", "here", "there", {torch.bfloat16})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.norm(dim=0), x.norm(), x.norm(3, 1)),
        lambda x: (x.std(1), *torch.std_mean(x, 0)),
        lambda x: F.normalize(x),
        lambda x: F.local_response_norm(x[None], 2),
        lambda x: F.rms_norm(x, (8,)),
        lambda x: torch.addmm(x @ x.t()[:, :1], x, x.t(), alpha=1e-4, beta=1e-4),
        lambda x: F.batch_norm(x, x.new_zeros(8), x.new_ones(8), training=True),
    ],
)
@pytest.mark.parametrize("factor", [300.0, 1e-4])
def test_what_operators_have_inside_is_not_rounded(function, dtype, factor):
    """Squares of 16 bits overflow where their root does not: on the example, which the import checks, they don't."""
    torch.manual_seed(0)
    model, example = Function(function), torch.randn(6, 8).to(dtype)
    module = mt.from_torch(torch.export.export(model, (example,)))
    run = mt.distribute_module(module, {"x": 2}, {module.mod["main"].params[0].name_hint: {"x": 0}})
    found, expected = run(example * factor), model(example * factor)
    for one, other in zip(
        *((each,) if isinstance(each, torch.Tensor) else each for each in (found, expected)), strict=True
    ):
        allowed = 4 * torch.finfo(dtype).eps * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["expm1", "log1p", "sinh", "asinh", "atanh", "tanh", "logsigmoid", "softplus", "erfc"])
def test_small_results_are_as_exact_as_large_ones(name, dtype):
    """Not to a part of the largest, as imports are checked, but each to a part of itself, with the sign of zeros."""
    function = getattr(torch, name, None) or getattr(F, name)
    model = Function(function)
    module = mt.from_torch(torch.export.export(model, (torch.rand(16, dtype=dtype) / 2,)))
    x = torch.tensor([0, -0.0, 1e-10, -1e-10, 1e-7, 3e-5, -2e-4, 1e-3, 0.5, -0.5, 8, -8, 1e-30, 2, 16, 0.02]).to(dtype)
    found = mt.distribute_module(module, {"x": 3}, {module.mod["main"].params[0].name_hint: {"x": 0}})(x)
    expected = function(x)
    torch.testing.assert_close(found, expected, rtol=8 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("classes", [lambda ids: ids, lambda ids: 2 * ids - ids])
def test_classes_out_of_range_are_refused(classes):
    model = Function(lambda ids: F.one_hot(classes(ids), 5))
    module = mt.from_torch(torch.export.export(model, (torch.arange(5),)))
    name = module.mod["main"].params[0].name_hint
    for layout in ({}, {name: {"x": 0}}):
        run = mt.distribute_module(module, {"x": 2}, layout)
        torch.testing.assert_close(run(torch.tensor([4, 0, 3, 3, 1])), model(torch.tensor([4, 0, 3, 3, 1])))
        for wrong in (5, -1):
            with pytest.raises(mt.MeshTensorError, match=r"(elements|indices) from -?\d to \d"):
                run(torch.tensor([4, 0, wrong, 3, 1]))
