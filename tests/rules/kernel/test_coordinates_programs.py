"""Grids that axes split whatever runs in a program, where programs have nothing in common that one of them writes."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

import mesh_tensor as mt
from kernels.indexer import index_scores, index_scores_reference
from mesh_tensor.rules.kernel.normalize import normalize
from tests.lowering.support import lowered, only_kernel, outline, run
from tests.other_machines import machine

MESH, BLOCK, K = {"x": 2}, 16, 32


def gemv_by_threads(M, beside=None):
    """`y = A x`: threads take parts of a row, which they sum with one another. `beside`: what else a program does."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float32"), x: T.Tensor((K,), "float32"), y: T.Tensor((M,), "float32")):
        with T.Kernel(M // BLOCK, threads=(BLOCK, 8)) as bx:
            row, part = T.get_thread_binding(0), T.get_thread_binding(1)
            total, of_row = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
            T.clear(total)
            for k in T.serial(K // 8):
                total[0] += A[bx * BLOCK + row, k * 8 + part] * x[k * 8 + part]
            if beside == "other programs":
                T.sync_grid()
            with T.attr(T.comm_reducer(lambda a, b: a + b, [T.float32(0)]), "reduce_scope", T.int32(0)):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), total[0], True, of_row[0], part))
            if beside == "its number":
                of_row[0] = T.tvm_warp_shuffle(T.int64(4294967295), of_row[0], bx, 32, 32)
            y[bx * BLOCK + row] = of_row[0]
            if beside == "a common place":
                y[row] = of_row[0]

    return main


def by_warps(rows, length=32):
    """Every row is exchanged between the threads of a warp, behind a barrier."""

    @T.prim_func
    def main(A: T.Tensor((rows, length), "float32"), B: T.Tensor((rows, length), "float32")):
        with T.Kernel(rows, threads=length) as bx:
            at = T.get_thread_binding(0)
            own = T.alloc_local((1,), "float32")
            ready = T.alloc_barrier(arrive_count=length)
            own[0] = A[bx, at]
            T.barrier_arrive(ready)
            T.barrier_wait(ready, 0)
            own[0] = T.tvm_warp_shuffle(T.int64(4294967295), own[0], 31 - at, 32, 32)
            B[bx, at] = own[0]

    return main


