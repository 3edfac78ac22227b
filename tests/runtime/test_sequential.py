"""run_sequential: whole modules on one device, against torch."""
# ruff: noqa: RET504 (messages name bindings, so TVMScript keeps them)

import functools
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import nn
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T

import mesh_tensor as mt
from kernels.matmul import matmul


def _close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@I.ir_module
class AnnotatedMLP:
    I.module_attrs({"device_num": 10})
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((1,), I.Range(4, 5))]})

    @R.function
    def foo(
        x: R.Tensor((16, 16), "float32"),
        weight1: R.Tensor((16, 16), "float32"),
        weight2: R.Tensor((16, 16), "float32"),
    ) -> R.Tensor((16, 16), "float32"):
        lv0 = R.matmul(x, weight1)
        lv1 = R.nn.gelu(lv0)
        lv2 = R.dist.annotate_sharding(lv1, device_mesh="mesh[0]", placement="S[1]")
        lv3 = R.matmul(lv2, weight2)
        return lv3


@I.ir_module
class NestedMLP:
    @R.function(private=True)
    def mlp(
        x: R.Tensor((16, 16), "float32"), A: R.Tensor((16, 16), "float32"), B: R.Tensor((16, 16), "float32")
    ) -> R.Tensor((16, 16), "float32"):
        with R.dataflow():
            lv0 = R.matmul(x, A)
            Y = R.nn.relu(lv0)
            Z = R.matmul(Y, B)
            R.output(Z)
        return Z

    @R.function
    def main(
        x: R.Tensor((16, 16), "float32"),
        A: R.Tensor((16, 16), "float32"),
        B: R.Tensor((16, 16), "float32"),
        C: R.Tensor((16, 16), "float32"),
        D: R.Tensor((16, 16), "float32"),
    ) -> R.Tensor((16, 16), "float32"):
        R.func_attr({"num_input": 1})
        cls = NestedMLP
        with R.dataflow():
            lv0 = cls.mlp(x, A, B)
            lv1 = cls.mlp(lv0, C, D)
            R.output(lv1)
        return lv1


@I.ir_module
class Symbolic:
    @R.function(private=True)
    def twice(x: R.Tensor(("m", 4), "float32")) -> R.Tensor(("m * 2", 4), "float32"):
        m = T.int64()
        y = R.concat((x, x), axis=0)
        z = R.reshape(y, R.shape([m * 2, 4]))
        return z

    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), biggest: R.Tensor((), "bool")):
        n = T.int64()
        cls = Symbolic
        a = cls.twice(x)
        b = R.reshape(a, R.shape([n * 8]))
        k = T.int64()
        q = R.match_cast(b, R.Tensor((k,), "float32"))
        if biggest:
            s = R.max(q, axis=[0])
            r = R.expand_dims(s, [0])
        else:
            s = R.sum(q, axis=[0])
            r = R.expand_dims(s, [0])
        return (r, (q, x))


def test_annotations_are_ignored():
    x, w1, w2 = (torch.randn(16, 16) for _ in range(3))
    _close(mt.run_sequential(AnnotatedMLP, [x, w1, w2], "foo"), F.gelu(x @ w1) @ w2)


def test_private_functions_and_numpy():
    x, *w = (torch.randn(16, 16) for _ in range(5))
    expected = F.relu(F.relu(x @ w[0]) @ w[1] @ w[2]) @ w[3]
    _close(mt.run_sequential(NestedMLP, dict(zip("xABCD", [t.numpy() for t in (x, *w)], strict=True))), expected)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("biggest", [True, False])
def test_symbols_tuples_and_if(rows, biggest):
    x = torch.randn(rows, 4)
    r, (q, same) = mt.run_sequential(Symbolic, [x, torch.tensor(biggest)])
    _close(r, (x.max() if biggest else 2 * x.sum())[None])
    _close(q, torch.cat([x, x]).flatten())
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr()


def test_a_result_shares_no_memory_with_constants():
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        builder.emit_func_output(builder.emit(relax.op.reshape(relax.const(np.ones(4, "float32")), (2, 2))))
    mod = builder.get()
    mt.run_sequential(mod, []).zero_()
    assert mt.run_sequential(mod, []).sum() == 4


def test_functions_of_te_equal_the_operators():
    """Reductions with an initial value, temporaries in global memory, several stages."""
    x, *w = (torch.randn(16, 16) for _ in range(5))
    legalized = relax.transform.LegalizeOps()(NestedMLP)
    assert any(isinstance(f, tvm.tirx.PrimFunc) for _, f in legalized.functions_items())
    _close(mt.run_sequential(legalized, [x, *w]), mt.run_sequential(NestedMLP, [x, *w]))


