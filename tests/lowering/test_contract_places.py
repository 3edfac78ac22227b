"""On-chip buffers that are used at computed places: in local view, too, those are the places that the kernel means."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

from .every_layout import accepted, check
from .support import coordinates, lowered, nodes, only_kernel


def combined(places, values, size):
    """`size` sums of the values with the same place."""
    return torch.zeros(size).index_add_(0, places, values)


@pytest.mark.parametrize("size", [11, 12])
def test_places_computed_from_a_position(size):
    @T.prim_func
    def kernel(A: T.Tensor((size,)), C: T.Tensor((4,))):
        with T.Kernel(1, threads=32):
            sums = T.alloc_shared((4,), "float32")
            T.clear(sums)
            for i in T.serial(size):
                sums[i % 4] += A[i]
            T.copy(sums, C)

    a = torch.randn(size)
    check(kernel, [a], combined(torch.arange(size) % 4, a, 4))
    assert accepted(kernel, {"x": 2}, {"A": {"x": 0}})["k"] == "sum"


def test_groups_of_neighbours():
    @T.prim_func
    def kernel(A: T.Tensor((6, 10)), C: T.Tensor((6, 3))):
        with T.Kernel(6, threads=32) as bx:
            most = T.alloc_fragment((3,), "float32")
            T.fill(most, -100.0)
            for j in T.serial(10):
                most[j // 4] = T.max(most[j // 4], A[bx, j])
            T.copy(most, C[bx, 0])

    a = torch.randn(6, 10)
    expected = torch.stack([part.amax(1) for part in a.split(4, 1)], 1)
    check(kernel, [a], expected)
    assert accepted(kernel, {"x": 2}, {"A": {"x": 1}})["k"] == "max"


def test_a_histogram_on_chip():
    @T.prim_func
    def kernel(I: T.Tensor((6, 5), "int32"), C: T.Tensor((4,))):  # noqa: E741
        with T.Kernel(1, threads=32):
            counts = T.alloc_shared((4,), "float32")
            T.clear(counts)
            for i in T.serial(6):
                for j in T.serial(5):
                    counts[I[i, j]] += 1.0
            T.copy(counts, C)

    ids = torch.randint(0, 4, (6, 5), dtype=torch.int32)
    check(kernel, [ids], torch.bincount(ids.flatten(), minlength=4).float())
    assert accepted(kernel, {"x": 2}, {"I": {"x": 0}})["k"] == "sum"


def test_places_loaded_from_elsewhere_in_the_tensor():
    @T.prim_func
    def kernel(A: T.Tensor((7,)), I: T.Tensor((7,), "int32"), C: T.Tensor((9,))):  # noqa: E741
        with T.Kernel(1, threads=32):
            sums = T.alloc_shared((9,), "float32")
            T.clear(sums)
            for i in T.serial(7):
                T.atomic_add(sums[I[6 - i]], A[i])
            T.copy(sums, C)

    a, ids = torch.randn(7), torch.randint(0, 9, (7,), dtype=torch.int32)
    expected = combined(ids.flip(0).long(), a, 9)

    @T.prim_func
    def shifted(A: T.Tensor((7,)), I: T.Tensor((7,), "int32"), C: T.Tensor((16,))):  # noqa: E741
        with T.Kernel(1, threads=32):
            sums = T.alloc_shared((16,), "float32")
            T.clear(sums)
            for i in T.serial(7):
                sums[I[i] + i] += A[i]
            T.copy(sums, C)

    check(kernel, [a, ids], expected)
    check(shifted, [a, ids], combined(ids.long() + torch.arange(7), a, 16))


def test_lanes_whose_order_only_their_sum_forgets():
    """With tiles that are no whole blocks, lanes hold other elements than they do in the kernel: all of them together
    are the same."""

    @T.prim_func
    def kernel(A: T.Tensor((14,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            lanes = T.alloc_fragment((4,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(lanes)
            for k in T.serial(4):
                for j in T.Parallel(4):
                    lanes[3 - j] += A[k * 4 + j]
            T.reduce_sum(lanes, total, dim=0)
            T.copy(total, C)

    a = torch.randn(14)
    check(kernel, [a], a.sum()[None])


def test_tables_read_at_loaded_places():
    @T.prim_func
    def kernel(I: T.Tensor((7, 5), "int32"), B: T.Tensor((4,)), C: T.Tensor((7, 5))):  # noqa: E741
        with T.Kernel(T.ceildiv(7, 3), threads=32) as bx:
            table = T.alloc_shared((4,), "float32")
            ids = T.alloc_shared((3, 5), "int32")
            out = T.alloc_fragment((3, 5), "float32")
            T.copy(B, table)
            T.copy(I[bx * 3, 0], ids)
            for i, j in T.Parallel(3, 5):
                out[i, j] = table[ids[i, j]]
            T.copy(out, C[bx * 3, 0])

    ids, table = torch.randint(0, 4, (7, 5), dtype=torch.int32), torch.randn(4)
    check(kernel, [ids, table], table[ids.long()])
    assert accepted(kernel, {"x": 2}, {"C": {"x": 0}})["m"] == "parallel"


def test_places_loaded_in_conditions_and_bindings():
    """Past a tile's end what is loaded is no place: such a read must not happen, wherever it stands."""

    @T.prim_func
    def kernel(I: T.Tensor((9,), "int32"), B: T.Tensor((3,)), C: T.Tensor((9,)), D: T.Tensor((9,))):  # noqa: E741
        with T.Kernel(3, threads=32) as bx:
            table = T.alloc_shared((3,), "float32")
            ids = T.alloc_shared((3,), "int32")
            out = T.alloc_fragment((3,), "float32")
            T.copy(B, table)
            T.copy(I[bx * 3], ids)
            T.clear(out)
            for i in T.serial(3):
                if table[ids[i] - 1] > 0:
                    out[i] = 2.0
                value = table[ids[i] - 1]
                D[bx * 3 + i] = value * 2.0
            T.copy(out, C[bx * 3])

    ids, table = torch.randint(1, 4, (9,), dtype=torch.int32), torch.randn(3)
    values = table[ids.long() - 1]
    check(kernel, [ids, table], ((values > 0) * 2.0, values * 2))
    assert accepted(kernel, {"x": 2}, {"C": {"x": 0}})["m"] == "parallel"


