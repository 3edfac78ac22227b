"""Where torch waits for something that kernels don't give: a gradient, a tangent, a trace."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import mesh_tensor as mt
from tests.refusals import refusal

from .test_ambient import MESH, Given

CALLS = {
    "kernel": (lambda g, a: g.c(a, g.b), "parameter 'A'", "call of kernel 'matmul_kernel'"),
    "kernel with a tensor for its result": (lambda g, a: g.c(a, g.b, g.out), "parameter 'A'", "call of kernel"),
    "distribute": (lambda g, a: mt.distribute(a, MESH, {"x": 0}), "", "distribute"),
    "module": (lambda g, a: g.module(a), "parameter 'x'", "call of 'main'"),
    "run_sequential": (lambda g, a: mt.run_sequential(g.mod, [a, g.b]), "parameter 'x'", "call of 'main'"),
}


@pytest.fixture(scope="module")
def given():
    return Given("failures")


@pytest.mark.parametrize("call", [call for call in CALLS if call != "module"])  # which are recorded
def test_gradients(given, call):
    run, parameter, where = CALLS[call]
    expected = run(given, given.a)
    for leaf in (given.a.clone().requires_grad_(), torch.nn.Parameter(given.a)):
        for wanted in (leaf, leaf * 1):
            text = refusal(lambda wanted=wanted: run(given, wanted))
            assert parameter in text
            assert where in text
            assert "requires a gradient, which would be lost" in text
            assert ".detach()" in text
            assert "torch.no_grad()" in text
            assert "shapes and dtypes" not in text
            for silent in (torch.no_grad, torch.inference_mode):
                with silent():
                    assert _equal(run(given, wanted), expected)
            assert _equal(run(given, wanted.detach()), expected)


def test_a_tensor_for_the_result_that_requires_a_gradient(given):
    text = refusal(lambda: given.c(given.a, given.b, given.out.clone().requires_grad_()))
    assert "parameter 'C': requires a gradient, which would be lost" in text
    assert "mt.compile(func, backward=...) takes the kernels that compute gradients" in text


def test_tiles_that_require_gradients():
    tiles = [torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)]
    sharding = mt.Sharding.make({"x": 2}, 2, {"x": 0})
    text = refusal(lambda: mt.MeshTensor(tiles, (4, 3), sharding))
    assert "a tile requires a gradient, which would be lost" in text
    assert ".detach()" in text
    with torch.no_grad():
        made = mt.MeshTensor(tiles, (4, 3), sharding)
    assert made.redistribute({"x": 1}).full().eq(1).all()
    assert not made.full().requires_grad


def test_weights_are_constants(given):
    module = mt.distribute_module(given.mod, weights={"w": torch.nn.Parameter(given.b)})
    result = module(given.a)
    assert torch.equal(result, given.module(given.a))
    assert not result.requires_grad


def test_gradients_of_a_custom_op(given):
    """Torch raises, as nothing is registered that could compute them."""
    with pytest.raises(RuntimeError, match="mesh_tensor.ambient_failures.* no autograd formula was registered"):
        given.op(given.a.clone().requires_grad_(), given.b).sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
@pytest.mark.parametrize("call", CALLS)
def test_tangents(given, call):
    run, parameter, _ = CALLS[call]
    with forward_ad.dual_level():
        text = refusal(lambda: run(given, forward_ad.make_dual(given.a, given.a)))
        run(given, given.a)
    assert "a dual tensor of torch.autograd.forward_ad, whose tangent would be lost" in text
    assert parameter in text


@pytest.mark.parametrize("call", CALLS)
def test_traces(given, call):
    run = CALLS[call][0]
    text = refusal(lambda: make_fx(lambda a: run(given, given.a))(given.a))
    assert "called while torch traces, which would take the results for constants" in text
    assert "mt.as_custom_op" in text


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
@pytest.mark.parametrize("call", CALLS)
def test_a_torchscript_trace(given, call):
    run = CALLS[call][0]
    text = refusal(lambda: torch.jit.trace(lambda a: run(given, a), given.a))
    assert "called while torch traces" in text


def _equal(result, expected):
    if isinstance(result, mt.MeshTensor):
        result, expected = result.full(), expected.full()
    return torch.equal(result, expected)
