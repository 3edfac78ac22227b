"""Collectives as registered operators, each in a block that has its name."""

import pytest
from tvm import ir, tirx

import mesh_tensor as mt
from mesh_tensor.lowering.lower import NAMES, collective_block, register
from mesh_tensor.redistribution.plan import Move
from mesh_tensor.tir.tile_position import CALLED

MESH = mt.Mesh({"x": 2, "y": 2})
LAYOUT = mt.Sharding.make(MESH, 2)


def buffers():
    return tirx.decl_buffer((8, 4), "float32", "A"), tirx.decl_buffer((8, 8), "float32", "B")


def call_of(block):
    """The call in a collective's block, as (operator, arguments after the regions)."""
    call = block.block.body.value
    return call.op.name, [arg.value if isinstance(arg, tirx.StringImm) else int(arg) for arg in call.args[2:]]


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_registered_and_have_effects(name):
    op = ir.Op.get(f"mesh.{name}")
    assert int(op.get_attr("TCallEffectKind")) == tirx.CallEffectKind.Opaque.value


def test_registering_again_changes_nothing():
    before = [name for name in ir.Op.list_op_names() if name.startswith("mesh.")]
    register()
    assert [name for name in ir.Op.list_op_names() if name.startswith("mesh.")] == before
    assert set(before) == {f"mesh.{name}" for name in NAMES} | set(CALLED)


@pytest.mark.parametrize(
    ("move", "args"),
    [
        (Move("all_reduce", ("x", "y"), LAYOUT, op="sum"), ["sum", "x", "y"]),
        (Move("reduce_scatter", ("x",), LAYOUT, op="max", dst_dim=1), ["max", 1, "x"]),
        (Move("all_gather", ("y",), LAYOUT, src_dim=0), [0, "y"]),
        (Move("all_to_all", ("x",), LAYOUT, src_dim=0, dst_dim=1), [0, 1, "x"]),
        (Move("slice", ("x",), LAYOUT, dst_dim=1), [1, "x"]),
        (Move("to_partial", ("x",), LAYOUT, op="sum"), ["sum", "x"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Move) else "",
)
def test_the_block_of_a_collective(move, args):
    a, b = buffers()
    realize = collective_block(move, a, b)
    assert realize.block.name_hint == move.kind
    assert call_of(realize) == (f"mesh.{move.kind}", args)
    regions = realize.block.body.value.args[:2]
    assert [region.args[0].buffer.name for region in regions] == ["A", "B"]
    assert [[int(extent) for extent in region.args[2:]] for region in regions] == [[8, 4], [8, 8]], "whole tiles"
    assert [int(region.args[1]) for region in regions] == [1, 2], "one is read, the other written"


@pytest.mark.parametrize("kind", ["permute", "exchange"])
def test_direct_moves_name_both_layouts(kind):
    a, b = buffers()
    before = mt.Sharding.make(MESH, 2, {"x": 0})
    realize = collective_block(Move(kind, ("x", "y"), LAYOUT.with_shard("y", 0)), a, b, before)
    assert realize.block.name_hint == kind
    assert call_of(realize) == (f"mesh.{kind}", ["S[0], R", "R, S[0]", "x", "y"])


def test_how_it_prints():
    a, b = buffers()
    func = tirx.PrimFunc([], collective_block(Move("all_gather", ("y",), LAYOUT, src_dim=0), a, b))
    assert 'T.mesh.all_gather(T.region(A[0, 0], 1, 8, 4), T.region(B[0, 0], 2, 8, 8), 0, "y")' in func.script()
