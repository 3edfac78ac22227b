"""Products of blocks of tables that axes split along what is looked up: experts' weights."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.sparse import searched_grouped_matmul, searched_grouped_matmul_reference
from tests.lowering.support import lowered, outline, run
from tests.other_machines import machine

EXPERTS, ROWS, K, N, BLOCK = 5, 48, 32, 24, 16
EXPERT_OF = torch.tensor([4, 1, 4], dtype=torch.int32)


def products(how):
    """`C = A @ B[expert]` of a block of rows, or what is like it and not linear in `B`, or not one device's."""

    @T.prim_func
    def main(
        A: T.Tensor((ROWS, K), "float32"),
        B: T.Tensor((EXPERTS, K, N), "float32"),
        D: T.Tensor((EXPERTS, K, N), "float32"),
        expert_of: T.Tensor((ROWS // BLOCK,), "int32"),
        C: T.Tensor((ROWS, N), "float32"),
    ):
        with T.Kernel(ROWS // BLOCK, threads=32) as bx:
            A_shared = T.alloc_shared((BLOCK, BLOCK), "float32")
            B_shared = T.alloc_shared((BLOCK, N), "float32")
            D_shared = T.alloc_shared((BLOCK, N), "float32")
            inner = T.alloc_fragment((BLOCK, BLOCK), "float32")
            total = T.alloc_fragment((BLOCK, N), "float32")
            gate = T.alloc_fragment((BLOCK, N), "float32")
            at = T.alloc_var("int32")
            at = expert_of[bx]
            T.clear(total)
            T.clear(gate)
            for k in T.serial(K // BLOCK):
                T.copy(A[bx * BLOCK, k * BLOCK], A_shared)
                if how == "another each time":
                    T.copy(B[(expert_of[bx] + k) % EXPERTS, k * BLOCK, 0], B_shared)
                else:
                    T.copy(B[at, k * BLOCK, 0], B_shared)
                if how == "moved on":
                    at = (at + 1) % EXPERTS
                if how == "its square":
                    T.clear(inner)
                    T.gemm(B_shared, B_shared, inner, transpose_B=True)
                    T.gemm(inner, B_shared, total)
                elif how == "two together":
                    T.copy(D[at, k * BLOCK, 0], D_shared)
                    T.clear(inner)
                    T.gemm(B_shared, D_shared, inner, transpose_B=True)
                    T.gemm(inner, D_shared, total)
                elif how == "the last one":
                    T.gemm(A_shared, B_shared, total, clear_accum=True)
                elif how == "gated":
                    T.copy(D[at, k * BLOCK, 0], D_shared)
                    T.gemm(A_shared, B_shared, total)
                    T.gemm(A_shared, D_shared, gate)
                elif how == "two experts":
                    T.gemm(A_shared, B_shared, total)
                    T.copy(B[EXPERTS - 1 - at, k * BLOCK, 0], D_shared)
                    T.gemm(A_shared, D_shared, total)
                else:
                    T.gemm(A_shared, B_shared, total)
            if how == "gated":
                for i, j in T.Parallel(BLOCK, N):
                    total[i, j] = total[i, j] * T.sigmoid(gate[i, j])
            T.copy(total, C[bx * BLOCK, 0])

    return main


HOW = ["plain", "gated", "two experts", "another each time", "moved on", "its square", "two together", "the last one"]
LAYOUTS = {"A": {}, "B": {"x": 0}, "D": {"x": 0}, "expert_of": {}, "C": {}}


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("infinite", [False, True], ids=["finite", "infinite"])
def test_results_are_those_of_one_device(how, devices, infinite):
    a, b, d = torch.randn(ROWS, K), torch.randn(EXPERTS, K, N), torch.randn(EXPERTS, K, N)
    if infinite:  # zeros of another device would make NaN of it
        a[3, 5] = a[20, 17] = torch.inf
        b[0, 2, 3] = d[0, 1, 1] = torch.nan  # of an expert that nobody asks for
    kernel = products(how)
    with machine(1):
        expected = run(kernel, {"x": 1}, LAYOUTS, a, b, d, EXPERT_OF)
        got = run(kernel, {"x": devices}, LAYOUTS, a, b, d, EXPERT_OF)
    torch.testing.assert_close(got, expected, equal_nan=True)
    if how == "plain":
        rows = zip(a.split(BLOCK), EXPERT_OF.tolist(), strict=True)
        torch.testing.assert_close(got, torch.cat([part @ b[e] for part, e in rows]), equal_nan=True)


def test_experts_stay_where_they_are():
    with machine(1):
        plain = outline(lowered(products("plain"), {"x": 2}, LAYOUTS, strict=True))
        gated = outline(lowered(products("gated"), {"x": 2}, LAYOUTS, strict=True))
        both = outline(lowered(products("two experts"), {"x": 2}, LAYOUTS, strict=True))
    assert [step.split("(")[0] for step in both] == ["kernel", "all_reduce"]
    assert [step.split("(")[0] for step in plain] == ["kernel", "all_reduce"]
    assert [step.split("(")[0] for step in gated] == ["kernel", "all_reduce"]


def test_an_expert_that_may_be_another_devices_is_named():
    with pytest.raises(mt.MeshTensorError, match="buffer 'B' dim 0 on axis 'x' needs replication"):
        lowered(products("moved on"), {"x": 2}, LAYOUTS, strict=True)


def test_an_expert_that_is_none():
    """Blocks outside of the table are zeros, on one device too."""
    a, b, d = torch.randn(ROWS, K), torch.randn(EXPERTS, K, N), torch.randn(EXPERTS, K, N)
    expert_of = torch.tensor([-1, 2, EXPERTS], dtype=torch.int32)
    with machine(1):
        got = run(products("plain"), {"x": 3}, LAYOUTS, a, b, d, expert_of)
    torch.testing.assert_close(got, torch.cat([torch.zeros(16, N), a[16:32] @ b[2], torch.zeros(16, N)]))


@pytest.mark.parametrize("devices", [2, 4])
def test_groups_that_programs_search_for(devices):
    sizes = {"groups": 3, "rows": 50, "N": 20, "K": 48}
    a, b = torch.randn(50, 48), torch.randn(3, 48, 20)
    counts = torch.tensor([17, 0, 33], dtype=torch.int32)
    with machine(1):
        got = run(searched_grouped_matmul(**sizes), {"x": devices}, {"B": {"x": 0}}, a, b, counts)
    torch.testing.assert_close(got, searched_grouped_matmul_reference(a, b, counts))
