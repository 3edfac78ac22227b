import tilelang.language as T
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.plain_statements import with_plain_blocks


@T.prim_func
def halved(X: T.Tensor((13, 10), "float32"), Y: T.Tensor((13, 10), "float32")):
    with T.Kernel(13, threads=32) as bx:
        for j in T.serial(10):
            with T.sblock("element"):
                T.where(j < 10)
                at = T.axis.spatial(10, j)
                Y[bx, at] = X[bx, at] / 2.0


def test_variables_conditions_and_declared_accesses_are_gone():
    (block,) = [b for b in nodes(with_plain_blocks(halved).body, tirx.SBlock) if b.name_hint == "element"]
    assert not (len(block.iter_vars))
    assert not (len(block.reads))
    assert not len(block.writes)
    assert isinstance(block.body, tirx.IfThenElse)
    (loop,) = [loop for loop in nodes(halved.body, tirx.For) if loop.thread_binding is None]
    assert block.body.then_case.indices[1].same_as(loop.loop_var)


def test_plain_blocks_stay():
    plain = with_plain_blocks(halved)
    assert with_plain_blocks(plain).same_as(plain)


def test_what_they_hold_may_be_split():
    assert set(mt.sharding_rule(halved).factors.values()) == {"parallel"}
    assert len(mt.sharding_rule(halved).factors) == 2
