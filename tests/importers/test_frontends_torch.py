"""Modules from torch compute what they computed there."""

import pytest
import torch
import tvm.script
from torch import nn
from torch.nn import functional as F
from tvm import ir, relax

import mesh_tensor as mt
from tests.importers.models import Function


def imported(model, *inputs):
    """The module of a torch model; it parses again from what it prints."""
    module = mt.from_torch(torch.export.export(model.eval(), inputs))
    assert relax.analysis.well_formed(module.mod)
    ir.assert_structural_equal(tvm.script.from_source(module.mod.script(show_meta=True)), module.mod)
    return module


def check(model, *inputs, **tolerances):
    """What the module computes is what torch computes."""
    module = imported(model, *inputs)
    names = [param.name_hint for param in module.mod["main"].params[: len(inputs)]]
    result = mt.run_sequential(module.mod, dict(zip(names, inputs, strict=True)) | module.params)
    expected = model(*inputs)
    torch.testing.assert_close(result, expected.detach(), **tolerances)
    return module


def operators(module):
    """The names of the operators that the module's function calls."""
    names = []
    relax.analysis.post_order_visit(
        module.mod["main"],
        lambda expr: names.append(expr.op.name) if isinstance(getattr(expr, "op", None), ir.Op) else None,
    )
    return names


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)


MASK = torch.rand(6, 6) < 0.7
MASK[:, 0] = True


@pytest.mark.parametrize(
    ("options", "key_heads"),
    [
        ({}, 4),
        ({"is_causal": True}, 4),
        ({"scale": 0.3}, 4),
        ({"is_causal": True, "enable_gqa": True}, 2),
        ({"attn_mask": MASK}, 4),
        ({"attn_mask": torch.rand(2, 1, 6, 1)}, 4),
        ({"attn_mask": torch.rand(4, 6, 6)}, 4),
    ],
)
def test_attention_stays_one_operator(options, key_heads):
    q = torch.randn(2, 4, 6, 8)
    k, v = torch.randn(2, key_heads, 6, 8), torch.randn(2, key_heads, 6, 8)
    module = check(Attention(**options), q, k, v)
    assert len([name for name in operators(module) if name.startswith("relax.nn.attention")]) == 1


@pytest.mark.parametrize(
    ("batch", "mask"),
    [
        ((), (5, 7)),
        ((3,), (5, 7)),
        ((3,), (3, 1, 7)),
        ((1,), (1, 7)),
        ((2, 3, 4), (5, 7)),
        ((2, 3, 4), (4, 5, 7)),
        ((2, 3, 4), (3, 1, 5, 7)),
        ((2, 3, 4), (2, 1, 4, 5, 7)),
        ((2, 3, 4), (1, 1, 1, 5, 1)),
        ((2, 1, 3, 4), (1, 1, 1, 4, 5, 7)),
    ],
)
def test_attention_with_other_batch_dims(batch, mask):
    q, k, v = torch.randn(*batch, 5, 8), torch.randn(*batch, 7, 8), torch.randn(*batch, 7, 6)
    module = check(Attention(attn_mask=torch.rand(mask)), q, k, v)
    assert len([name for name in operators(module) if name.startswith("relax.nn.attention")]) == 1


@pytest.mark.parametrize("batches", [((2, 4), (2, 1), (2, 1)), ((1, 4), (3, 4), (1, 1)), ((1,), (2,), (2,))])
def test_attention_that_broadcasts(batches):
    check(Attention(attn_mask=torch.rand(5, 5)), *(torch.randn(*batch, 5, 8) for batch in batches))


