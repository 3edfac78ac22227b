"""Products that sum over rows at loaded places: each device has its rows of both factors, and nothing of others."""

import pytest
import tilelang.language as T
import torch

from kernels.grouped_gradient import grouped_weight_gradient, grouped_weight_gradient_reference
from mesh_tensor import MeshTensorError
from tests.other_machines import AT_ONCE, planned_for

from .support import lowered, outline, run

ROWS, N, K, BLOCK = 29, 7, 10, 4
OFFSETS = torch.tensor([0, 11, 11, 20, 29]).int()


@pytest.fixture(autouse=True)
def _no_start():
    """Collectives start at once, so that small tensors are worth them."""
    with planned_for(AT_ONCE):
        yield


def tensors():
    return torch.randn(ROWS, K), torch.randn(ROWS, N), OFFSETS


def moved(func, mesh, layouts):
    """The kinds of collectives, with `strict=True`."""
    return {step.partition("(")[0] for step in outline(lowered(func, mesh, layouts, strict=True))} - {"kernel"}


@pytest.mark.parametrize(
    ("mesh", "layouts", "kinds"),
    [
        ({"x": 2}, {"A": {"x": 0}, "dC": {"x": 0}}, {"all_reduce"}),
        ({"x": 3}, {"A": {"x": 0}, "dC": {"x": 0}, "dB": {"x": 0}}, {"reduce_scatter"}),
        ({"x": 3, "y": 2}, {"A": {"x": 0}, "dC": {"x": 0, "y": 1}, "dB": {"y": 2}}, {"all_reduce"}),
        ({"x": 4, "y": 2}, {"A": {"x": 0, "y": 0}, "dC": {"x": 0, "y": 0}}, {"all_reduce"}),
    ],
)
def test_gradients_of_split_rows(mesh, layouts, kinds):
    func = grouped_weight_gradient(4, ROWS, N, K, BLOCK, BLOCK, BLOCK)
    assert moved(func, mesh, layouts) == kinds
    a, dc, offsets = tensors()
    wanted = grouped_weight_gradient_reference(a, dc, offsets)
    torch.testing.assert_close(run(func, mesh, layouts, a, dc, offsets), wanted, rtol=1e-5, atol=1e-5)


def test_what_is_infinite_stays_where_it_is():
    """Zeros of other devices meet no infinite row: groups without one are finite."""
    a, dc, offsets = tensors()
    a[12, 3], dc[12, 2], dc[28, 1] = torch.inf, -torch.inf, torch.nan
    layouts = {"A": {"x": 0}, "dC": {"x": 0}}
    result = run(grouped_weight_gradient(4, ROWS, N, K, BLOCK, BLOCK, BLOCK), {"x": 3}, layouts, a, dc, offsets)
    wanted = grouped_weight_gradient_reference(a, dc, offsets)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert wanted[0].isfinite().all()


def products(of_a=0, of_b=0, ahead=False, scaled=False):
    """Sums of products of rows from a loaded one on; `of_a`, `of_b`: so many rows further. `ahead`: the second factor
    is that of the block before. `scaled`: something else is made of the first one, too."""

    @T.prim_func
    def kernel(A: T.Tensor((ROWS, K)), B: T.Tensor((ROWS, N)), starts: T.Tensor((2,), "int32"), C: T.Tensor((2, K, N))):
        with T.Kernel(2, threads=32) as g:
            a = T.alloc_shared((BLOCK, K), "float32")
            b = T.alloc_shared((BLOCK, N), "float32")
            total = T.alloc_fragment((K, N), "float32")
            T.clear(total)
            T.clear(b)
            for k in T.serial(3):
                for i, j in T.Parallel(BLOCK, K):
                    a[i, j] = A[starts[g] + of_a + k * BLOCK + i, j]
                if not ahead:
                    for i, j in T.Parallel(BLOCK, N):
                        b[i, j] = B[starts[g] + of_b + k * BLOCK + i, j]
                if scaled:
                    for i, j in T.Parallel(BLOCK, K):
                        a[i, j] = T.exp(a[i, j])
                T.gemm(a, b, total, transpose_A=True)
                if ahead:
                    for i, j in T.Parallel(BLOCK, N):
                        b[i, j] = B[starts[g] + of_b + k * BLOCK + i, j]
            T.copy(total, C[g, 0, 0])

    return kernel


def products_reference(a, b, starts, of_a, of_b, ahead, scaled):
    found = []
    for start in starts.tolist():
        rows = torch.arange(3 * BLOCK) + start
        left, right = a[rows + of_a], b[rows + of_b]
        right = torch.cat([torch.zeros(BLOCK, N), right[:-BLOCK]]) if ahead else right
        found.append((left.exp() if scaled else left).T @ right)
    return torch.stack(found)


@pytest.mark.parametrize(
    ("options", "is_split"),
    [
        ({}, True),
        ({"of_a": 2, "of_b": 2}, True),
        ({"of_b": 1}, False),
        ({"ahead": True}, False),
        ({"scaled": True}, False),
    ],
    ids=["same_rows", "further_on", "other_rows", "rows_of_the_block_before", "of_something_made_of_them"],
)
def test_only_sums_over_the_same_rows(options, is_split):
    given = {"of_a": 0, "of_b": 0, "ahead": False, "scaled": False} | options
    func, layouts = products(**options), {"A": {"x": 0}, "B": {"x": 0}}
    a, b, _ = tensors()
    starts = torch.tensor([3, 14]).int()
    wanted = products_reference(a, b, starts, **given)
    torch.testing.assert_close(run(func, {"x": 3}, layouts, a, b, starts), wanted, rtol=1e-4, atol=1e-4)
    if is_split:
        assert moved(func, {"x": 3}, layouts) == {"all_reduce"}
    else:
        with pytest.raises(MeshTensorError, match="needs replication|lies replicated"):
            lowered(func, {"x": 3}, layouts, strict=True)


@T.prim_func
def copied_blocks(
    A: T.Tensor((ROWS, K)), B: T.Tensor((ROWS, N)), starts: T.Tensor((2,), "int32"), C: T.Tensor((2, K, N))
):
    """Blocks that copies take, of which the last ones reach past the tables' ends: there they are 0."""
    with T.Kernel(2, threads=32) as g:
        a = T.alloc_shared((BLOCK, K), "float32")
        b = T.alloc_shared((BLOCK, N), "float32")
        total = T.alloc_fragment((K, N), "float32")
        T.clear(total)
        for k in T.serial(3):
            T.copy(A[starts[g] + k * BLOCK, 0], a)
            T.copy(B[starts[g] + k * BLOCK, 0], b)
            T.gemm(a, b, total, transpose_A=True)
        T.copy(total, C[g, 0, 0])


def test_blocks_that_are_copied():
    a, b, _ = tensors()
    starts = torch.tensor([ROWS - 6, 5]).int()
    wanted = torch.stack([a[s : s + 3 * BLOCK].T @ b[s : s + 3 * BLOCK] for s in starts.tolist()])
    layouts = {"A": {"x": 0}, "B": {"x": 0}}
    torch.testing.assert_close(run(copied_blocks, {"x": 3}, layouts, a, b, starts), wanted, rtol=1e-5, atol=1e-5)
    assert moved(copied_blocks, {"x": 3}, layouts) == {"all_reduce"}
