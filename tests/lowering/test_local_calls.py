"""Operators on tiles, where what a tensor's dims are split into is more than the tensor's own dims say."""

import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.program.steps import OpStep


def test_local_take_from_a_table_whose_other_dim_is_split_in_strides():
    """The reshape takes the table's columns apart, and y splits the minor part of them: their tiles are no contiguous
    part of the table, but those of its rows are."""
    table = relax.Var("table", relax.TensorStructInfo((2000, 6), "float32"))
    index = relax.Var("index", relax.TensorStructInfo((5,), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [table, index]):
        with builder.dataflow():
            taken = builder.emit(relax.op.take(table, index, 0))
            result = builder.emit_output(relax.op.reshape(taken, (5, 2, 3)))
        builder.emit_func_output(result)
    run = mt.distribute_module(builder.get(), {"x": 2, "y": 3}, {"table": {"x": 0, "y": 1}})
    rows, places = torch.randn(2000, 6), torch.tensor([0, 1999, 1000, 999, -1])
    torch.testing.assert_close(run(rows, places), rows[places].reshape(5, 2, 3), rtol=0, atol=0)
    take = next(step for step in run.program.steps if isinstance(step, OpStep))
    assert "mesh.local_take" in str(take.call.expr)
