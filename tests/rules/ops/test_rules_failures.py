"""Operators without a rule are refused by name."""

import pytest
import torch
import tvm
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.rules.ops import has_rule, rule_of
from mesh_tensor.rules.ops.call import op_call

op = relax.op


def _var(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorStructInfo(shape, dtype))


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("image.resize2d", lambda: op.image.resize2d(_var(1, 3, 4, 4), (8, 8))),
        ("vision.roi_pool", lambda: op.vision.roi_pool(_var(1, 3, 4, 4), _var(2, 5), (2, 2), 1.0)),
        ("layout_transform", lambda: op.layout_transform(_var(4, 6), lambda i, j: (j, i))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operators_without_a_rule(name, build):
    assert not has_rule(name)
    with pytest.raises(mt.MeshTensorError) as caught:
        rule_of(op_call(relax.BlockBuilder().normalize(build())), "main.y")
    message = str(caught.value)
    assert f"operator R.{name} has no sharding rule" in message
    assert f"where: main.y = R.{name}(" in message
    assert "fix: pass replicate_unknown=True to compute it replicated, or add a rule (docs/adding_an_op.md)" in message


def _module():
    """A module with an operator that has no rule, in a dataflow block."""
    x = _var(6, 4)
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.hint_on_device(op.nn.relu(x), tvm.cpu()), "y")
            result = builder.emit_output(op.exp(y))
        builder.emit_func_output(result)
    return builder.get()


def test_in_a_module_the_binding_is_named():
    with pytest.raises(mt.MeshTensorError, match=r"(?s)R\.hint_on_device has no sharding rule.*where: main\.y = R"):
        mt.distribute_module(_module(), {"x": 2}, {"x": {"x": 0}})


def test_what_has_no_rule_is_computed_replicated_if_asked_to():
    run = mt.distribute_module(_module(), {"x": 2}, {"x": {"x": 0}}, replicate_unknown=True)
    x = torch.randn(6, 4)
    torch.testing.assert_close(run(x), x.relu().exp())
