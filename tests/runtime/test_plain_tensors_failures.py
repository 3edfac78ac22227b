"""Tensors without memory of their own: refused, instead of looked for at address 0."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.refusals import refusal

ONES = torch.ones(8, 8)


@pytest.fixture(scope="module")
def kern():
    func = mt.annotate(matmul(8, 8, 8, 16, 16, 16), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    return mt.compile(func, target="c")


def test_fake_tensors(kern):
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(ONES)
        texts = [refusal(lambda: kern(fake, fake)), refusal(lambda: kern(ONES, ONES))]
    texts.append(refusal(lambda: kern(fake, ONES)))
    assert "a FakeTensor, which has no data" in texts[0]
    assert "called under a FakeTensorMode, where tensors have no data" in texts[1]
    assert "parameter 'A': a FakeTensor, which has no data" in texts[2]
    assert all("mt.as_custom_op" in text for text in texts)


@pytest.mark.parametrize(
    "transformed",
    [lambda f: torch.vmap(f)(torch.ones(3, 8, 8)), lambda f: torch.func.grad(lambda x: f(x).sum())(ONES)],
)
def test_transforms(kern, transformed):
    text = refusal(lambda: transformed(lambda x: kern(x, ONES)))
    assert "a tensor inside of torch.func.vmap, grad or jvp" in text
    assert "call of kernel 'matmul_kernel'" in text
    assert "call it outside of torch.func's transforms" in text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested(kern, module):
    nested = torch.nested.nested_tensor([ONES[0], ONES[1]])
    assert "parameter 'A': a nested tensor, whose rows have lengths of their own" in refusal(lambda: kern(nested, ONES))
    assert "parameter 'input': a nested tensor, whose rows" in refusal(lambda: module(nested))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "mkldnn"])
def test_layouts(kern, layout):
    ways = {"sparse_coo": torch.Tensor.to_sparse, "sparse_csr": torch.Tensor.to_sparse_csr}
    other = ways.get(layout, torch.Tensor.to_mkldnn)(ONES)
    text = refusal(lambda: kern(ONES, other))
    name = "_mkldnn" if layout == "mkldnn" else layout
    assert f"parameter 'B': layout torch.{name}, but expected torch.strided" in text
    assert "pass a dense copy: .to_dense()" in text


def test_views_that_are_negated(kern):
    """Such as the imaginary part of a conjugate: their memory holds the opposite."""
    text = refusal(lambda: kern(torch._neg_view(ONES), ONES))
    assert "parameter 'A': a view that torch negates when it reads it" in text
    assert ".resolve_neg()" in text


@pytest.fixture(scope="module")
def module():
    program = torch.export.export(nn.Linear(8, 8), (ONES,))
    return mt.distribute_module(mt.from_torch(program), {"x": 2}, {"weight": {"x": 0}})


def test_tensors_that_stand_for_others(kern, module):
    """What is computed with such a tensor is for its class to say: a number is in another one's units, say."""
    twice = TwoTensor(ONES, ONES + 1)
    what = "a TwoTensor, which stands for other tensors"
    assert f"parameter 'A': {what}" in refusal(lambda: kern(twice, ONES))
    assert f"parameter 'input': {what}" in refusal(lambda: module(twice))
    assert what in refusal(lambda: mt.distribute(twice, {"x": 2}, {"x": 0}))
    assert f"'weight': {what}" in refusal(lambda: module.load_state_dict({"weight": twice, "bias": ONES[0]}))
    assert "pass a plain tensor of its values" in refusal(lambda: module(nn.Parameter(twice)))


def test_subclasses_that_only_have_a_name(kern, module):
    named = ONES.as_subclass(type("Named", (torch.Tensor,), {}))
    assert type(kern(named, ONES)) is torch.Tensor
    assert kern(named, ONES).eq(8).all()
    assert torch.equal(module(named), module(ONES))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*torch.ao.quantization")
def test_other_tensors_than_their_class_says(kern, module):
    """Quantized ones, and those inside of torch.func.functionalize."""
    quantized = torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8)
    text = refusal(lambda: mt.distribute(quantized, {"x": 2}, {"x": 0}))
    assert "a quantized tensor (torch.qint8)" in text
    assert ".dequantize()" in text
    for call in (lambda x: kern(x, ONES), module, lambda x: mt.distribute(x, {"x": 2}, {"x": 0})):
        text = refusal(lambda call=call: torch.func.functionalize(call)(ONES))
        assert "a tensor inside of torch.func" in text
    lazy = nn.LazyLinear(8).weight
    program = mt.from_torch(torch.export.export(nn.Linear(8, 8), (ONES,)))
    text = refusal(lambda: mt.distribute_module(program, {"x": 2}, {}, weights={**program.params, "weight": lazy}))
    assert "parameter 'weight': a parameter that is not initialised yet" in text


def test_distribute():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(ONES)
    assert "a FakeTensor, which has no data" in refusal(lambda: mt.distribute(fake, {"x": 2}, {"x": 0}))
    text = refusal(lambda: mt.distribute(ONES.to_sparse(), {"x": 2}, {"x": 0}))
    assert "layout torch.sparse_coo, but expected torch.strided" in text


def test_what_watches_only(kern):
    """Modes and transforms that leave tensors as they are."""
    with FlopCounterMode(display=False):
        assert kern(ONES, ONES).eq(8).all()
    assert torch.vmap(lambda x: x * kern(ONES, ONES))(torch.ones(3, 8, 8)).eq(8).all()
