"""Running sums and maxima: rows are split, the dim that they run along never is."""

import pytest
import tilelang.language as T
import torch

from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

X = torch.randn(13, 10)


def scanned(operation, dim=1, in_place=True, reverse=False, block=4):
    """Every row, or block of `block` rows, from one end to the other."""
    options = {"dim": dim, **({"reverse": True} if reverse else {})}

    @T.prim_func
    def main(A: T.Tensor((13, 10), "float32"), B: T.Tensor((13, 10), "float32")):
        with T.Kernel(T.ceildiv(13, block), threads=32) as bx:
            rows = T.alloc_shared((block, 10), "float32")
            made = T.alloc_shared((block, 10), "float32")
            T.copy(A[bx * block, 0], rows)
            if in_place:
                operation(rows, **options)
                T.copy(rows, B[bx * block, 0])
            else:
                operation(rows, made, **options)
                T.copy(made, B[bx * block, 0])

    return main


def _reversed_sums(x):
    return x.flip(1).cumsum(1).flip(1)


CASES = {
    "sums": (scanned(T.cumsum), X.cumsum(1)),
    "elsewhere": (scanned(T.cumsum, in_place=False), X.cumsum(1)),
    "backwards": (scanned(T.cumsum, reverse=True), _reversed_sums(X)),
    "maxima": (scanned(T.cummax, in_place=False), X.cummax(1).values),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_stay_where_they_are(name):
    func, expected = CASES[name]
    rows = {"A": {"x": 0}, "B": {"x": 0}}
    for devices in (2, 3, 5):
        assert outline(lowered(func, {"x": devices}, rows, strict=True)) == ["kernel(A, B)"]
        torch.testing.assert_close(run(func, {"x": devices}, rows, X), expected)


@pytest.mark.parametrize("name", CASES)
def test_in_every_layout(name):
    func, expected = CASES[name]
    with machine(1):
        check(func, [X], expected)


def test_blocks_that_start_anew():
    """A scan along rows, which are walked in blocks: where tiles start, blocks start."""
    expected = torch.cat([part.cumsum(0) for part in X.split(4)])
    with machine(1):
        check(scanned(T.cumsum, dim=0), [X], expected)
        check(scanned(T.cumsum, dim=0, in_place=False), [X], expected)


def test_sums_of_a_partial_product():
    """The running sum of a product whose sum is split is completed afterwards."""

    @T.prim_func
    def main(A: T.Tensor((16, 24), "float32"), B: T.Tensor((24, 8), "float32"), C: T.Tensor((16, 8), "float32")):
        with T.Kernel(2, threads=32) as bx:
            a, b = T.alloc_shared((8, 8), "float32"), T.alloc_shared((8, 8), "float32")
            total = T.alloc_fragment((8, 8), "float32")
            T.clear(total)
            for k in T.serial(3):
                T.copy(A[bx * 8, k * 8], a)
                T.copy(B[k * 8, 0], b)
                T.gemm(a, b, total)
            T.cumsum(total, dim=1)
            T.copy(total, C[bx * 8, 0])

    a, b = torch.randn(16, 24), torch.randn(24, 8)
    with machine(1):
        check(main, [a, b], (a @ b).cumsum(1))
