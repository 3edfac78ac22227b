"""`reduce_dtype`: gradients are added up, and sent, in fewer bits; nothing else changes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt

DATA = {"input": {"data": 0}, "target": {"data": 0}}


def _case(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 18), nn.Tanh(), nn.Linear(18, 6)).to(dtype)
    x, y = torch.randn(12, 12, dtype=dtype), torch.randint(0, 6, (12,))
    return model, x, y, lambda **more: mt.training_step(model, F.cross_entropy, (x, y), **{**options, **more})


def _sent(run):
    """The dtypes and bytes of what gradients send."""
    values = run.program.values
    steps = [s for s in run.program.collectives if s.op == "sum" and values[s.src].tile_bytes > 64]
    return {values[s.src].dtype for s in steps}, sum(s.bytes for s in steps)


@pytest.mark.parametrize(("zero", "mesh"), [(0, {"data": 2}), (0, {"data": 3}), (1, {"data": 2}), (3, {"data": 2})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_half_the_bytes(zero, mesh, dtype):
    _, _, _, step = _case(dtype, check=False, zero=zero, optimizer="sgd")
    wide, narrow = (mt.distribute_module(step(reduce_dtype=r), mesh, DATA) for r in (None, "bfloat16"))
    (wide_dtypes, wide_bytes), (dtypes, nbytes) = _sent(wide), _sent(narrow)
    assert (wide_dtypes, dtypes) == ({"float32"}, {"bfloat16"})
    assert nbytes == pytest.approx(wide_bytes / 2, rel=0.05)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_added_is_rounded(accumulate):
    """Each device's part is rounded once, and their sum; the parameter is not."""
    model, x, y, step = _case(optimizer="sgd", lr=1.0, accumulate=accumulate)
    run = mt.distribute_module(step(reduce_dtype=torch.bfloat16), {"data": 2}, DATA)
    other = copy.deepcopy(model)
    run(x, y)
    parts = []
    for half in (slice(0, 6), slice(6, 12)):
        (F.cross_entropy(other(x[half]), y[half]) / 2).backward()
        parts.append({n: p.grad.clone() for n, p in other.named_parameters()})
        other.zero_grad()
    state = run.state_dict()
    for name, parameter in model.named_parameters():
        total = sum(part[name].bfloat16().float() for part in parts).bfloat16().float()
        torch.testing.assert_close(state[name], parameter.detach() - total, rtol=0, atol=2e-3)
        exact = sum(part[name] for part in parts)
        assert not torch.equal(state[name], parameter.detach() - exact)


def test_clipping_sees_what_was_added():
    model, x, y, step = _case(clip_norm=0.1, optimizer="sgd", lr=1.0)
    run = mt.distribute_module(step(reduce_dtype="bfloat16"), {"data": 2}, DATA)
    run(x, y)
    state = run.state_dict()
    moved = [(state[name] - parameter.detach()).norm() for name, parameter in model.named_parameters()]
    assert torch.stack(moved).norm().item() == pytest.approx(0.1, rel=1e-3)


def _signs(parameter, gradient, lr, step):
    return parameter - lr * torch.sign(gradient), {}


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_what_functions_are_given_is_sent_so(clip_norm):
    """In bfloat16, though they take the gradient in float32."""
    *_, step = _case(torch.bfloat16, check=False, optimizer=_signs, clip_norm=clip_norm)
    wide, narrow = (mt.distribute_module(step(reduce_dtype=r), {"data": 2}, DATA) for r in (None, "bfloat16"))
    (wide_dtypes, wide_bytes), (dtypes, nbytes) = _sent(wide), _sent(narrow)
    assert (wide_dtypes, dtypes) == ({"float32"}, {"bfloat16"})
    assert nbytes == pytest.approx(wide_bytes / 2, rel=0.05)


@pytest.mark.parametrize("dtype", ["float8_e4m3", torch.int32, "half"])
def test_other_dtypes_are_refused(dtype):
    *_, step = _case(check=False)
    with pytest.raises(mt.MeshTensorError, match="reduce_dtype=") as error:
        step(reduce_dtype=dtype)
    assert "'float16', 'bfloat16', or leave it out: float32" in str(error.value)
