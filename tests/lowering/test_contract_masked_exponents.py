"""Clause 8: rows of which a device's tile has nothing that counts. What it adds to a sum is nothing where the exponent
is the lowest value wherever the maximum of the tile is; else the dim stays whole."""

import math

import pytest
import tilelang.language as T
import torch

from .test_contract_states import close, compiled

ROWS, COLUMNS, BLOCK = 8, 32, 8
LOWEST = -math.inf

# of the scores x, the same where some are masked y, the mask, the row i, and the column j of a block: the exponent
EXPONENTS = {
    "masked before": lambda x, y, mask, i, j: y[i, j],
    "masked in it": lambda x, y, mask, i, j: T.if_then_else(mask > 0, x[i, j], LOWEST),
    "either way": lambda x, y, mask, i, j: T.if_then_else(j > 3, y[i, j], y[i, j]),
    "of one place": lambda x, y, mask, i, j: y[i, 0],
    "one of both": lambda x, y, mask, i, j: T.if_then_else(j > 3, y[i, j], x[i, j]),
    "the larger": lambda x, y, mask, i, j: T.max(y[i, j], x[i, j]),
    "not masked": lambda x, y, mask, i, j: x[i, j],
}
COMBINED = ("masked before", "masked in it", "either way", "of one place")


def masked_sum(exponent, of_all):
    """The maximum of all scores, or of those that are masked, and a sum that is scaled to it."""

    @T.prim_func
    def kernel(
        X: T.Tensor((ROWS, COLUMNS), "float32"),
        Mask: T.Tensor((COLUMNS,), "int32"),
        L: T.Tensor((ROWS,), "float32"),
        M: T.Tensor((ROWS,), "float32"),
    ):
        with T.Kernel(1, threads=32):
            x, y, p = (T.alloc_fragment((ROWS, BLOCK), "float32") for _ in range(3))
            m, before, total, r = (T.alloc_fragment((ROWS,), "float32") for _ in range(4))
            T.fill(m, LOWEST)
            T.clear(total)
            for k in T.serial(COLUMNS // BLOCK):
                T.copy(X[0, k * BLOCK], x)
                for i, j in T.Parallel(ROWS, BLOCK):
                    y[i, j] = T.if_then_else(Mask[k * BLOCK + j] > 0, x[i, j], LOWEST)
                T.copy(m, before)
                T.reduce_max(x if of_all else y, m, dim=1, clear=False)
                for i, j in T.Parallel(ROWS, BLOCK):
                    p[i, j] = T.exp(exponent(x, y, Mask[k * BLOCK + j], i, j) - m[i])
                T.reduce_sum(p, r, dim=1)
                for i in T.Parallel(ROWS):
                    total[i] = total[i] * T.exp(before[i] - m[i]) + r[i]
            T.copy(total, L)
            T.copy(m, M)

    return kernel


@pytest.mark.parametrize("name", EXPONENTS)
def test_a_tile_of_which_nothing_counts(name):
    kernel = masked_sum(EXPONENTS[name], of_all=name == "masked in it")
    x, mask = torch.randn(ROWS, COLUMNS), torch.ones(COLUMNS, dtype=torch.int32)
    x[:3, COLUMNS // 2 :] = LOWEST
    mask[COLUMNS // 2 :] = 0
    run = compiled(kernel, {"x": 2}, {"X": {"x": 1}})
    assert ("all_gather" not in run.explain()) == (name in COMBINED)

    seen = torch.where(mask > 0, x, LOWEST)
    largest = x.amax(1) if name == "masked in it" else seen.amax(1)
    first = torch.arange(COLUMNS) % BLOCK <= 3
    exponents = {
        "of one place": seen[:, ::BLOCK].repeat_interleave(BLOCK, 1),
        "one of both": torch.where(first, x, seen),
        "the larger": x,
        "not masked": x,
    }
    made = (exponents.get(name, seen) - largest[:, None]).exp().sum(1)
    close(run(x, mask), (made, largest))
