"""What torch allocates inside convolutions and pooling, beside what its profiler shows."""

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from tvm import relax

from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.dropout import Dropout, dropout_call
from mesh_tensor.rules.operator.vjp import vjp_call
from mesh_tensor.rules.operator.workspace import workspace_bytes
from mesh_tensor.targets.torch_ops import torch_function

BLOCK = 16
needs_blocks = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available(),
    reason="oneDNN has blocks of 16 channels with 512-bit vectors only",
)


def _call(build, *args):
    builder = relax.BlockBuilder()
    with builder.function("main", list(args)):
        builder.emit_func_output(builder.emit(build(*args)))
    return op_call(builder.get()["main"].body.blocks[0].bindings[0].value)


def _var(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorStructInfo(shape, dtype))


def _with_gradients(build, *args):
    """The call, and those of its operands' gradients, each on what that takes."""
    call = _call(build, *args)
    seed = _var("seed", *call.outputs[0].shape, dtype=call.outputs[0].dtype)
    yield call
    for number in range(len(args)):
        others = {n: arg for n, arg in enumerate(args) if len(args) == 1 or n != number}
        yield _call(lambda *given, n=number, o=others: vjp_call(call, o, {0: given[-1]}, [n]), *others.values(), seed)


def _allocated(call):
    """The most bytes at once during a call, of which its results are some."""
    function = torch_function(call)
    given = [torch.rand(tensor.shape).to(getattr(torch, tensor.dtype)) for tensor in call.inputs]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        function(*given)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
            function(*given)
    finally:
        torch.set_num_threads(threads)
    events = sorted(made.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0))


def _said(call, block=BLOCK):
    return workspace_bytes(call, block) + sum(4 * tensor.elements for tensor in call.outputs)


CONVOLUTIONS = {
    "few channels": ((4, 3, 16, 16), (16, 3, 3, 3), {"padding": 1}),
    "half a block": ((4, 8, 16, 16), (24, 8, 3, 3), {"padding": 1}),
    "whole blocks, far apart": ((4, 16, 32, 32), (32, 16, 3, 3), {"padding": 1, "strides": 2}),
    "parts of blocks": ((4, 24, 16, 16), (40, 24, 3, 3), {"padding": 1}),
    "one element under a window": ((4, 16, 16, 16), (32, 16, 1, 1), {}),
    "many images": ((16, 16, 16, 16), (32, 16, 1, 1), {}),
    "one small image": ((1, 16, 16, 16), (16, 16, 3, 3), {"padding": 1}),
    "each channel by itself": ((4, 32, 16, 16), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
}


@needs_blocks
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    data, weights, options = CONVOLUTIONS[name]
    calls = _with_gradients(lambda x, w: relax.op.nn.conv2d(x, w, **options), _var("x", *data), _var("w", *weights))
    for call in calls:
        assert _said(call) == pytest.approx(_allocated(call), rel=0.02)


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1)])
@pytest.mark.parametrize("kind", ["max_pool2d", "avg_pool2d"])
def test_pooling(kind, window):
    size, stride, padding = window
    pool = getattr(relax.op.nn, kind)
    for call in _with_gradients(lambda x: pool(x, size, stride, padding), _var("x", 2, 8, 32, 32)):
        assert _said(call) == pytest.approx(_allocated(call), rel=0.02)


def test_by_hand():
    """Data, weights and result in blocks of 16 and of 8 channels; where there are no blocks, nothing."""
    call = _call(
        lambda x, w: relax.op.nn.conv2d(x, w, padding=1, strides=2), _var("x", 2, 20, 8, 8), _var("w", 24, 20, 3, 3)
    )
    result = 2 * 24 * 16
    for block, channels, made in ((16, 32, 32), (8, 24, 24)):
        copies = 2 * channels * 64 + made * channels * 9 + 2 * made * 16
        assert workspace_bytes(call, block) == 4 * (copies - result)
    assert workspace_bytes(call, None) == 0
    assert workspace_bytes(_call(relax.op.nn.relu, _var("x", 4, 4)), BLOCK) == 0


def test_what_has_no_elements():
    for call in _with_gradients(relax.op.nn.conv2d, _var("x", 0, 3, 8, 8), _var("w", 16, 3, 3, 3)):
        assert workspace_bytes(call, BLOCK) >= 0


def test_margins_that_differ_are_a_copy():
    same, other = (
        _call(lambda x, w, p=p: relax.op.nn.conv1d(x, w, padding=p), _var("x", 1, 3, 8), _var("w", 16, 3, 3))
        for p in ([1, 1], [2, 0])
    )
    assert workspace_bytes(other, BLOCK) == workspace_bytes(same, BLOCK) + 4 * 3 * 10


@pytest.mark.parametrize(("probability", "nbytes"), [(0.1, 16), (0.0, 4), (1.0, 4)])
def test_dropout_has_a_number_for_every_element(probability, nbytes):
    """Of 64 bits, and as much while their higher bits are mixed in."""
    call = _call(
        lambda x, seed: dropout_call(x, seed, Dropout(probability, 0)), _var("x", 64, 512), _var("seed", dtype="int64")
    )
    assert _said(call) == _said(call, None) == nbytes * 64 * 512
    assert _allocated(call) == pytest.approx(nbytes * 64 * 512, rel=0.01)
