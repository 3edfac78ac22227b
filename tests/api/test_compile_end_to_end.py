"""Kernels in global view through lowering, collectives and the virtual mesh, against torch."""

import time

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.runtime.programs import accumulate_kernel, axpy_kernel, matmul_kernel

TARGETS = ["interpret", "c"]
MESH = mt.Mesh({"x": 2, "y": 2})


@pytest.fixture(params=TARGETS)
def target(request):
    return request.param


@pytest.mark.parametrize(
    ("shardings", "collectives"),
    [
        ({"A": {"x": 0}, "B": {"y": 1}, "C": {"x": 0, "y": 1}}, []),
        ({"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}, ["all_reduce"]),
        ({"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0, "y": 1}}, ["reduce_scatter"]),
    ],
    ids=["m_n", "k", "k_scattered"],
)
def test_matmul(target, shardings, collectives):
    kern = mt.compile(mt.annotate(matmul_kernel(40, 24, 56), MESH, shardings), target)
    assert [step.kind for step in kern.program.steps if hasattr(step, "kind")] == collectives
    a, b, out = torch.randn(40, 56), torch.randn(56, 24), torch.empty(40, 24)
    torch.testing.assert_close(kern(a, b), a @ b)
    torch.testing.assert_close(kern(a, b, out), a @ b)
    tiles = kern(mt.distribute(a, MESH, shardings["A"]), b)
    assert tiles.sharding.as_dict() == shardings["C"]
    torch.testing.assert_close(tiles.full(), a @ b)


def test_chained_matmuls_gather_nothing_between_them(target):
    """Columns of the first weight and rows of the second: one all-reduce, at the end."""
    mesh = mt.Mesh({"x": 2})
    up = mt.compile(mt.annotate(matmul_kernel(8, 32, 16), mesh, {"A": {}, "B": {"x": 1}, "C": {"x": 1}}), target)
    down = mt.compile(mt.annotate(matmul_kernel(8, 16, 32), mesh, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}), target)
    steps = [step.kind for kern in (up, down) for step in kern.program.steps if hasattr(step, "kind")]
    assert steps == ["all_reduce"]
    x, w1, w2 = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32, 16)
    hidden = up(mt.distribute(x, mesh, {}), mt.distribute(w1, mesh, {"x": 1}))
    assert str(hidden.sharding) == "S[1]"
    result = down(hidden, mt.distribute(w2, mesh, {"x": 0}))
    torch.testing.assert_close(result.full(), x @ w1 @ w2)


def test_scalars(target):
    kern = mt.compile(mt.annotate(axpy_kernel(10), MESH, {"A": {"x": 0, "y": 0}, "B": {"x": 0, "y": 0}}), target)
    a = torch.randn(10)
    torch.testing.assert_close(kern(a, 2.5, 3), 2.5 * a + 3)


@pytest.mark.parametrize("layout", [{}, {"x": 0}, {"x": 0, "y": 0}], ids=str)
def test_in_place(target, layout):
    kern = mt.compile(mt.annotate(accumulate_kernel(10), MESH, {"A": layout, "B": layout}), target)
    a, b = torch.randn(10), torch.randn(10)
    expected = a + b
    assert kern(a, b) is b
    torch.testing.assert_close(b, expected)


def test_symbolic_dims(target):
    rows = T.dynamic("rows")

    @T.prim_func
    def row_sums(A: T.Tensor((rows, 16), "float32"), B: T.Tensor((rows,), "float32")):
        with T.Kernel(T.ceildiv(rows, 8), threads=128) as bx:
            block = T.alloc_fragment((8, 16), "float32")
            total = T.alloc_fragment((8,), "float32")
            T.copy(A[bx * 8, 0], block)
            T.reduce_sum(block, total, dim=1)
            T.copy(total, B[bx * 8])

    kern = mt.compile(mt.annotate(row_sums, MESH, {"A": {"x": 0, "y": 1}, "B": {"x": 0}}), target)
    for length in (16, 9, 1, 16):
        a = torch.randn(length, 16)
        torch.testing.assert_close(kern(a), a.sum(1))


def test_a_device_holds_its_tiles_and_nothing_global(target):
    """k is split over 4 devices: a quarter of A and of B, and a whole partial C."""
    mesh = mt.Mesh({"x": 4})
    func = mt.annotate(matmul_kernel(16, 32, 64), mesh, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    kern = mt.compile(func, target)
    kern(torch.randn(16, 64), torch.randn(64, 32))
    assert kern.peak_bytes == 4 * (16 * 64 // 4 + 64 * 32 // 4 + 16 * 32)


def test_explain_reads_the_program():
    kern = mt.compile(mt.annotate(matmul_kernel(16, 16, 16), MESH, {"A": {"y": 1}, "B": {"y": 0}}), "interpret")
    assert "all_reduce" in kern.explain()


def test_looking_at_a_kernel_takes_as_long_on_65536_devices():
    """One device says what all of them run; what each needs is made ready when they run."""
    layouts, times = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}, []
    for rows in (2, 4096):
        func = mt.annotate(matmul(8192, 8192, 8192), mt.Mesh({"x": rows, "y": 16}), layouts)
        start = time.process_time()
        kernel = mt.compile(func, target="c")
        times.append(time.process_time() - start)
        assert kernel.program.mesh.num_devices == 16 * rows
    assert times[1] < 5 * times[0] + 1.0
