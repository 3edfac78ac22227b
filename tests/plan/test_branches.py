"""If: both branches are computed, and one is taken."""

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.plan.reader import read_graph

op = relax.op


def choosing(then, other, cond=()):
    """main(c, x, y): `then(emit, x)` or `other(emit, y)`, as a bool of shape `cond` says."""
    builder = relax.BlockBuilder()
    params = [relax.Var("c", relax.TensorStructInfo(cond, "bool"))]
    params += [
        relax.Var(name, relax.TensorStructInfo(shape, "float32")) for name, shape in (("x", (1, 4)), ("y", (3, 4)))
    ]

    def branch(make, value):
        builder._begin_binding_block()
        made = make(builder.emit, value)
        return relax.SeqExpr([builder._end_block()], made)

    with builder.function("main", params):
        chosen = relax.If(params[0], branch(then, params[1]), branch(other, params[2]))
        builder.emit_func_output(builder.emit(chosen))
    return builder.get()


def grown(emit, value):
    return emit(op.broadcast_to(emit(op.exp(value)), (3, 4)))


@pytest.mark.parametrize("layout", [{}, {"x": {"d": 1}}, {"y": {"d": 0}}])
def test_one_of_two_values(layout):
    run = mt.distribute_module(choosing(grown, grown), {"d": 2}, layout, poison=True)
    x, y = torch.randn(1, 4), torch.randn(3, 4)
    for yes, wanted in ((True, x.exp().expand(3, 4)), (False, y.exp())):
        torch.testing.assert_close(run(torch.tensor(yes), x, y), wanted)


def test_branches_of_two_shapes_are_refused():
    """Not broadcast to each other."""
    mod = choosing(lambda emit, x: emit(op.exp(x)), lambda emit, y: emit(op.exp(y)))
    with pytest.raises(mt.MeshTensorError, match=r"one branch gives \[1, 4\] float32, the other one \[3, 4\] float32"):
        mt.distribute_module(mod, {"d": 2}, {})


def test_several_bools_choose_nothing():
    with pytest.raises(mt.MeshTensorError, match="what chooses between branches is c: bool"):
        mt.distribute_module(choosing(grown, grown, cond=(1,)), {"d": 2}, {})


def test_what_is_stated_of_a_choice():
    """By its name, as in the types of TVM's own annotations, which no call follows."""
    mod, mesh = choosing(grown, grown), mt.Mesh({"d": 2})
    chosen = mod["main"].body.blocks[0].bindings[-1].var.name_hint
    stated = Annotation(mt.Sharding.of(mesh, 2, {"d": mt.Shard(1)}))
    graph = read_graph(mod, "main", mesh, {("main", chosen): stated})
    ((value, found),) = graph.annotations.items()
    assert value is graph.result
    assert found is stated
