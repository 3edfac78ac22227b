"""Loops that reduce rows and use what that came to: two loops, where iterations know nothing of each other."""

import numpy as np
import pytest
import tilelang.language as T
import torch

from kernels.layer_norm import layer_norm_gradient, layer_norm_gradient_reference
from mesh_tensor.targets.interpreter import interpret
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

M, N, ROWS = 8, 10, 4
COLUMNS = {"dY": {"x": 1}, "X": {"x": 1}, "weight": {"x": 0}, "dX": {"x": 1}, "dweight": {"x": 0}, "dbias": {"x": 0}}


def gradient_inputs():
    shapes = [(M, N), (M, N), (N,), (M,), (M,), (N,), (N,)]
    return [torch.randn(*shape) for shape in shapes]


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_sums_of_all_rows_are_completed_together(devices):
    func, inputs = layer_norm_gradient(M, N, ROWS), gradient_inputs()
    with machine(1):
        steps = outline(lowered(func, {"x": devices}, COLUMNS, strict=True))
        found = run(func, {"x": devices}, COLUMNS, *(t.clone() for t in inputs))
    assert [step.split("(")[0] for step in steps] == ["kernel", "all_reduce", "all_reduce", "kernel"]
    expected = layer_norm_gradient_reference(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", [{"x": 3}, {"x": 2, "y": 2}])
def test_rows_and_columns(mesh):
    layouts = COLUMNS
    rows = {"dY": 0, "X": 0, "mean": 0, "rstd": 0, "dX": 0}
    if "y" in mesh:
        layouts = {
            name: {**layouts.get(name, {}), **({"y": 0} if name in rows else {})} for name in {**layouts, **rows}
        }
    inputs = gradient_inputs()
    with machine(1):
        found = run(layer_norm_gradient(M, N, ROWS), mesh, layouts, *(t.clone() for t in inputs))
    torch.testing.assert_close(found, layer_norm_gradient_reference(*inputs), rtol=1e-5, atol=1e-5)


def rows_in_turn(what):
    """`Y[r] = X[r] - sum(X[r])`, in which an iteration sees something of the one before it."""

    @T.prim_func
    def kernel(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(M // ROWS, threads=32) as bx:
            x = T.alloc_fragment((1, N), "float32")
            kept = T.alloc_fragment((1, N), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(kept)
            T.clear(total)
            for r in T.serial(ROWS):
                if what == "result":
                    T.copy(Y[bx * ROWS + T.max(r - 1, 0), 0], kept)
                T.copy(X[bx * ROWS + r, 0], x)
                for i, j in T.Parallel(1, N):
                    x[i, j] = x[i, j] + kept[i, j]
                if what == "total":
                    T.reduce_sum(x, total, dim=1, clear=False)
                else:
                    T.reduce_sum(x, total, dim=1)
                if what == "again":
                    for i in T.Parallel(1):
                        total[i] = total[i] * 2.0
                for i, j in T.Parallel(1, N):
                    Y[bx * ROWS + r, j] = x[i, j] - total[i]
                if what == "kept":
                    for i, j in T.Parallel(1, N):
                        kept[i, j] = x[i, j] * 0.5 + total[i]

    return kernel


@pytest.mark.parametrize("what", ["nothing", "kept", "total", "again", "result"])
def test_what_iterations_see_of_each_other(what):
    """A buffer, and the sum itself, that are carried to the next iteration; a sum that is changed; a row of the
    result that is read."""
    x, func = torch.randn(M, N), rows_in_turn(what)
    expected = np.zeros((M, N), "float32")
    interpret(func, [x.numpy(), expected])
    with machine(1):
        if what == "nothing":
            steps = outline(lowered(func, {"x": 2}, {"X": {"x": 1}, "Y": {"x": 1}}, strict=True))
            assert [step.split("(")[0] for step in steps] == ["kernel", "all_reduce", "kernel"]
        check(func, [x], torch.from_numpy(expected), [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}])
