"""Operators on tiles: padding does no harm, and a table that is split over devices is read by all of them together."""

import numpy as np
import pytest
import torch
from tvm import relax

from mesh_tensor import Mesh, Sharding
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.targets.torch_ops import torch_function

MESH = Mesh({"x": 2, "y": 2})


def _var(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorStructInfo(shape, dtype))


def _function(build, *operands, rank=0):
    call = op_call(relax.BlockBuilder().normalize(build(*operands)))
    return torch_function(call, MESH, rank)


def _local_take(sharding, table, tile, index, rank, *mode):
    args = [relax.ShapeExpr(table), relax.StringImm(sharding.text()), relax.PrimValue(0), *map(relax.StringImm, mode)]
    out = relax.TensorStructInfo((*index.shape, *tile[1:]), "float32")
    call = relax.op.call_pure_packed(
        "mesh.local_take", _var(*tile), _var(*index.shape, dtype="int64"), *args, sinfo_args=out
    )
    return torch_function(op_call(relax.BlockBuilder().normalize(call)), MESH, rank)


def _summed(split, rows, index, *mode):
    """The table, and the sum of what the devices take from it; what is beyond a tile's valid rows is NaN."""
    table = torch.randn(rows, 3)
    sharding = Sharding.make(MESH, 2, split)
    tile = sharding.tile_shape((rows, 3))
    total = torch.zeros(*index.shape, 3)
    for rank in range(4):
        (first, _), (held, _) = sharding.tile_offset((rows, 3), rank), sharding.valid_extent((rows, 3), rank)
        local = torch.full(tile, torch.nan)
        local[:held] = table[first : first + held]
        (part,) = _local_take(sharding, (rows, 3), tile, index, rank, *mode)(local, index)
        total += part if len(split) == 2 or rank % 2 == 0 else 0
    return table, total


@pytest.mark.parametrize("rows", [8, 7, 5, 2])
@pytest.mark.parametrize("split", [{"x": 0}, {"x": 0, "y": 0}], ids=str)
def test_local_take_sums_to_take(split, rows):
    index = torch.randint(-rows, rows, (2, 5))
    table, total = _summed(split, rows, index)
    assert torch.equal(total, table[index % rows])


@pytest.mark.parametrize("mode", ["clip", "wrap"])
def test_local_take_modes(mode):
    index = torch.randint(-20, 20, (9,))
    table, total = _summed({"x": 0, "y": 0}, 7, index, mode)
    assert torch.equal(total, table[index.clamp(0, 6) if mode == "clip" else index % 7])


def test_local_take_of_an_index_outside_the_table_is_nan():
    _, total = _summed({"x": 0, "y": 0}, 7, torch.tensor([6, 7, -8]))
    assert total.isnan().all(1).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("build", "shapes", "index"),
    [
        (lambda x, n: relax.op.take(x, n, 0), ((5, 4), (3,)), [4, 5, -6]),
        (lambda x, n: relax.op.gather_nd(x, n), ((5, 4), (3, 1)), [[4], [5], [-6]]),
        (lambda x, n: relax.op.index_tensor(x, [n]), ((5, 4), (3,)), [4, 5, -6]),
    ],
    ids=["take", "gather_nd", "index_tensor"],
)
def test_padding_as_an_index_gives_poison(build, shapes, index):
    function = _function(build, _var(*shapes[0]), _var(*shapes[1], dtype="int64"))
    x = torch.randn(shapes[0])
    (found,) = function(x, torch.tensor(index))
    assert torch.equal(found[0], x[4])
    assert found[1:].isnan().all()


@pytest.mark.parametrize("build", [relax.op.divide, relax.op.floor_divide, relax.op.mod, relax.op.floor_mod])
def test_padding_as_a_divisor_gives_poison(build):
    function = _function(build, _var(3, dtype="int32"), _var(3, dtype="int32"))
    (found,) = function(torch.tensor([7, 7, 7], dtype=torch.int32), torch.tensor([2, 0, 2], dtype=torch.int32))
    assert found[1] == np.iinfo(np.int32).min
    assert (found[0], found[2]) == ((3, 3) if build in (relax.op.divide, relax.op.floor_divide) else (1, 1))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
@pytest.mark.parametrize("build", [relax.op.divide, relax.op.floor_divide, relax.op.mod, relax.op.floor_mod])
def test_padding_that_a_division_would_trap_on(build, dtype):
    function = _function(build, _var(3, dtype=dtype), _var(3, dtype=dtype))
    of = getattr(torch, dtype)
    (found,) = function(torch.tensor([-7, torch.iinfo(of).min, 7], dtype=of), torch.tensor([-1, -1, 2], dtype=of))
    assert found.dtype == of
    assert (found[0], found[2]) == ((7, 3) if build in (relax.op.divide, relax.op.floor_divide) else (0, 1))