def test_softmax_and_norm_of_te():
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorStructInfo((5, 8), "float32")) for name in "xw")
    with builder.function("main", [x, w]):
        normal = builder.emit(relax.op.nn.layer_norm(x, *[relax.const(np.ones(8, "float32"))] * 2, axes=-1))
        builder.emit_func_output(builder.emit(relax.op.nn.softmax(relax.op.add(normal, w))))
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    legalized = relax.transform.LegalizeOps()(builder.get())
    _close(mt.run_sequential(legalized, [a, b]), torch.softmax(F.layer_norm(a, (8,)) + b, -1))


def test_a_symbolic_tir_function_takes_its_sizes_from_the_call():
    builder = relax.BlockBuilder()
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorStructInfo((n, 4), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.nn.softmax(x)))
    mod = relax.transform.LegalizeOps()(builder.get())
    a = torch.randn(3, 4)
    _close(mt.run_sequential(mod, [a]), torch.softmax(a, -1))


def test_a_tilelang_kernel():
    builder = relax.BlockBuilder()
    a, b = (relax.Var(name, relax.TensorStructInfo((64, 64), "float32")) for name in "ab")
    kernel = builder.add_func(matmul(64, 64, 64), "kernel")
    with builder.function("main", [a, b]):
        info = relax.TensorStructInfo((64, 64), "float32")
        product = builder.emit(relax.op.call_tir(kernel, (a, b), info))
        builder.emit_func_output(builder.emit(relax.op.nn.relu(product)))
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    _close(mt.run_sequential(builder.get(), [x, y]), F.relu(x @ y))


def test_values_are_freed_after_their_last_use(monkeypatch):
    from mesh_tensor.runtime import sequential_runner

    alive: list[weakref.ref] = []
    peak = 0

    def watched(function, *args):
        nonlocal peak
        result = function(*args)
        alive.append(weakref.ref(result))
        peak = max(peak, sum(ref() is not None for ref in alive))
        return result

    original = sequential_runner.untyped_function
    monkeypatch.setattr(sequential_runner, "untyped_function", lambda call: functools.partial(watched, original(call)))
    builder = relax.BlockBuilder()
    value = x = relax.Var("x", relax.TensorStructInfo((4,), "float32"))
    with builder.function("main", [x]):
        for _ in range(10):
            value = builder.emit(relax.op.exp(relax.op.negative(value)))
        builder.emit_func_output(value)
    mod = builder.get()
    for count in (20, 40):  # interpreted, then as it was recorded
        mt.run_sequential(mod, [torch.ones(4)])
        assert len(alive) == count
        assert peak == 2


class _Transformer(nn.Module):
    """Embedding, two blocks of attention and a gated MLP, a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.RMSNorm(16)])
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).reshape(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 16))
        normal = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(normal)) * self.up(normal))
        return x @ self.embedding.weight.T, x[:, -1]


class _Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.GroupNorm(2, 8), nn.GELU(), nn.AvgPool2d(3, 1, 1),
            nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(8, 5), nn.LogSoftmax(-1),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


class _Assorted(nn.Module):
    def forward(self, x, index):
        best = x.topk(2, -1)
        mask = torch.ones(4, 4).triu(1).bool()
        y = x[:, :, :4].masked_fill(mask[None], -1.0)
        return (
            torch.where(x > 0, x, x.cumsum(1)).var(1, correction=0),
            best.values,
            best.indices,
            torch.gather(x, 2, index),
            y.flip(1).roll(1, 0).argmax(-1),
            F.pad(x, (1, 2), value=3.0)[..., 1::2],
            x // 0.5,
            torch.einsum("bij,bkj->bik", x, x).clamp(-1, 1),
        )


_MODELS = {
    "transformer": (_Transformer, lambda: (torch.randint(0, 19, (2, 6)),)),
    "convolutions": (_Convolutions, lambda: (torch.randn(2, 3, 16, 16),)),
    "assorted": (_Assorted, lambda: (torch.randn(3, 4, 5), torch.randint(0, 5, (3, 4, 2)))),
}


def _leaves(value):
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, tuple) else [value]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("as_inputs", [False, True], ids=["constants", "params"])
@pytest.mark.parametrize("name", _MODELS)
def test_exported_models(name, as_inputs):
    make, inputs = _MODELS[name]
    torch.manual_seed(0)
    model, args = make().eval(), inputs()
    mod = from_exported_program(torch.export.export(model, args), keep_params_as_input=as_inputs)
    with torch.no_grad():
        expected = model(*args)
    for actual, wanted in zip(_leaves(mt.run_sequential(mod, list(args))), _leaves(expected), strict=True):
        _close(actual, wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_by_name_replace_those_of_the_module():
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    mod = from_exported_program(torch.export.export(layer, (x,)), keep_params_as_input=True)
    weight = torch.randn(3, 4)
    (result,) = mt.run_sequential(mod, {"input": x, "p_weight": weight})
    _close(result, F.linear(x, weight, layer.bias.detach()))
