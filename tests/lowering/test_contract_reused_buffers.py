"""Buffers on chip that hold all of a split dim in one place, and constants or another tensor's block in another: each
use gets a buffer of its own, and nothing is gathered."""

import pytest
import tilelang.language as T
import torch
import tvm
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.reused_buffers import with_own_buffers
from mesh_tensor.rules.kernel.sharding_rule import analyse
from mesh_tensor.tir.nodes import nodes
from tests.other_machines import AT_ONCE, planned_for

from .support import lowered, outline, run


@pytest.fixture(autouse=True)
def _no_start():
    """Collectives start at once, so that small tensors are worth them."""
    with planned_for(AT_ONCE):
        yield


def own(func):
    """The kernel with a buffer for each use; None if there are none."""
    analysis = analyse(normalize(func))
    return with_own_buffers(analysis.kernel, analysis.coordinates)


ROWS, COLUMNS, LENGTH = 8, 13, 24


@T.prim_func
def cleared(A: T.Tensor((COLUMNS, ROWS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")):
    """Zeros of which nothing is left."""
    with T.Kernel(ROWS // 4, threads=32) as bx:
        made = T.alloc_fragment((4, COLUMNS), "float32")
        T.clear(made)
        for n in T.serial(COLUMNS):
            for i in T.Parallel(4):
                made[i, n] = A[n, bx * 4 + i] * 2.0
        T.copy(made, Y[bx * 4, 0])


@T.prim_func
def counted(A: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")):
    """Ones that are counted, then a row."""
    with T.Kernel(ROWS, threads=32) as bx:
        row, total = T.alloc_fragment((COLUMNS,), "float32"), T.alloc_fragment((1,), "float32")
        T.fill(row, 1.0)
        T.reduce_sum(row, total, dim=0)
        T.copy(A[bx, 0], row)
        for j in T.Parallel(COLUMNS):
            row[j] = row[j] + total[0]
        T.copy(row, Y[bx, 0])


@T.prim_func
def staged(A: T.Tensor((LENGTH,), "float32"), E: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
    """Blocks of one tensor, then all of another."""
    with T.Kernel(1, threads=32) as bx:
        block, total = T.alloc_shared((8,), "float32"), T.alloc_fragment((1,), "float32")
        T.clear(total)
        for ko in T.serial(LENGTH // 8):
            T.copy(A[ko * 8], block)
            T.reduce_sum(block, total, dim=0, clear=False)
        T.copy(E, block)
        for i in T.Parallel(8):
            Y[i] = block[i] + total[0]


def of_staged(a, e):
    return e + a.sum()


@pytest.mark.parametrize(
    ("func", "layouts", "reference"),
    [
        (cleared, {"A": {"x": 0}, "Y": {"x": 1}}, lambda a: 2 * a.T),
        (counted, {"A": {"x": 1}, "Y": {"x": 1}}, lambda a: a + COLUMNS),
        (staged, {"E": {"x": 0}, "Y": {"x": 0}}, of_staged),
        (staged, {"A": {"x": 0}}, of_staged),
    ],
    ids=["cleared", "counted", "staged", "staged_blocks"],
)
@pytest.mark.parametrize("devices", [2, 3])
def test_nothing_is_gathered(func, layouts, reference, devices):
    steps = outline(lowered(func, {"x": devices}, layouts, strict=True))
    assert not any(step.startswith("all_gather") for step in steps), steps
    inputs = [b for b in func.buffer_map.values() if b.name != "Y"]
    tensors = [torch.randn(*map(int, buffer.shape)) for buffer in inputs]
    torch.testing.assert_close(run(func, {"x": devices}, layouts, *tensors), reference(*tensors))


def test_uses_get_buffers_of_their_own():
    @T.prim_func
    def expected(A: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")):
        with T.Kernel(ROWS, threads=32) as bx:
            row, total = T.alloc_fragment((COLUMNS,), "float32"), T.alloc_fragment((1,), "float32")
            row_1 = T.alloc_fragment((COLUMNS,), "float32")
            T.fill(row, 1.0)
            T.reduce_sum(row, total, dim=0)
            T.copy(A[bx, 0], row_1)
            for j in T.Parallel(COLUMNS):
                row_1[j] = row_1[j] + total[0]
            T.copy(row_1, Y[bx, 0])

    def plain(func):
        return [block.body for block in nodes(func.body, tirx.SBlock) if block.name_hint == "tilelang_root"][0]

    tvm.ir.assert_structural_equal(plain(own(counted)), plain(normalize(expected)), map_free_vars=True)


def test_buffers_with_one_use_stay():
    @T.prim_func
    def once(A: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")):
        with T.Kernel(ROWS, threads=32) as bx:
            row = T.alloc_fragment((COLUMNS,), "float32")
            T.clear(row)
            for j in T.Parallel(COLUMNS):
                row[j] += A[bx, j]
            T.copy(row, Y[bx, 0])

    assert own(once) is None


def test_what_conditions_use_stays():
    """Only stores and tile operations are told one by one which buffer they are to use."""

    @T.prim_func
    def asked(A: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")):
        with T.Kernel(ROWS, threads=32) as bx:
            row, total = T.alloc_fragment((COLUMNS,), "float32"), T.alloc_fragment((1,), "float32")
            T.fill(row, 1.0)
            T.clear(total)
            if row[0] > 0.0:
                T.fill(total, 2.0)
            T.copy(A[bx, 0], row)
            for j in T.Parallel(COLUMNS):
                Y[bx, j] = row[j] + total[0]

    assert own(asked) is None
    assert "row dim 0 holds the whole dim in one place" in mt.sharding_rule(asked).factors["n"]
    a = torch.randn(ROWS, COLUMNS)
    torch.testing.assert_close(run(asked, {"x": 2}, {"A": {"x": 1}, "Y": {"x": 1}}, a), a + 2)


def test_what_conditions_use_stays_where_statements_share_expressions():
    """One load in two statements is two uses."""

    @T.prim_func
    def asked(
        A: T.Tensor((ROWS, COLUMNS), "float32"),
        Y: T.Tensor((ROWS, COLUMNS), "float32"),
        P: T.Tensor((ROWS, 1), "float32"),
        Q: T.Tensor((ROWS, 1), "float32"),
    ):
        with T.Kernel(ROWS, threads=32) as bx:
            row, total = T.alloc_fragment((COLUMNS,), "float32"), T.alloc_fragment((1,), "float32")
            T.fill(row, 1.0)
            T.clear(total)
            P[bx, 0] = row[0]
            Q[bx, 0] = row[0]
            T.copy(A[bx, 0], row)
            if row[0] > 0.0:
                T.fill(total, 2.0)
            for j in T.Parallel(COLUMNS):
                Y[bx, j] = row[j] + total[0]

    loaded = []

    def with_first(stmt):
        if stmt.buffer.name not in "PQ":
            return None
        loaded.append(stmt.value)
        return tirx.BufferStore(stmt.buffer, loaded[0], stmt.indices)

    body = tirx.stmt_functor.ir_transform(asked.body, None, with_first, ["tirx.BufferStore"])
    assert len(loaded) == 2
    a = torch.randn(ROWS, COLUMNS)
    y, _, _ = run(asked.with_body(body), {"x": 2}, {"A": {"x": 1}, "Y": {"x": 1}}, a)
    torch.testing.assert_close(y, a + 2 * (a[:, :1] > 0))


def test_buffers_that_are_to_lie_in_some_way_stay():
    def counted_in(layout):
        @T.prim_func
        def func(A: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")):
            with T.Kernel(ROWS, threads=32) as bx:
                row, total = T.alloc_shared((COLUMNS,), "float32"), T.alloc_fragment((1,), "float32")
                if layout is not None:
                    T.annotate_layout({row: layout})
                T.fill(row, 1.0)
                T.reduce_sum(row, total, dim=0)
                T.copy(A[bx, 0], row)
                for j in T.Parallel(COLUMNS):
                    Y[bx, j] = row[j] + total[0]

        return func

    assert own(counted_in(None)) is not None
    assert own(counted_in(T.Layout((COLUMNS,), lambda i: i))) is None


@T.prim_func
def one_behind(A: T.Tensor((4, COLUMNS), "float32"), Y: T.Tensor((4, COLUMNS), "float32")):
    """Each row gets what the iteration before left in a buffer to which nothing was written before that."""
    with T.Kernel(1, threads=32) as bx:
        row = T.alloc_shared((COLUMNS,), "float32")
        for k in T.serial(4):
            for j in T.Parallel(COLUMNS):
                Y[k, j] = 5.0
            if k > 0:
                T.copy(row, Y[k, 0])
            T.copy(A[k, 0], row)


@pytest.mark.parametrize("layouts", [{"Y": {"x": 1}}, {"A": {"x": 0}}, {"A": {"x": 1}, "Y": {"x": 0}}])
@pytest.mark.parametrize("devices", [2, 3])
def test_what_an_iteration_before_left(layouts, devices):
    a = torch.randn(4, COLUMNS)
    expected = torch.cat([torch.full((1, COLUMNS), 5.0), a[:-1]])
    torch.testing.assert_close(run(one_behind, {"x": devices}, layouts, a), expected)