def test_loops_whose_length_is_loaded_do_not_run_in_padding():
    """Padding may hold anything: a loop that asks it how long to run may never end."""

    @T.prim_func
    def kernel(A: T.Tensor((9, 4)), N: T.Tensor((9,), "int32"), C: T.Tensor((9,))):
        with T.Kernel(3, threads=32) as bx:
            lengths = T.alloc_shared((3,), "int32")
            length = T.alloc_var("int32", init=0)
            out = T.alloc_fragment((3,), "float32")
            T.copy(N[bx * 3], lengths)
            T.clear(out)
            for i in T.serial(3):
                for j in T.serial(lengths[i]):
                    out[i] += A[bx * 3 + i, j]
                length = lengths[i]
                for j in T.serial(length):
                    out[i] += A[bx * 3 + i, j]
                for j in T.serial(N[bx * 3 + i]):
                    out[i] += A[bx * 3 + i, j]
            T.copy(out, C[bx * 3])

    a, lengths = torch.randn(9, 4), torch.randint(0, 5, (9,), dtype=torch.int32)
    check(kernel, [a, lengths], 3 * (a * (torch.arange(4) < lengths[:, None])).sum(1))
    local = only_kernel(lowered(kernel, {"x": 2}, {"N": {"x": 0}, "C": {"x": 0}}))
    inner = [loop for loop in nodes(local, tirx.For) if loop.loop_var.name == "j"]
    x = coordinates(local)[0]
    assert len(inner) == 3
    assert all(f"bx * 3 + i < T.max(T.min(9 - {x} * 5, 5), 0)" in str(loop.extent) for loop in inner)
