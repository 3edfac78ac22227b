"""Terms of one sum are completed together, also where one of them alone would rather be gathered."""

import pytest
import torch
from tvm import relax

import mesh_tensor as mt

from . import modules

op = relax.op
SPLIT = {"x": {"d": 1}, "a": {"d": 0}, "y": {"d": 1}, "b": {"d": 0}}


def summed(emit, x, a, y, b):
    return emit(op.add(emit(op.matmul(x, a)), emit(op.negative(emit(op.matmul(y, b))))))


def shared(emit, x, a, y, b):
    """The second product is taken twice."""
    second = emit(op.matmul(y, b))
    return emit(op.add(emit(op.add(emit(op.matmul(x, a)), second)), emit(op.exp(second))))


@pytest.mark.parametrize("few", [8, 7])
@pytest.mark.parametrize(("build", "kinds"), [(summed, ["all_reduce"]), (shared, ["all_gather"] * 2 + ["all_reduce"])])
def test_terms_wait_for_each_other(build, kinds, few):
    shapes = {"x": (512, 256), "a": (256, 512), "y": (512, few), "b": (few, 512)}
    module = modules.function(build, **shapes)
    plan = modules.planned(module, {"d": 4}, SPLIT)
    assert sorted(kind for kind in modules.kinds(plan) if kind != "slice") == kinds
    tensors = [torch.randn(shape) for shape in shapes.values()]
    run = mt.distribute_module(module, {"d": 4}, SPLIT, poison=True)
    torch.testing.assert_close(run(*tensors), mt.run_sequential(module, tensors), rtol=1e-4, atol=1e-4)
