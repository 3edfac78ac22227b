"""T.print and T.device_assert: what they say, where they say it, and that nothing else changes."""

import re

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.lowering.pipeline import lower_kernel
from mesh_tensor.targets.cuda.kernel import cuda_source
from tests.lowering.support import local_kernels, outline
from tests.refusals import refusal

TARGETS = ("interpret", "c")


def row_sums(m, n, *, prints, block=4):
    """Sums of rows, in blocks of rows and of columns, printed in many places."""

    @T.prim_func
    def sums(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, block), threads=32) as bx:
            x = T.alloc_shared((block, 2), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.clear(total)
            for k in T.serial(T.ceildiv(n, 2)):
                T.copy(X[bx * block, k * 2], x)
                T.reduce_sum(x, total, dim=1, clear=False)
                if prints:
                    T.print(total, msg="so far")
                    T.print(k, msg="k")
            for i in T.Parallel(block):
                total[i] = total[i] * 2.0
            if prints:
                T.print(msg="done")
                T.print(total)
                T.print(x, msg="staging")
                T.print(X, msg="all")
                for i in T.serial(block):
                    T.print(bx * block + i, msg="row")
                    T.print(X[bx * block + i, 0] + 1.0, msg="first")
            T.copy(total, Y[bx * block])

    return sums


def lines(capsys, func, mesh, sharding, *inputs, target):
    """What a call prints, sorted, and what it gives."""
    kernel = mt.compile(mt.annotate(func, mt.Mesh(mesh), sharding), target=target)
    capsys.readouterr()
    result = kernel(*inputs)
    return sorted(capsys.readouterr().out.splitlines()), result


CASES = [
    ({"x": 1}, {}),
    ({"x": 2}, {"X": {"x": 0}, "Y": {"x": 0}}),
    ({"x": 3}, {"X": {"x": 0}, "Y": {"x": 0}}),
    ({"x": 2}, {"X": {"x": 1}}),
    ({"x": 2, "y": 2}, {"X": {"x": 0, "y": 1}, "Y": {"x": 0}}),
]


@pytest.mark.parametrize(("mesh", "sharding"), CASES)
def test_prints_change_neither_plan_nor_results(mesh, sharding, capsys):
    x = torch.rand(11, 7)
    plans = {}
    for prints in (False, True):
        func = mt.annotate(row_sums(11, 7, prints=prints), mt.Mesh(mesh), sharding)
        lowered = lower_kernel(func)
        plans[prints] = (str(lowered.rule), str(lowered.assignment.axes.keys()), outline(lowered), lowered.whole)
    assert plans[True] == plans[False]
    for target in TARGETS:
        _, result = lines(capsys, row_sums(11, 7, prints=True), mesh, sharding, x, target=target)
        torch.testing.assert_close(torch.as_tensor(result), 2 * x.sum(1))


@pytest.mark.parametrize(("mesh", "sharding"), CASES)
def test_both_targets_print_the_same(mesh, sharding, capsys):
    x = torch.randint(0, 99, (11, 7)).float()
    func = row_sums(11, 7, prints=True)
    ours, theirs = (lines(capsys, func, mesh, sharding, x, target=target)[0] for target in TARGETS)
    # Beyond the ends of blocks, staging buffers hold what their targets leave there.
    assert [line for line in ours if "staging" not in line] == [line for line in theirs if "staging" not in line]
    assert len(ours) == len(theirs) > 50


@pytest.mark.parametrize("target", TARGETS)
def test_positions_are_global_and_devices_named(target, capsys):
    x = torch.arange(77.0).reshape(11, 7)
    found, _ = lines(capsys, row_sums(11, 7, prints=True), {"x": 3}, CASES[2][1], x, target=target)
    elements = [re.fullmatch(r"\[x=(\d)\] all: X\[(\d+), (\d+)\] = ([\d.]+)", line) for line in found]
    printed = {tuple(map(float, m.groups())) for m in elements if m}
    assert printed == {(i // 4, i, j, 7 * i + j) for i in range(11) for j in range(7)}
    assert {f"[x={i // 4}] first: {7.0 * i + 1}" for i in range(11)} <= set(found)
    assert {f"[x={i // 4}] row: {i}" for i in range(11)} <= set(found)
    assert [line for line in found if "done" in line] == [f"[x={d}] done" for d in range(3)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_position_of_the_tile_says_so(target, capsys):
    @T.prim_func
    def copied(X: T.Tensor((10,), "float32"), Y: T.Tensor((10,), "float32")):
        with T.Kernel(5, threads=32) as bx:
            T.print(bx, msg="block")
            for i in T.Parallel(2):
                Y[bx * 2 + i] = X[bx * 2 + i]

    found, _ = lines(capsys, copied, {"x": 2}, {"X": {"x": 0}, "Y": {"x": 0}}, torch.rand(10), target=target)
    assert found == [f"[x={x}] block (position in this device's tile): {b}" for x in (0, 1) for b in range(3)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_buffer_that_holds_a_whole_split_dim(target, capsys):
    @T.prim_func
    def doubled(X: T.Tensor((9,), "float32"), Y: T.Tensor((9,), "float32")):
        with T.Kernel(1, threads=32):
            block = T.alloc_fragment((9,), "float32")
            T.copy(X, block)
            T.print(block, msg="b")
            for i in T.serial(9):
                T.print(block[i], msg="at")
            for i in T.Parallel(9):
                Y[i] = block[i] * 2.0

    x = torch.arange(9.0)
    found, y = lines(capsys, doubled, {"x": 2}, {"X": {"x": 0}, "Y": {"x": 0}}, x, target=target)
    assert torch.equal(torch.as_tensor(y), 2 * x)
    assert [line for line in found if "block" in line] == [f"[x={i // 5}] b: block[{i}] = {float(i)}" for i in range(9)]
    assert [line for line in found if "at" in line] == [f"[x={i // 5}] at: {float(i)}" for i in range(9)]


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_cut_leaves_behind_is_not_printed(target, capsys):
    @T.prim_func
    def normed(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(4, threads=32) as bx:
            row = T.alloc_fragment((1, 8), "float32")
            scratch = T.alloc_fragment((1, 8), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(X[bx, 0], row)
            for i, j in T.Parallel(1, 8):
                scratch[i, j] = row[i, j] * row[i, j]
            T.reduce_sum(scratch, total, dim=1)
            for i, j in T.Parallel(1, 8):
                row[i, j] = row[i, j] / total[i]
            T.print(scratch, msg="squares")
            T.print(total, msg="sum")
            T.copy(row, Y[bx, 0])

    x = torch.rand(4, 8)
    sharding = {"X": {"x": 1}, "Y": {"x": 1}}
    found, y = lines(capsys, normed, {"x": 2}, sharding, x, target=target)
    torch.testing.assert_close(torch.as_tensor(y), x / (x * x).sum(1, keepdim=True))
    kept = [float(line.rpartition(" ")[2]) for line in found if "sum: " in line]
    torch.testing.assert_close(torch.tensor(sorted(kept)), (x * x).sum(1).repeat(2).sort().values)
    assert not any("squares: " in line for line in found)
    assert sum("scratch: not kept past a collective" in line for line in found) == 8


def checked(m, limit, block=4):
    @T.prim_func
    def capped(X: T.Tensor((m,), "float32"), Y: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, block), threads=32) as bx:
            for i in T.serial(block):
                T.device_assert(X[bx * block + i] > limit, "too small")
                Y[bx * block + i] = X[bx * block + i]

    return capped


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_assertions_hold_or_raise_where_they_do_not(target, devices):
    sharding = {"X": {"x": 0}, "Y": {"x": 0}}
    kernel = mt.compile(mt.annotate(checked(12, 0.0), mt.Mesh({"x": devices}), sharding), target=target)
    x = torch.rand(12) + 1
    assert torch.equal(torch.as_tensor(kernel(x)), x)
    x[11] = -1.0
    message = refusal(kernel, x)
    assert "assertion does not hold: too small" in message
    assert devices == 1 or f"[x={11 // -(-12 // devices)}]" in message
    assert torch.equal(torch.as_tensor(kernel(x.abs())), x.abs())


@pytest.mark.parametrize("target", TARGETS)
def test_an_assertion_about_a_sum_is_about_all_of_it(target):
    @T.prim_func
    def total(X: T.Tensor((8,), "float32"), Y: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_fragment((8,), "float32")
            found = T.alloc_fragment((1,), "float32")
            T.copy(X, x)
            T.reduce_sum(x, found, dim=0)
            T.device_assert(found[0] == 36.0, "not 36")
            T.copy(found, Y)

    kernel = mt.compile(mt.annotate(total, mt.Mesh({"x": 2}), {"X": {"x": 0}}), target=target)
    assert float(torch.as_tensor(kernel(torch.arange(1.0, 9.0)))[0]) == 36.0
    with pytest.raises(mt.MeshTensorError, match="not 36"):
        kernel(torch.ones(8))


@pytest.mark.parametrize("target", TARGETS)
def test_assert_statements(target):
    @T.prim_func
    def counted(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=32) as bx:
            T.Assert(X[bx] == bx, "not in order")
            Y[bx] = X[bx]

    sharding = {"X": {"x": 0}, "Y": {"x": 0}}
    kernel = mt.compile(mt.annotate(counted, mt.Mesh({"x": 4}), sharding), target=target)
    kernel(torch.arange(8, dtype=torch.int32))
    with pytest.raises(mt.MeshTensorError, match="not in order"):
        kernel(torch.arange(8, dtype=torch.int32).flip(0))


def test_gpus_get_what_tilelang_prints():
    func = mt.annotate(row_sums(16, 8, prints=True), mt.Mesh({"x": 2}), {"X": {"x": 0}, "Y": {"x": 0}})
    (local,) = local_kernels(lower_kernel(func))
    source = cuda_source(local)
    assert 'debug_print_var("k", ' in source
    assert 'debug_print_msg("done")' in source
