"""strict=True: every buffer, dim and axis that can't lie as annotated is listed, with the reason."""

import pytest
import tilelang.language as T

import mesh_tensor as mt
from tests.refusals import refusal

from .kernels import matmul, scale
from .support import lowered


def refused(func, mesh, layouts):
    return refusal(lowered, func, mesh, layouts, strict=True)


def test_an_input_that_lies_otherwise():
    message = refused(matmul(32, 32, 32), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 0}})
    assert "buffer 'B' is annotated sharded on dim 0 on axis 'x', but lies replicated" in message
    assert "the axis splits factor m (it costs least)" in message
    assert "where: kernel 'matmul', strict=True" in message
    assert "fix: annotate what the rule can split, or lower without strict=True" in message


def test_an_output_that_would_be_gathered():
    message = refused(scale(32, 16), {"x": 2}, {"A": {"x": 0}, "B": {"x": 1}})
    assert "buffer 'A' is annotated sharded on dim 0 on axis 'x', but lies sharded on dim 1" in message


def wandering(M, N):
    """What columns leave goes on from column to column, and each meets all columns."""

    @T.prim_func
    def wandering(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(M, threads=32) as i:
            state = T.alloc_fragment((1,), "float32")
            T.clear(state)
            for j in T.serial(N):
                for k in T.serial(N):
                    state[0] = T.sin(state[0]) + X[i, k]
                Y[i, j] = state[0] + X[i, j]

    return wandering


def test_a_dim_that_needs_replication():
    message = refused(wandering(16, 64), {"x": 2}, {"X": {"x": 1}, "Y": {"x": 1}})
    assert message.startswith("2 problems:")
    for name in "XY":
        assert f"buffer '{name}' dim 1 on axis 'x' needs replication: " in message
    assert "the store to state keeps one of many coordinates' values" in message


def test_every_problem_is_listed():
    layouts = {"A": {"x": 1, "y": 0}, "B": {"x": 1, "y": 0}, "C": {"x": 0, "y": 1}}
    message = refused(matmul(32, 32, 32), {"x": 2, "y": 2}, layouts)
    assert message.startswith("2 problems:")
    assert "buffer 'A' is annotated sharded on dim 0 on axis 'y'" in message
    assert "buffer 'B' is annotated sharded on dim 1 on axis 'x'" in message


@pytest.mark.parametrize(
    "layouts",
    [
        {"A": {"x": 0}, "C": {"x": 0}},
        {"A": {"x": 1}, "B": {"x": 0}},
        {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 0}},
        {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}},
        {},
    ],
    ids=str,
)
def test_what_needs_no_gather_is_not_refused(layouts):
    assert lowered(matmul(32, 32, 32), {"x": 2, "y": 2}, layouts, strict=True).steps


def test_axes_of_one_device_are_never_refused():
    lowered(matmul(32, 32, 32), {"x": 1}, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 1}}, strict=True)