def test_grouped_attention_with_two_batch_dims():
    q, k, v = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 2, 5, 8), torch.randn(2, 3, 2, 5, 8)
    check(Attention(is_causal=True, enable_gqa=True), q, k, v)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: F.layer_norm(x, (8,)), [(4, 8)]),
        (lambda x: F.rms_norm(x, (8,)), [(4, 8)]),
        (lambda x, w: F.rms_norm(x, (8,), w, eps=1e-3), [(4, 8), (8,)]),
        (F.gelu, [(4, 8)]),
        (lambda x: F.gelu(x, approximate="tanh"), [(4, 8)]),
        (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(3,), (2, 4), (4, 3)]),
        (lambda a, b: a @ b, [(2, 3, 4), (4, 5)]),
        (lambda a, b: torch.bmm(a, b), [(2, 3, 4), (2, 4, 5)]),
        (lambda x: F.max_pool2d(x, 2), [(1, 2, 4, 4)]),
        (lambda x: F.group_norm(x, 2), [(2, 4, 3)]),
        (lambda x, w, b: F.group_norm(x, 2, w, b, eps=0.1), [(2, 4, 3, 3), (4,), (4,)]),
        (lambda a, b: torch.add(a, b, alpha=3), [(4, 8), (8,)]),
        (lambda a, b: torch.sub(a, b, alpha=3) - 2, [(4, 8), (8,)]),
        (lambda x: x.flip(0, 1), [(4, 8)]),
        (lambda x: x.var(0), [(4, 8)]),
        (lambda x: x.std((0, -1), keepdim=True, correction=0), [(4, 8, 3)]),
        (lambda x: x.amax(0) - x.amin(), [(4, 8)]),
        (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=(1, 0), groups=2), [(2, 4, 6, 7), (6, 2, 3, 3), (6,)]),
        (lambda x: torch.softmax(x, -1).sum(0), [(4, 8)]),
        (lambda x: torch.where(torch.ones(4, 4).tril() > 0, x, -1e9).softmax(-1), [(4, 4)]),
    ],
)
def test_operators(function, shapes):
    check(Function(function), *(torch.randn(shape) for shape in shapes))


def test_half_precision_stays_half():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).half(), torch.randn(4, 8).half()
    module = check(model, x, rtol=1e-3, atol=1e-3)  # intermediate results are rounded to 11 bits
    assert module.mod["main"].ret_struct_info.dtype == "float16"


def test_names_of_weights_and_submodules():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
    module = check(model, torch.randn(4, 8))
    assert list(module.params) == ["p_0_weight", "p_0_bias", "p_2_weight"]
    torch.testing.assert_close(module.params["p_2_weight"], model[2].weight.detach())
    assert module.names["0.weight"] == "p_0_weight"
    stated = {"0.weight": {"x": 0}, "1": {"x": 1}, "2.weight": {"x": 1}, "2": "R"}
    mod = mt.annotate_module(module.mod, {"x": 2}, stated)
    layouts = [str(annotation.sharding) for annotation in mt.read_module_annotations(mod).annotations.values()]
    assert layouts == ["S[0]", "S[1]", "S[1]", "R"]
    (relu,) = [b for b in mod["main"].body.blocks[1].bindings if b.var.name_hint == f"{module.names['1']}_sharded"]
    assert relu.value.attrs.placement.dim_specs[0].axis == 1


def test_submodule_that_is_called_twice_has_no_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(torch.relu(self.fc(x)))

    module = check(Twice(), torch.randn(4, 8))
    assert "fc.weight" in module.names
    assert "fc" not in module.names


def test_inputs_and_weights_with_one_name():
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(8))

        def forward(self, x):
            return x * self.x

    module = check(Clash(), torch.randn(4, 8))
    assert list(module.params) == ["x_1"]


def test_weights_by_their_names_in_torch():
    class Model(nn.Module):
        """One name of a parameter is what another one's becomes."""

        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.a_weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return self.a(x) @ self.a_weight

    model, x = Model().eval(), torch.randn(3, 4)
    module = imported(model, x)
    run = mt.distribute_module(module.mod, {"x": 2}, {"a.weight": {"x": 0}}, weights=module.params)
    torch.testing.assert_close(run(x), model(x).detach())
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).eval()
    run = mt.distribute_module(imported(plain, x).mod, {"x": 2}, weights=plain.state_dict())
    torch.testing.assert_close(run(x), plain(x).detach())


def test_buffers_are_constants():
    module = check(nn.BatchNorm1d(8), torch.randn(4, 8))
    assert list(module.params) == ["weight", "bias"]


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    module = check(Tied(), torch.randint(12, (2, 3)))
    assert list(module.params) == ["embed_weight"]
    assert module.names["head.weight"] == "embed_weight"


def test_symbolic_sizes():
    batch = torch.export.Dim("batch", min=2, max=64)
    model = nn.Linear(8, 4).eval()
    program = torch.export.export(model, (torch.randn(4, 8),), dynamic_shapes={"input": {0: batch}})
    module = mt.from_torch(program)
    x = torch.randn(7, 8)
    torch.testing.assert_close(mt.run_sequential(module.mod, {"input": x} | module.params), model(x).detach())
