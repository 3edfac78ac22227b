"""What reductions ask for ahead of time: only places that are known where they ask."""

import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.build import c_source
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

ROWS, COLUMNS = 4, 64


def normed(statement):
    """Per row: `statement` makes the row of `a`, which is written to Y without its sum."""

    @T.prim_func
    def normed_kernel(X: T.Tensor((ROWS, COLUMNS)), ids: T.Tensor((ROWS - 1,), "int32"), Y: T.Tensor((ROWS, COLUMNS))):
        with T.Kernel(1, threads=128):
            a = T.alloc_fragment((ROWS, COLUMNS), "float32")
            total = T.alloc_fragment((ROWS,), "float32")
            for i in T.serial(ROWS):
                for j in T.serial(COLUMNS):
                    statement(X, ids, a, i, j)
                T.reduce_sum(a[i : i + 1, 0:COLUMNS], total[i : i + 1], dim=1)
                for j in T.serial(COLUMNS):
                    Y[i, j] = a[i, j] - total[i]

    return normed_kernel


@T.macro
def sums_of_rows(X, ids, a, i, j):
    a[i, j] = 0
    for k in T.serial(ROWS):
        a[i, j] = a[i, j] + X[k, j]


@T.macro
def looked_up(X, ids, a, i, j):
    a[i, j] = T.if_then_else(i < ROWS - 1, X[ids[i], j], 0)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (sums_of_rows, lambda x, ids: x.sum(0).expand(ROWS, -1)),
        (looked_up, lambda x, ids: torch.cat([x[ids], torch.zeros(1, COLUMNS)])),
    ],
    ids=lambda case: getattr(case, "name", None),
)
def test_what_is_asked_for(statement, expected):
    """The row of Y alone: what is next in X only the loop knows, or `ids`, which has no place for every row."""
    func = normed(statement)
    x, ids, y = torch.randn(ROWS, COLUMNS), torch.tensor([2, 0, 3], dtype=torch.int32), torch.empty(ROWS, COLUMNS)
    compile_for_cpu(func)(x, ids, y)
    rows = expected(x, ids)
    torch.testing.assert_close(y, rows - rows.sum(1, keepdim=True), rtol=1e-4, atol=1e-4)
    assert c_source(func).count("mt_prefetch_float32((&") == 1
