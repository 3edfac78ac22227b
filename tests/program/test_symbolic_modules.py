"""Modules with symbolic sizes, nested functions, If, tuples and small sizes: planned at each call with new sizes."""

import pytest
import torch
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T

import mesh_tensor as mt


@I.ir_module
class Symbolic:
    @R.function(private=True)
    def inner(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8, 6), "float32")) -> R.Tensor(("n", 6), "float32"):
        n = T.int64()
        with R.dataflow():
            y = R.nn.relu(R.matmul(x, w))
            R.output(y)
        return y

    @R.function
    def main(x: R.Tensor(("m", 8), "float32"), w: R.Tensor((8, 6), "float32"), c: R.Tensor((), "bool")):
        m = T.int64()
        cls = Symbolic
        a = cls.inner(x, w)
        b = R.sum(a, axis=[0])
        s = R.reshape(a, R.shape([m * 6]))
        most = R.max(a, axis=[0, 1])
        if c:  # noqa: SIM108  (TVMScript has no other form)
            q = R.add(a, a)
        else:
            q = R.multiply(a, a)
        return (a, (b, most), s, q, x)


def inputs(rows, flag):
    return torch.randn(rows, 8), torch.randn(8, 6), torch.tensor(flag)


@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}, {"x": 2, "y": 3}])
@pytest.mark.parametrize("sharding", [{"x": {"x": 0}}, {"w": {"x": 1}}, {"x": {"x": 1}, "w": {"x": 0}}, {}])
def test_one_module_for_all_sizes(mesh, sharding):
    run = mt.distribute_module(Symbolic, mesh, sharding)
    for rows, flag in ((5, True), (1, False), (16, True)):
        x, w, c = inputs(rows, flag)
        a, (b, most), s, q, same = run(x, w, c)
        expected = torch.relu(x @ w)
        torch.testing.assert_close(a, expected)
        torch.testing.assert_close(b, expected.sum(0))
        torch.testing.assert_close(most, expected.amax())
        torch.testing.assert_close(s, expected.reshape(-1))
        torch.testing.assert_close(q, expected + expected if flag else expected * expected)
        assert torch.equal(same, x)


def test_what_has_no_value_is_refused_by_name():
    run = mt.distribute_module(Symbolic, {"x": 2}, {"x": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match=r"R\.max fails .*\n.*main\.most"):
        run(*inputs(0, True))


def test_there_is_no_plan_before_the_first_call():
    run = mt.distribute_module(Symbolic, {"x": 2})
    with pytest.raises(mt.MeshTensorError, match="no plan yet: it has symbolic sizes"):
        run.explain()
