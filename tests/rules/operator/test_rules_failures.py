"""What the table of rules refuses, and how it says so."""

import re
from dataclasses import replace

import pytest
from tvm import relax, tirx

from mesh_tensor import MeshTensorError
from mesh_tensor.rules.operator import OpRule, has_rule, rule_of
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.rule import _check, whole_rule

op = relax.op


def _var(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorStructInfo(shape, dtype))


def _call(expr):
    return op_call(relax.BlockBuilder().normalize(expr))


_WITHOUT = {
    "image.affine_grid": lambda: op.image.affine_grid(_var(1, 2, 3), (8, 8)),
    "layout_transform": lambda: op.layout_transform(_var(4, 4), lambda i, j: [j, i]),
    "multinomial_from_uniform": lambda: op.multinomial_from_uniform(
        _var(2, 3), _var(2, 1), _var(2, 1, dtype="int64"), "int64"
    ),
}


@pytest.mark.parametrize("name", ["image.affine_grid", "layout_transform", "multinomial_from_uniform"])
def test_operator_without_a_rule(name):
    assert not has_rule(name)
    with pytest.raises(MeshTensorError) as caught:
        rule_of(_call(_WITHOUT[name]()))
    message = str(caught.value)
    assert f"operator R.{name} has no sharding rule" in message
    assert "fix: pass replicate_unknown=True to compute it replicated" in message
    assert "docs/adding_an_op.md" in message


def test_operator_without_a_rule_is_whole_if_the_caller_says_so():
    rule = whole_rule(_call(_WITHOUT["image.affine_grid"]()))
    assert rule == OpRule(((None,) * 3,), ((None,) * 4,))


def test_unknown_shape():
    x = relax.Var("x", relax.TensorStructInfo(dtype="float32", ndim=2))
    with pytest.raises(MeshTensorError) as caught:
        _call(op.exp(x))
    assert re.search(r"exp: R\.Tensor\(dtype=.float32., ndim=2\) is no tensor of known shape", str(caught.value))
    assert "fix: annotate the value's shape" in str(caught.value)


def test_data_dependent_shape():
    with pytest.raises(MeshTensorError, match="nonzero: .* is no tensor of known shape and dtype|symbolic"):
        _call(op.nonzero(_var(4)))


def test_symbolic_shape():
    x = _var(tirx.Var("n", "int64"), 4)
    with pytest.raises(MeshTensorError) as caught:
        _call(op.exp(x))
    assert "exp: the shape (n, 4) is symbolic" in str(caught.value)
    assert "fix: bind the symbolic sizes first" in str(caught.value)


_PRODUCT = OpRule((("m", "k"), ("k", "n")), (("m", "n"),), {"k": "sum"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": (("m", "k"),)}, "is for 1 tensors, not 2"),
        ({"inputs": (("m",), ("k", "n"))}, r"has \('m',\) for a tensor of shape \(4, 8\)"),
        ({"inputs": (("m", "m"), ("k", "n"))}, "'?m'? of size 8 has factors of 4"),
        (
            {"inputs": (("m", ("k", "j")), ("k", "n")), "sizes": {"k": 8, "j": 2}, "reduced": {"k": "sum", "j": "sum"}},
            "of size 8 has factors of 16",
        ),
        ({"reduced": {}}, r"does not say what becomes of \['k'\]"),
        ({"reduced": {"k": "sum", "m": "sum"}}, r"reduces \['k', 'm'\], which all results have"),
    ],
)
def test_rules_that_contradict_their_call(change, message):
    call = _call(op.matmul(_var(4, 8), _var(8, 2)))
    _check(call, _PRODUCT)
    with pytest.raises(AssertionError, match=message):
        _check(call, replace(_PRODUCT, **change))
