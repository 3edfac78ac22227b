"""What is gathered of arguments and results that come and go in tiles stands in `explain()`."""

import torch
from tvm import relax

import mesh_tensor as mt
from tests.plan.modules import function

op = relax.op


def apart(shape):
    """Rows that are taken apart, and put together again."""

    def build(emit, x):
        return emit(op.reshape(emit(op.nn.relu(emit(op.reshape(x, shape)))), (12, 6)))

    return function(build, x=(12, 6))


def test_tiles_that_are_no_tiles_of_the_argument_s_dims():
    run = mt.distribute_module(apart((3, 4, 6)), {"d": 2}, {"x": {"d": 0}})
    text = run.explain()
    assert "x: 144 bytes (S[1] of (3, 4, 6) is no layout of (12, 6))" in text
    assert text.count("144 bytes") == 2  # of the result, too
    x = torch.randn(12, 6)
    torch.testing.assert_close(run(mt.distribute(x, run.mesh, {"d": 0})).full(), torch.relu(x))


def test_tiles_that_are_the_same_bytes():
    run = mt.distribute_module(apart((2, 6, 6)), {"d": 2}, {"x": {"d": 0}})
    assert "gathered where it comes" not in run.explain()


def test_what_was_asked_of_parameters():
    run = mt.distribute_module(apart((2, 6, 6)), {"d": 2}, {"x": {"d": 0}})
    (row,) = [line.split() for line in run.explain().splitlines() if line.startswith("  x ")]
    assert "S[0]" in row
    assert "(any)" not in row
