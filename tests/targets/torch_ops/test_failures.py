"""What the table of torch functions refuses, and how it says so."""

import pytest
import torch
from tvm import relax

from mesh_tensor import MeshTensorError
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.targets.torch_ops import has_torch_function, torch_function

op = relax.op


def _var(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorStructInfo(shape, dtype))


_REFUSED = {
    "no function": (lambda: op.image.affine_grid(_var(1, 2, 3), (8, 8)), "R.image.affine_grid has no torch function"),
    "dropout": (lambda: op.nn.dropout(_var(4)), "random"),
    "channel blocks": (
        lambda: op.nn.max_pool2d(_var(1, 2, 4, 4, 8), (2, 2), layout="NCHW8c"),
        "layout 'NCHW8c'",
    ),
    "a mask from the bottom right without keys": (
        lambda: op.nn.attention(_var(1, 6, 2, 4), _var(1, 4, 2, 4), _var(1, 4, 2, 4), causal_mask="BottomRight"),
        "the first queries see no key",
    ),
    "a window without a mask": (
        lambda: op.nn.attention(_var(1, 4, 2, 4), _var(1, 4, 2, 4), _var(1, 4, 2, 4), window_size=2),
        "window_size=2",
    ),
    "scatter's mean": (
        lambda: op.scatter_elements(_var(4), _var(2, dtype="int64"), _var(2), 0, "mean"),
        "no reduction 'mean'",
    ),
    "arange that TVM miscounts": (lambda: op.arange(9, 2, -2), "TVM takes it for 5 elements"),
    "meshgrid that TVM shapes otherwise": (
        lambda: op.meshgrid([_var(5), _var(3)], "xy"),
        "R.meshgrid with indexing='xy'",
    ),
    "local_take of a whole table": (
        lambda: op.call_pure_packed(
            "mesh.local_take",
            _var(8, 4),
            _var(2, dtype="int64"),
            relax.ShapeExpr((8, 4)),
            relax.StringImm("S[0]"),
            relax.PrimValue(0),
            sinfo_args=relax.TensorStructInfo((2, 4), "float32"),
        ),
        "one device of a mesh",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_refused(name):
    build, message = _REFUSED[name]
    with pytest.raises(MeshTensorError) as caught:
        torch_function(op_call(relax.BlockBuilder().normalize(build())))
    assert message in str(caught.value)
    assert "fix: " in str(caught.value)


@pytest.mark.parametrize("index", [5, -6])
def test_indices_out_of_range(index):
    call = op_call(relax.BlockBuilder().normalize(op.take(_var(5, 4), _var(1, dtype="int64"), 0)))
    with pytest.raises(MeshTensorError, match=f"R.take: indices from {index} to {index} into a dim of 5"):
        torch_function(call)(torch.ones(5, 4), torch.tensor([index]))


def test_which_operators_have_one():
    assert has_torch_function("matmul")
    assert has_torch_function("mesh.local_take")
    assert not has_torch_function("vision.roi_pool")