def test_compile_hands_it_on():
    @T.prim_func
    def first(A: T.Tensor((33,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[31 - (bx * 8 + i)] + A[32]

    annotated = mt.annotate(first, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match="buffer 'A' dim 0 on axis 'x' needs replication: .*it is reversed"):
        mt.compile(annotated, target="interpret", strict=True)


def test_a_reversed_index_is_called_so():
    @T.prim_func
    def reverse(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(64, threads=1) as bx:
            B[bx] = A[63 - bx]

    annotated = mt.annotate(reverse, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match="buffer 'A' dim 0 on axis 'x' needs replication: .*it is reversed"):
        mt.compile(annotated, target="interpret", strict=True)


@T.prim_func
def by_threads(A: T.Tensor((16, 64), "float32"), x: T.Tensor((64,), "float32"), y: T.Tensor((16,), "float32")):
    with T.Kernel(4, threads=(4, 8)) as bx:
        row, part = T.get_thread_binding(0), T.get_thread_binding(1)
        total, sums = T.alloc_local((1,), "float32"), T.alloc_shared((4,), "float32")
        if part == 0:
            sums[row] = 0.0
        T.clear(total)
        for k in T.serial(8):
            total[0] += A[bx * 4 + row, k * 8 + part] * x[k * 8 + part]
        T.atomic_add(sums[row], total[0])
        y[bx * 4 + row] = sums[row]


@T.prim_func
def by_groups_of_threads(A: T.Tensor((16, 64), "float32"), y: T.Tensor((16,), "float32")):
    with T.Kernel(16, threads=256) as bx:
        ready = T.alloc_barrier(arrive_count=128)
        block, total = T.alloc_shared((16,), "float32"), T.alloc_fragment((1,), "float32")
        with T.ws(0):
            T.clear(total)
            for ko in T.serial(4):
                T.barrier_wait(ready, ko % 2)
                T.reduce_sum(block, total, dim=0, clear=False)
            y[bx] = total[0]
        with T.ws(1):
            for ko in T.serial(4):
                T.copy(A[bx, ko * 16], block)
                T.barrier_arrive(ready)


@T.prim_func
def sparse_product(
    A: T.Tensor((128, 64), "float16"),
    E: T.Tensor((128, 8), "int16"),
    B: T.Tensor((128, 128), "float16"),
    C: T.Tensor((128, 128), "float32"),
):
    with T.Kernel(2, 2, threads=128) as (bx, by):
        a, e = T.alloc_shared((64, 16), "float16"), T.alloc_shared((64, 2), "int16")
        b, c = T.alloc_shared((32, 64), "float16"), T.alloc_fragment((64, 64), "float32")
        T.clear(c)
        for k in T.serial(4):
            T.copy(A[by * 64, k * 16], a)
            T.copy(E[by * 64, k * 2], e)
            T.copy(B[k * 32, bx * 64], b)
            T.gemm_sp(a, e, b, c)
        T.copy(c, C[by * 64, bx * 64])


@T.prim_func
def state_that_meets_itself(A: T.Tensor((32, 8), "float32"), Y: T.Tensor((32, 8), "float32")):
    with T.Kernel(1, threads=32) as _:
        state, part = T.alloc_fragment((8, 8), "float32"), T.alloc_fragment((8, 8), "float32")
        row = T.alloc_fragment((8,), "float32")
        T.clear(state)
        for t in T.serial(32):
            for i, j in T.Parallel(8, 8):
                part[i, j] = state[i, j] * A[t, i]
            T.reduce_sum(part, row, dim=0)
            for i, j in T.Parallel(8, 8):
                state[i, j] += A[t, i] * (A[t, j] - row[j])
            for j in T.Parallel(8):
                Y[t, j] = row[j]


@pytest.mark.parametrize(
    ("func", "layouts", "reason"),
    [
        (
            by_threads,
            {"A": {"x": 1}, "x": {"x": 0}},
            "it goes by the thread index part, and what threads have",
        ),
        (by_groups_of_threads, {"A": {"x": 1}}, "tl.mbarrier_wait_parity is not understood"),
        (sparse_product, {"A": {"x": 1}}, "tl.tileop.gemm_sp, which is not understood, uses e and a"),
    ],
    ids=["threads", "groups_of_threads", "sparse"],
)
def test_what_is_gathered_all_the_same_is_named(func, layouts, reason):
    assert reason in refused(func, {"x": 2}, layouts)


@pytest.mark.parametrize(
    ("func", "layouts"),
    [
        (by_threads, {"A": {"x": 0}, "y": {"x": 0}}),
        (by_groups_of_threads, {"A": {"x": 0}, "y": {"x": 0}}),
        (sparse_product, {"A": {"x": 0}, "E": {"x": 0}, "C": {"x": 0}}),
        (sparse_product, {"B": {"x": 1}, "C": {"x": 1}}),
        (state_that_meets_itself, {"Y": {"x": 1}}),
        (state_that_meets_itself, {"A": {"x": 0}, "Y": {"x": 0}}),
    ],
    ids=["threads", "groups_of_threads", "sparse_rows", "sparse_columns", "linear_maps", "steps_of_linear_maps"],
)
def test_other_dims_of_theirs_are_split(func, layouts):
    assert lowered(func, {"x": 2}, layouts, strict=True).steps
