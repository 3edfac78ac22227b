"""Programs of flat grids, whose blocks begin and end anywhere in rows: a position is computed wherever it is."""

import numpy as np
import pytest
import tilelang.language as T
import torch

from kernels.neighbourhoods import max_pool, max_pool_reference
from mesh_tensor.targets.interpreter import interpret
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

SHAPE = A, B, C = 4, 6, 5


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_positions_are_computed_where_they_are(dim, devices):
    sizes = {"batch": 4, "channels": 6, "height": 6, "width": 5, "block": 8}
    layouts = {"data": {"x": dim}, "out": {"x": dim}}
    with machine(1):
        assert outline(lowered(max_pool(**sizes), {"x": devices}, layouts, strict=True)) == ["kernel(data, out)"]
    data = torch.randn(4, 6, 6, 5)
    torch.testing.assert_close(run(max_pool(**sizes), {"x": devices}, layouts, data), max_pool_reference(data))


def test_rows_around_a_tile_are_exchanged():
    sizes = {"batch": 2, "channels": 2, "height": 16, "width": 6, "block": 8}
    layouts = {"data": {"x": 2}, "out": {"x": 2}}
    with machine(1):
        steps = outline(lowered(max_pool(**sizes), {"x": 4}, layouts, strict=True))
    assert [step.split("(")[0] for step in steps] == ["halo", "kernel"], steps


def test_pooling_in_every_layout():
    data = torch.randn(2, 3, 5, 7)
    with machine(1):
        check(max_pool(2, 3, 5, 7, block=8), [data], max_pool_reference(data), [{"x": 3}, {"x": 2, "y": 2}])


def flat(what, block=8, positions=A * B * C):
    """`Y[p]` of some function of `X[p]`, with digits of p, and something else."""

    @T.prim_func
    def kernel(X: T.Tensor(SHAPE, "float32"), Y: T.Tensor(SHAPE, "float32")):
        with T.Kernel(T.ceildiv(positions, block), threads=32) as bx:
            kept = T.alloc_fragment((block,), "float32")
            if what == "neighbours":
                for i in T.Parallel(block):
                    p = bx * block + i
                    kept[i] = T.if_then_else(p < positions, X[p // C // B, p // C % B, p % C], 0.0)
            for i in T.Parallel(block):
                p = bx * block + i
                if p < positions:
                    value = X[p // C // B, p // C % B, p % C]
                    if what == "program":
                        Y[p // C // B, p // C % B, p % C] = value + bx
                    elif what == "place":
                        Y[p // C // B, p // C % B, p % C] = value + i
                    elif what == "neighbours":
                        Y[p // C // B, p // C % B, p % C] = value + kept[(i + 1) % block]
                    elif what == "position":
                        Y[p // C // B, p // C % B, p % C] = value + p
                    else:
                        Y[p // C // B, p // C % B, p % C] = value * 2.0

    return kernel


@pytest.mark.parametrize("what", ["program", "place", "neighbours", "position", "value"])
def test_what_programs_know_of_a_position(what):
    """Which program it has, where it is in a block, and what is beside it there, are those of the author's blocks."""
    x, expected = torch.randn(SHAPE), np.zeros(SHAPE, "float32")
    interpret(flat(what), [x.numpy(), expected])
    if what in ("position", "value"):
        with machine(1):
            steps = outline(lowered(flat(what), {"x": 3}, {"X": {"x": 1}, "Y": {"x": 1}}, strict=True))
        assert steps == ["kernel(X, Y)"]
    with machine(1):
        check(flat(what), [x], torch.from_numpy(expected))


def test_what_another_nest_wrote():
    """Of the same program: in the author's blocks it is there."""

    @T.prim_func
    def kernel(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32"), Z: T.Tensor((4, 8), "float32")):
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(16):
                Y[(bx * 16 + i) // 8, (bx * 16 + i) % 8] = X[(bx * 16 + i) // 8, (bx * 16 + i) % 8] * 2.0
            for i in T.Parallel(16):
                Z[(bx * 16 + i) // 8, (bx * 16 + i) % 8] = Y[((bx * 16 + i) // 8) // 2 * 2, (bx * 16 + i) % 8]

    x = torch.randn(4, 8)
    with machine(1):
        check(kernel, [x], (x * 2.0, x[[0, 0, 2, 2]] * 2.0))


@pytest.mark.parametrize("positions", [90, 95])
def test_some_positions_only(positions):
    x, expected = torch.randn(SHAPE), np.zeros(SHAPE, "float32")
    interpret(flat("value", positions=positions), [x.numpy(), expected])
    with machine(1):
        check(flat("value", positions=positions), [x], torch.from_numpy(expected), [{"x": 3}])
