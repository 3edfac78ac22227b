"""Several layers in one weight: each part is split, whatever the number of devices."""

import pytest
import torch
from tvm import relax

import mesh_tensor as mt

from .modules import function, kinds

op = relax.op


def gated(parts, hidden):
    def build(emit, x, w, down):
        pieces = emit(op.split(emit(op.matmul(x, w)), parts, 1))
        total = emit(op.nn.silu(emit(relax.TupleGetItem(pieces, 0))))
        for number in range(1, parts):
            total = emit(op.multiply(total, emit(relax.TupleGetItem(pieces, number))))
        return emit(op.matmul(total, down))

    return function(build, x=(5, 6), w=(6, parts * hidden), down=(hidden, 7))


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize(("parts", "hidden"), [(2, 12), (3, 12), (4, 12), (2, 7)])
def test_one_all_reduce(parts, hidden, devices):
    mod = gated(parts, hidden)
    run = mt.distribute_module(mod, {"x": devices}, {"w": {"x": 1}, "down": {"x": 0}}, poison=True)
    assert kinds(run.plan) == ["all_reduce"]
    inputs = [torch.randn(5, 6), torch.randn(6, parts * hidden), torch.randn(hidden, 7)]
    torch.testing.assert_close(run(*inputs), mt.run_sequential(mod, inputs), rtol=1e-4, atol=1e-4)
    layouts = {}, {"x": 1}, {"x": 0}
    sharded = [mt.distribute(tensor, run.mesh, one) for tensor, one in zip(inputs, layouts, strict=True)]
    torch.testing.assert_close(run(*sharded).full(), mt.run_sequential(mod, inputs), rtol=1e-4, atol=1e-4)
