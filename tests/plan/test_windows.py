"""Convolutions and pooling by rows: margins are exchanged, and the result stays split."""

import pytest
import torch
import torch.nn.functional as F
from tvm import relax

import mesh_tensor as mt

DATA = torch.randn(2, 3, 17, 12)
WEIGHT, DEPTHWISE, LINE = torch.randn(4, 3, 3, 3), torch.randn(3, 1, 3, 3), torch.randn(4, 3, 5)
ROW = 2 * 3 * 12 * 4  # bytes of one row of all images and channels


def module(make, *tensors):
    """A module with one function of such tensors."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorStructInfo(t.shape, "float32")) for i, t in enumerate(tensors)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(make(*params))
        builder.emit_func_output(out)
    return builder.get()


def conv(**options):
    return lambda a, w: relax.op.nn.conv2d(a, w, **options)


def pooled(kind, *sizes, **options):
    return lambda a: getattr(relax.op.nn, f"{kind}_pool2d")(a, *sizes, **options)


# the operator, its operands, what torch makes of them, rows that a device of two receives
CASES = {
    "conv2d": (conv(padding=1), (DATA, WEIGHT), lambda a, w: F.conv2d(a, w, padding=1), 1),
    "strided": (conv(padding=1, strides=2), (DATA, WEIGHT), lambda a, w: F.conv2d(a, w, padding=1, stride=2), 1),
    "dilated": (conv(padding=2, dilation=2), (DATA, WEIGHT), lambda a, w: F.conv2d(a, w, padding=2, dilation=2), 2),
    "unpadded": (conv(), (DATA, WEIGHT), F.conv2d, 1),
    "depthwise": (conv(padding=1, groups=3), (DATA, DEPTHWISE), lambda a, w: F.conv2d(a, w, padding=1, groups=3), 1),
    "max pool": (pooled("max", (2, 2), (2, 2)), (DATA,), lambda a: F.max_pool2d(a, 2), 1),
    "padded max pool": (
        pooled("max", (3, 3), (2, 2), (1, 1), ceil_mode=True),
        (DATA,),
        lambda a: F.max_pool2d(a, 3, 2, 1, ceil_mode=True),
        1,
    ),
    "mean pool": (pooled("avg", (2, 2), (1, 1)), (DATA,), lambda a: F.avg_pool2d(a, 2, 1), 1),
    "padded mean pool": (
        pooled("avg", (3, 3), (1, 1), (1, 1), count_include_pad=True),
        (DATA,),
        lambda a: F.avg_pool2d(a, 3, 1, 1),
        1,
    ),
}


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rows(name, mesh):
    make, operands, reference, rows = CASES[name]
    both = {"x": 2, "y": 3} if "y" in mesh else {"x": 2}
    run = mt.distribute_module(module(make, *operands), mesh, {"p0": both}, poison=True)
    torch.testing.assert_close(torch.as_tensor(run(*operands)), reference(*operands), rtol=1e-4, atol=1e-4)
    assert {step.kind for step in run.program.collectives} == {"halo"}
    if mesh == {"x": 2}:
        assert sum(step.bytes for step in run.program.collectives) <= rows * ROW
        (result,) = (run.program.values[p.output] for p in run.program.parameters if p.output)
        assert str(result.sharding) == "S[2]"


def test_a_line_of_convolutions():
    line = DATA[:, :, :, 0].contiguous()

    def make(a, w):
        return relax.op.nn.relu(relax.op.nn.conv1d(a, w, padding=2))

    run = mt.distribute_module(module(make, line, LINE), {"x": 3}, {"p0": {"x": 2}})
    result = torch.as_tensor(run(line, LINE))
    torch.testing.assert_close(result, F.conv1d(line, LINE, padding=2).relu(), rtol=1e-4, atol=1e-4)
    assert [step.kind for step in run.program.collectives] == ["halo"]


def test_what_counts_elements_outside_is_gathered():
    """A mean of what there is of a window: of tiles nobody knows how many of it lie outside."""
    make = pooled("avg", (3, 3), (1, 1), (1, 1), count_include_pad=False)
    run = mt.distribute_module(module(make, DATA), {"x": 2}, {"p0": {"x": 2}})
    expected = F.avg_pool2d(DATA, 3, 1, 1, count_include_pad=False)
    torch.testing.assert_close(torch.as_tensor(run(DATA)), expected)
    assert {step.kind for step in run.program.collectives} == {"all_gather"}


def test_a_window_of_all_rows():
    """A kernel as high as the image: every device needs nearly all of it, and gets no more than that."""
    tall = torch.randn(4, 3, 17, 3)
    run = mt.distribute_module(module(conv(padding=[8, 1, 8, 1]), DATA, tall), {"x": 2}, {"p0": {"x": 2}})
    expected = F.conv2d(DATA, tall, padding=(8, 1))
    torch.testing.assert_close(torch.as_tensor(run(DATA, tall)), expected, rtol=1e-4, atol=1e-4)
    assert sum(step.bytes for step in run.program.collectives) <= 9 * ROW
