"""Clause 9: of a dim that all devices read at the same few places, these alone are handed on."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt

from .support import assert_right, lowered, outline

M, N = 19, 50
ROWS = {"A": {"x": 0}, "B": {"x": 0}, "out": {"x": 0}}


def minus_rows(row, count=1, m=M, n=N, block_m=8, block_n=16):
    """`out = B - sum(A[row : row + count])`, element by element."""

    @T.prim_func
    def kernel(A: T.Tensor((m, n), "float32"), B: T.Tensor((m, n), "float32"), out: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (bx, by):
            rest = T.alloc_fragment((block_m, block_n), "float32")
            T.copy(B[by * block_m, bx * block_n], rest)
            for k in T.serial(count):
                for i, j in T.Parallel(block_m, block_n):
                    if bx * block_n + j < n:
                        rest[i, j] = rest[i, j] - A[row + k, bx * block_n + j]
            T.copy(rest, out[by * block_m, bx * block_n])

    return kernel


def staged_rows(row, m=M, n=N, block_m=8, block_n=16):
    """`out = B * A[row] + A[row + 1]`, of a block that is copied."""

    @T.prim_func
    def kernel(A: T.Tensor((m, n), "float32"), B: T.Tensor((m, n), "float32"), out: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (bx, by):
            two = T.alloc_shared((2, block_n), "float32")
            rest = T.alloc_fragment((block_m, block_n), "float32")
            T.copy(A[row, bx * block_n], two)
            T.copy(B[by * block_m, bx * block_n], rest)
            for i, j in T.Parallel(block_m, block_n):
                rest[i, j] = rest[i, j] * two[0, j] + two[1, j]
            T.copy(rest, out[by * block_m, bx * block_n])

    return kernel


def indexed(place, size=32):
    """`B[i] = A[place(i)]`."""

    @T.prim_func
    def kernel(A: T.Tensor((size,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(3, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[place(bx * 8 + i)]

    return kernel


READS = {
    "first": (minus_rows(0), lambda a, b: b - a[0], 1),
    "in the middle": (minus_rows(9), lambda a, b: b - a[9], 1),
    "last": (minus_rows(M - 1), lambda a, b: b - a[M - 1], 1),
    "several, of two devices": (minus_rows(8, 4), lambda a, b: b - a[8:12].sum(0), 4),
    "a block": (staged_rows(6), lambda a, b: b * a[6] + a[7], 2),
}


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("name", READS)
def test_numbers(name, mesh):
    func, reference, _ = READS[name]
    assert_right(func, mesh, ROWS, [torch.randn(M, N), torch.randn(M, N)], reference)


@pytest.mark.parametrize("name", READS)
def test_only_what_is_read_moves(name):
    func, _, rows = READS[name]
    kernel = mt.compile(mt.annotate(func, {"x": 3}, ROWS), target="interpret", strict=True)
    assert [step.kind for step in kernel.program.collectives] == ["halo"]
    assert kernel.program.collectives[0].bytes <= rows * N * 4
    assert "of dim 0 only " in kernel.explain()


def test_on_the_other_target_and_on_two_axes():
    a, b = torch.randn(M, N), torch.randn(M, N)
    both = {name: {"x": 0, "y": 1} for name in ROWS}
    for layouts in (both, {**both, "A": {"x": 1, "y": 0}}, {**ROWS, "A": {"x": 0, "y": 0}}):
        kernel = mt.compile(mt.annotate(staged_rows(6), {"x": 2, "y": 2}, layouts), target="c")
        torch.testing.assert_close(kernel(a, b), b * a[6] + a[7], rtol=1e-5, atol=1e-5)


def test_partial_sums_are_completed_where_they_lie():
    layouts = {**ROWS, "A": {"sharding": {"x": 0}, "partial": {"y": "sum"}}}
    result = lowered(minus_rows(5), {"x": 2, "y": 2}, layouts)
    assert outline(result) == ["all_reduce(A, sum, y)", "halo(A.1, x)", "kernel(A.2, B, out)"]


def test_of_a_tensor_that_lies_whole_nothing_is_cut_out():
    assert outline(lowered(minus_rows(5), {"x": 2}, {"B": {"x": 0}, "out": {"x": 0}})) == ["kernel(A, B, out)"]


COMPUTED = {
    "clamped": (lambda i: T.max(T.min(i, 6), 3), lambda i: min(max(i, 3), 6)),
    "around": (lambda i: i % 5 + 11, lambda i: i % 5 + 11),
    "backwards": (lambda i: 20 - i // 4, lambda i: 20 - i // 4),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", COMPUTED)
def test_places_that_are_computed(name, devices):
    place, known = COMPUTED[name]
    func, layouts = indexed(place), {"A": {"x": 0}, "B": {"x": 0}}
    assert "all_gather" not in str(outline(lowered(func, {"x": devices}, layouts)))
    assert_right(func, {"x": devices}, layouts, [torch.randn(32)], lambda a: a[[known(i) for i in range(24)]])


def written():
    """`A[1] += 1`, then `B[i] = A[1]`."""

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=8):
            A[1] = A[1] + 1.0
            for i in T.Parallel(24):
                B[i] = A[1]

    return kernel


def by_data():
    """`B[i] = A[min(ids[i], 3)]`, of which nothing says how low it is."""

    @T.prim_func
    def kernel(ids: T.Tensor((24,), "int32"), A: T.Tensor((32,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(3, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[T.min(ids[bx * 8 + i], 3)]

    return kernel


def narrowed():
    """`B[i] = A[i + 250 as 8 bits]`, which begins anew at 0."""
    return indexed(lambda i: T.cast(T.cast(i + 250, "uint8"), "int32"), 300)


def wrapped(place, dtype):
    """`B[i] = A[place(ids[i])]`, of which 8 bits are too few for what is computed in between."""

    @T.prim_func
    def kernel(ids: T.Tensor((24,), dtype), A: T.Tensor((300,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(3, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[T.cast(place(ids[bx * 8 + i]), "int32") + 150]

    return kernel


def running_sum():
    """`B = cumsum(A[0:24])`: the tool goes over what it reads in order."""

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=32):
            rows = T.alloc_shared((24,), "float32")
            T.copy(A[0:24], rows)
            T.cumsum(rows, dim=0)
            T.copy(rows, B)

    return kernel


OTHERS = {
    "written": (written(), [torch.arange(32.0)], lambda a: (a + (torch.arange(32) == 1), (a[1] + 1).expand(24))),
    "by data": (
        by_data(),
        [torch.arange(24, dtype=torch.int32) % 9, torch.randn(32)],
        lambda ids, a: a[ids.long().clamp(max=3)],
    ),
    "wrapped": (
        wrapped(lambda i: (i & T.int8(63)) + T.int8(100), "int8"),
        [torch.arange(24, dtype=torch.int8) * 2, torch.randn(300)],
        lambda ids, a: a[(ids.long() + 228) % 256 + 22],
    ),
    "wrapped, without a sign": (
        wrapped(lambda i: T.uint8(10) - (i & T.uint8(15)) & T.uint8(127), "uint8"),
        [torch.arange(24, dtype=torch.uint8), torch.randn(300)],
        lambda ids, a: a[(10 - ids.long() % 16) % 128 + 150],
    ),
    "narrowed": (narrowed(), [torch.randn(300)], lambda a: a[(torch.arange(24) + 250) % 256]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_window_where_it_is_not_known_what_is_read(name):
    func, inputs, reference = OTHERS[name]
    layouts = {"A": {"x": 0}, "B": {"x": 0}}
    assert "halo" not in str(outline(lowered(func, {"x": 2}, layouts)))
    result = mt.compile(mt.annotate(func, {"x": 2}, layouts), target="interpret", poison=True)(
        *(tensor.clone() for tensor in inputs)
    )
    torch.testing.assert_close(result, reference(*inputs))


@pytest.mark.parametrize("devices", [2, 3])
def test_a_part_that_a_tile_operation_goes_over(devices):
    layouts = {"A": {"x": 0}, "B": {"x": 0}}
    assert_right(running_sum(), {"x": devices}, layouts, [torch.randn(32)], lambda a: a[:24].cumsum(0))