def by_rows_of_warps(rows, rows_of=4):
    """Every warp of a program sums a row: its lanes exchange what they have, and one of them stores it."""

    @T.prim_func
    def main(A: T.Tensor((rows, 64), "float32"), B: T.Tensor((rows,), "float32"), best: T.Tensor((rows,), "float32")):
        with T.Kernel(rows // rows_of, threads=32 * rows_of) as bx:
            at = T.get_thread_binding(0)
            own, most = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
            own[0] = A[bx * rows_of + at // 32, at % 32] + A[bx * rows_of + at // 32, at % 32 + 32]
            most[0] = T.warp_reduce_max(own[0])
            for step in T.serial(5):
                own[0] = own[0] + T.shfl_xor(own[0], 1 << step)
            if at % 32 == 0:
                B[bx * rows_of + at // 32] = own[0]
                best[bx * rows_of + at // 32] = most[0]

    return main


def by_tensor_cores(batch, together=False):
    """A product per program, of Blackwell's own kind, behind a barrier; `together`: two programs make one, each with
    half of the columns."""
    columns = 32 if together else 64

    @T.prim_func
    def main(
        A: T.Tensor((batch, 128, 64), "bfloat16"),
        B: T.Tensor((batch, 64, columns), "bfloat16"),
        C: T.Tensor((batch, 128, 64), "float32"),
    ):
        with T.Kernel(batch, threads=128) as bz:
            A_shared = T.alloc_shared((128, 64), "bfloat16")
            B_shared = T.alloc_shared((64, columns), "bfloat16")
            C_tmem = T.alloc_tmem((128, 64), "float32")
            C_local = T.alloc_fragment((128, 64), "float32")
            done = T.alloc_barrier(1)
            T.copy(A[bz, 0, 0], A_shared)
            T.copy(B[bz, 0, 0], B_shared)
            T.tcgen05_gemm(A_shared, B_shared, C_tmem, mbar=done, clear_accum=True, use_2cta=together)
            T.mbarrier_wait_parity(done, 0)
            T.copy(C_tmem, C_local)
            T.copy(C_local, C[bz, 0, 0])

    return main


def by_groups_of_threads(M, block=128):
    """Some threads load blocks, others multiply them, and all wait for the sum."""

    @T.prim_func
    def main(A: T.Tensor((M, 128), "bfloat16"), B: T.Tensor((128, 64), "bfloat16"), C: T.Tensor((M, 64), "float32")):
        with T.Kernel(M // block, threads=128) as bx:
            A_shared = T.alloc_shared((block, 64), "bfloat16")
            B_shared = T.alloc_shared((64, 64), "bfloat16")
            C_tmem = T.alloc_tmem((block, 64), "float32")
            C_local = T.alloc_fragment((block, 64), "float32")
            loaded, consumed, done = T.alloc_barrier(32), T.alloc_barrier(1), T.alloc_barrier(1)
            at = T.get_thread_binding()
            if at < 32:
                for k in T.serial(2):
                    T.mbarrier_wait_parity(consumed, (k & 1) ^ 1)
                    T.tma_copy(A[bx * block, k * 64], A_shared, barrier=loaded)
                    T.tma_copy(B[k * 64, 0], B_shared, barrier=loaded)
                    T.barrier_arrive(loaded)
            elif at < 64:
                for k in T.serial(2):
                    T.mbarrier_wait_parity(loaded, k & 1)
                    T.tcgen05_gemm(A_shared, B_shared, C_tmem, mbar=consumed, clear_accum=k == 0)
                T.tcgen05_mma_arrive(done)
            T.mbarrier_wait_parity(done, 0)
            T.tcgen05_after_thread_sync()
            T.copy(C_tmem, C_local)
            T.copy(C_local, C[bx * block, 0])

    return main


def by_counting(rows, beside=None):
    """Which elements of a row are positive, in any order: threads count them with what atomics return."""

    @T.prim_func
    def main(A: T.Tensor((rows, K), "float32"), seen: T.Tensor((1,), "int32"), B: T.Tensor((rows, K), "int32")):
        with T.Kernel(rows, threads=K) as bx:
            at = T.get_thread_binding(0)
            count = T.alloc_shared((2,), "int32")
            place = T.alloc_var("int32")
            own = T.alloc_var("float32")
            T.clear(count)
            own = A[bx, at]
            if own > 0:
                if beside == "a common count":
                    place = T.atomic_add(seen[0], 1, return_prev=True)
                else:
                    place = T.atomic_add(count[0], 1, return_prev=True)
                B[bx, place] = at

    return main


COUNTED = {"A": {"x": 0}, "seen": {}, "B": {"x": 0}}


def test_what_threads_count_is_of_their_program():
    with machine(1):
        assert len(outline(lowered(by_counting(64), MESH, COUNTED, strict=True))) == 1


def test_what_all_programs_count_keeps_rows_whole():
    with machine(1), pytest.raises(mt.MeshTensorError, match="buffer 'A' dim 0 on axis 'x' needs replication"):
        lowered(by_counting(64, "a common count"), MESH, COUNTED, strict=True)


def test_products_of_two_programs_are_not_taken_apart():
    layouts = {name: {"x": 0} for name in "ABC"}
    with machine(1), pytest.raises(mt.MeshTensorError, match="a product of two blocks of a cluster"):
        lowered(by_tensor_cores(64, together=True), MESH, layouts, strict=True)


def assert_same(local, expected):
    """The same kernel, whatever it is called and is told besides."""
    expected, local = normalize(expected), normalize(local)
    shapes = [
        [tuple(map(int, f.buffer_map[p].shape)) for p in f.params if p in f.buffer_map] for f in (local, expected)
    ]
    assert shapes[0] == shapes[1]
    ir.assert_structural_equal(local.body, expected.body, map_free_vars=True)


@pytest.mark.parametrize(
    ("make", "layouts"),
    [
        (gemv_by_threads, {"A": {"x": 0}, "x": {}, "y": {"x": 0}}),
        (by_warps, {"A": {"x": 0}, "B": {"x": 0}}),
        (by_rows_of_warps, {"A": {"x": 0}, "B": {"x": 0}, "best": {"x": 0}}),
        (by_tensor_cores, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 0}}),
    ],
    ids=["gemv", "warps", "rows of warps", "tensor cores"],
)
def test_a_device_runs_the_kernel_of_its_rows(make, layouts):
    with machine(1):
        result = lowered(make(64), MESH, layouts, strict=True)
    assert_same(only_kernel(result), make(32))


def test_a_device_runs_the_blocks_of_its_rows():
    with machine(1):
        result = lowered(by_groups_of_threads(512), MESH, {"A": {"x": 0}, "B": {}, "C": {"x": 0}}, strict=True)
    assert_same(only_kernel(result), by_groups_of_threads(256))


@pytest.mark.parametrize("layouts", [{"A": {"x": 1}}, {"B": {"x": 0}}])
def test_what_groups_of_threads_hand_to_each_other_is_whole(layouts):
    with machine(1), pytest.raises(mt.MeshTensorError, match="tl.mbarrier_wait_parity is not understood"):
        lowered(by_groups_of_threads(512), MESH, layouts, strict=True)


@pytest.mark.parametrize("beside", ["other programs", "its number", "a common place"])
def test_what_programs_have_in_common_keeps_rows_whole(beside):
    layouts = {"A": {"x": 0}, "x": {}, "y": {"x": 0}}
    with machine(1), pytest.raises(mt.MeshTensorError, match="buffer 'A' dim 0 on axis 'x' needs replication"):
        lowered(gemv_by_threads(64, beside), MESH, layouts, strict=True)


def test_tiles_are_whole_programs():
    layouts = {"A": {"x": 0}, "x": {}, "y": {"x": 0}}
    with machine(1), pytest.raises(mt.MeshTensorError, match="needs replication"):
        lowered(gemv_by_threads(16), MESH, layouts, strict=True)


def scores(M, N):
    generator = torch.Generator().manual_seed(M + N)
    return [torch.randn(shape, generator=generator) for shape in ((4 * M, 16), (N, 16), (M, 4))]


@pytest.mark.parametrize(("M", "N"), [(32, 48), (32, 50), (24, 48), (13, 30)])
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("layouts", [{"Q": {"x": 0}, "W": {"x": 0}, "S": {"x": 0}}, {"K": {"x": 0}, "S": {"x": 1}}])
def test_a_view_on_chip(M, N, devices, layouts):
    given = scores(M, N)
    with machine(1):
        found = run(index_scores(M, N), {"x": devices}, layouts, *given)
    torch.testing.assert_close(found, index_scores_reference(*given), rtol=1e-4, atol=1e-4)


def test_a_view_on_chip_moves_nothing():
    layouts = {"Q": {"x": 0}, "W": {"x": 0}, "S": {"x": 0}, "K": {}}
    with machine(1):
        assert outline(lowered(index_scores(32, 48), {"x": 4}, layouts, strict=True)) == ["kernel(Q, K, W, S)"]
