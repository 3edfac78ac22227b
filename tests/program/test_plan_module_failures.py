"""Modules that can't be planned: the binding and its operator are named."""

import pytest
import torch
import tvm
from tvm import relax

import mesh_tensor as mt


def _module():
    """A module with an operator that has no sharding rule."""
    x = relax.Var("x", relax.TensorStructInfo((6, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.hint_on_device(relax.op.nn.relu(x), tvm.cpu()), "y")
            result = builder.emit_output(relax.op.exp(y))
        builder.emit_func_output(result)
    return builder.get()


def test_an_operator_without_a_rule():
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.distribute_module(_module(), {"x": 2}, {"x": {"x": 0}})
    message = str(caught.value)
    assert "operator R.hint_on_device has no sharding rule" in message
    assert "where: main.y = R.hint_on_device(" in message
    assert "fix: pass replicate_unknown=True to compute it replicated, or add a rule (docs/adding_an_op.md)" in message


def test_is_computed_replicated_if_the_caller_says_so():
    run = mt.distribute_module(_module(), {"x": 2}, {"x": {"x": 0}}, replicate_unknown=True)
    x = torch.randn(6, 4)
    torch.testing.assert_close(run(x), x.relu().exp())
