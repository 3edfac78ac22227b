"""Programs that look up all of theirs at one place of a split dim: one device makes what they write."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.lowering.support import lowered, outline, run
from tests.other_machines import machine

EXPERTS, ROWS, K, N, BLOCK = 5, 48, 32, 24, 16
EXPERT_OF = torch.tensor([4, 1, 4], dtype=torch.int32)
KEPT = torch.tensor([16, 5, 0], dtype=torch.int32)

LAYOUTS = {"A": {}, "W": {"x": 0}, "expert_of": {}, "kept": {}, "C": {}}
STAY = ["plain", "moved on", "stored before", "onto each other", "some rows", "added", "added in one", "updated"]
MOVE = ["moved on later", "read again", "where it is positive", "as often as it says", "where it says", "the largest"]


def programs(how):
    """`C = gelu(A @ W[expert])` of a block of rows, written in some way."""

    @T.prim_func
    def main(
        A: T.Tensor((ROWS, K), "float32"),
        W: T.Tensor((EXPERTS, K, N), "float32"),
        expert_of: T.Tensor((ROWS // BLOCK,), "int32"),
        kept: T.Tensor((ROWS // BLOCK,), "int32"),
        C: T.Tensor((ROWS, N), "float32"),
    ):
        with T.Kernel(ROWS // BLOCK, threads=32) as bx:
            A_shared = T.alloc_shared((BLOCK, K), "float32")
            W_shared = T.alloc_shared((K, N), "float32")
            total = T.alloc_fragment((BLOCK, N), "float32")
            at = T.alloc_var("int32")
            at = 0
            for e in T.serial(EXPERTS):
                at = T.if_then_else(expert_of[bx] == e, e, at)
            T.clear(total)
            T.copy(A[bx * BLOCK, 0], A_shared)
            if how == "stored before":
                for i, j in T.Parallel(BLOCK, N):
                    C[bx * BLOCK + i, j] = A_shared[i, 0]
            if how == "moved on":
                at = (at + bx) % EXPERTS
            T.copy(W[at, 0, 0], W_shared)
            T.gemm(A_shared, W_shared, total)
            if how == "moved on later":
                at = 0
            for i, j in T.Parallel(BLOCK, N):
                total[i, j] = T.exp(-total[i, j] * total[i, j]) - 0.5
            if how == "onto each other":
                T.copy(total, C[bx // 2 * BLOCK, 0])
            elif how == "some rows":
                for i, j in T.Parallel(BLOCK, N):
                    if i < kept[bx]:
                        C[bx * BLOCK + i, j] = total[i, j]
            elif how == "added":
                for i, j in T.Parallel(BLOCK, N):
                    T.atomic_add(C[bx // 2 * BLOCK + i, j], total[i, j])
            elif how == "added in one":
                T.atomic_add(C[bx // 2 * BLOCK, 0], total)
            elif how == "updated":
                for i, j in T.Parallel(BLOCK, N):
                    C[bx // 2 * BLOCK + i, j] += total[i, j]
            elif how == "read again":
                T.copy(total, C[bx * BLOCK, 0])
                for i, j in T.Parallel(BLOCK, N):
                    C[bx * BLOCK + i, j] = C[bx * BLOCK + i, j] * 2
            elif how not in MOVE:
                T.copy(total, C[bx * BLOCK, 0])
            if how == "moved on later":
                T.copy(total, C[bx * BLOCK, 0])
            elif how == "where it is positive":
                for i, j in T.Parallel(BLOCK, N):
                    if total[i, j] > 0:
                        C[bx * BLOCK + i, j] = total[i, j]
            elif how == "as often as it says":
                for n in T.serial(T.cast(W_shared[0, 0], "int32")):
                    for i, j in T.Parallel(BLOCK, N):
                        C[bx * BLOCK + i, j] = total[i, j] + n
            elif how == "where it says":
                for i, j in T.Parallel(BLOCK, N):
                    C[(bx * BLOCK + i + T.cast(W_shared[0, 0], "int32")) % ROWS, j] = total[i, j]
            elif how == "the largest":
                for i, j in T.Parallel(BLOCK, N):
                    T.atomic_max(C[bx // 2 * BLOCK + i, j], total[i, j])

    return main


def _values():
    w = torch.randn(EXPERTS, K, N) / 4
    w[:, 0, 0] = torch.tensor([1.0, 2, 3, 2, 1])
    return torch.randn(ROWS, K) / 4, w, EXPERT_OF, KEPT, torch.randn(ROWS, N)


@pytest.mark.parametrize("how", [*STAY, *MOVE])
def test_results_are_those_of_one_device(how):
    values = _values()
    with machine(1):
        expected = run(programs(how), {"x": 1}, LAYOUTS, *(v.clone() for v in values))
        for mesh, layouts in ({"x": 4}, LAYOUTS | {"C": {"x": 0}}), ({"x": 2, "y": 2}, LAYOUTS | {"A": {"y": 1}}):
            got = run(programs(how), mesh, layouts, *(v.clone() for v in values))
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("how", STAY)
def test_what_is_looked_up_stays_where_it_is(how):
    with machine(1):
        steps = outline(lowered(programs(how), {"x": 2}, LAYOUTS, strict=True))
    assert [step.split("(")[0] for step in steps][-2:] == ["kernel", "all_reduce"]


@pytest.mark.parametrize("how", MOVE)
def test_programs_that_are_not_one_devices_have_it_gathered(how):
    with machine(1), pytest.raises(mt.MeshTensorError, match="buffer 'W' dim 0 on axis 'x' needs replication"):
        lowered(programs(how), {"x": 2}, LAYOUTS, strict=True)


def test_programs_are_split_by_another_axis():
    values = _values()
    with machine(1):
        expected = run(programs("plain"), {"x": 1}, LAYOUTS, *values)
        layouts = LAYOUTS | {"A": {"y": 0}, "C": {"y": 0}}
        torch.testing.assert_close(run(programs("plain"), {"x": 2, "y": 3}, layouts, *values), expected)


def test_another_axis_splits_what_is_looked_up_beside_it():
    """In one statement, at a place of its own in every iteration: that device's share is a part of a sum."""

    @T.prim_func
    def main(
        W: T.Tensor((4 * ROWS, N), "float32"),
        V: T.Tensor((ROWS, N), "float32"),
        expert_of: T.Tensor((8,), "int32"),
        rows_of: T.Tensor((8, 3), "int32"),
        C: T.Tensor((8, N), "float32"),
    ):
        with T.Kernel(8, threads=32) as bx:
            total = T.alloc_fragment((N,), "float32")
            for j in T.Parallel(N):
                total[j] = bx + 1
            for k in T.serial(3):
                for j in T.Parallel(N):
                    total[j] += W[expert_of[bx], j] * V[rows_of[bx, k], j]
            T.copy(total, C[bx, 0])

    w, v = torch.randn(4 * ROWS, N), torch.randn(ROWS, N)
    expert_of, rows_of = torch.randint(4 * ROWS, (8,)).int(), torch.randint(ROWS, (8, 3)).int()
    expected = w[expert_of.long()] * v[rows_of.long()].sum(1) + torch.arange(1.0, 9)[:, None]
    layouts = {"W": {"x": 0}, "V": {"y": 0}, "expert_of": {}, "rows_of": {}, "C": {}}
    with machine(1):
        got = run(main, {"x": 2, "y": 2}, layouts, w, v, expert_of, rows_of)
    torch.testing.assert_close(got, expected)
