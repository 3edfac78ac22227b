"""What is in the padding of blocks, and counts, is the same everywhere there, and is counted by itself; blocks that lie
inside a dim are loaded in the way in which the last one is."""

import numpy as np
import pytest
import tilelang.language as T
import torch

from kernels.padded import block_logsumexp, block_variance, fragment_layer_norm
from mesh_tensor.targets.interpreter import interpret
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

M, N, BLOCK = 6, 21, 8
COLUMNS = {"X": {"x": 1}}


def unsharded(func, *inputs):
    """What the kernel leaves in its last parameter, a row each."""
    result = np.zeros(M, "float32")
    interpret(func, [*(tensor.numpy() for tensor in inputs), result])
    return torch.from_numpy(result)


def steps_at_once(func, layouts=COLUMNS, mesh=4):
    with machine(1):
        return outline(lowered(func, {"x": mesh}, layouts, strict=True))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_sums_of_fragments(devices):
    func = fragment_layer_norm(M, N, length=16)
    layouts = {**COLUMNS, "weight": {"x": 0}, "bias": {"x": 0}, "Y": {"x": 1}}
    steps = steps_at_once(func, layouts, devices)
    assert [step.split("(")[0] for step in steps] == ["kernel", "all_reduce", "kernel", "all_reduce", "kernel"]
    x, weight, bias = torch.randn(M, N), torch.randn(N), torch.randn(N)
    with machine(1):
        found = run(func, {"x": devices}, layouts, x, weight, bias)
    torch.testing.assert_close(found, torch.layer_norm(x, (N,), weight, bias), rtol=1e-4, atol=1e-5)


def test_layer_norm_in_every_layout():
    inputs = torch.randn(M, N), torch.randn(N), torch.randn(N)
    with machine(1):
        check(fragment_layer_norm(M, N, length=16), inputs, torch.layer_norm(inputs[0], (N,), *inputs[1:]), [{"x": 3}])


@pytest.mark.parametrize("rows", [4, 6])
def test_logsumexp_in_every_layout(rows):
    x = torch.randn(rows, N)
    with machine(1):
        check(block_logsumexp(rows, N, block_N=BLOCK, block_M=2), [x], x.logsumexp(1))


def test_variance_in_every_layout():
    x = torch.randn(M, N)
    with machine(1):
        check(block_variance(M, N, block_N=BLOCK, block_M=2), [x], (x.var(1, correction=0), x.mean(1)))


@pytest.mark.parametrize("make", [block_logsumexp, block_variance])
def test_blocks_of_the_last_kind_need_no_borders(make):
    steps = steps_at_once(make(M, N, block_N=BLOCK, block_M=2), mesh=3)
    assert not any("all_gather" in step or "permute" in step for step in steps), steps


def in_fragment(value, then="sum", before=None):
    """`Y[m]` is what reduces the rows of what `value` makes of the elements of a fragment of 32 columns."""
    padded = 32

    @T.prim_func
    def kernel(X: T.Tensor((M, N), "float32"), W: T.Tensor((M,), "float32"), Y: T.Tensor((M,), "float32")):
        with T.Kernel(M // 2, threads=32) as row:
            x = T.alloc_fragment((2, padded), "float32")
            w = T.alloc_fragment((2,), "float32")
            total = T.alloc_fragment((2,), "float32")
            more = T.alloc_fragment((2,), "float32")
            T.copy(W[row * 2], w)
            T.copy(X[row * 2, 0], x)
            for i, j in T.Parallel(2, padded):
                x[i, j] = value(x[i, j], w[i], j)
            if before == "changed":
                for i in T.Parallel(2):
                    w[i] = w[i] * 3.0
            if then == "sum":
                T.reduce_sum(x, total, dim=1)
            if then == "max":
                T.reduce_max(x, total, dim=1)
            if then == "absmax":
                T.reduce_absmax(x, total, dim=1)
            if then == "abssum":
                T.reduce_abssum(x, total, dim=1)
            if before == "twice":
                T.reduce_max(x, more, dim=1)
                for i in T.Parallel(2):
                    total[i] = total[i] + more[i]
            if before == "negative":
                for i in T.Parallel(2):
                    total[i] = -total[i] + w[i]
            T.copy(total, Y[row * 2])

    return kernel


def centered(x, w, j):
    return (x - w) * (x - w)


def right_on_every_mesh(func, *inputs):
    with machine(1):
        check(func, inputs, unsharded(func, *inputs))


@pytest.mark.parametrize("op", ["sum", "max", "absmax", "abssum"])
def test_reductions(op):
    func = in_fragment(lambda x, w, j: x - w * 3.0, op)
    layouts = {**COLUMNS, "W": {}, "Y": {}}
    assert [step.split("(")[0] for step in steps_at_once(func, layouts)] == ["kernel", "all_reduce"]
    right_on_every_mesh(func, torch.randn(M, N), torch.randn(M))


@pytest.mark.parametrize("before", ["changed", "twice", "negative"])
def test_what_is_around_the_sum(before):
    """A number that is another one by the time of the sum; a block that is reduced twice; a sum that is used."""
    right_on_every_mesh(in_fragment(centered, before=before), torch.randn(M, N), torch.randn(M))


def test_positions_that_count():
    right_on_every_mesh(in_fragment(lambda x, w, j: x + w + j), torch.randn(M, N), torch.randn(M))
    right_on_every_mesh(
        in_fragment(lambda x, w, j: T.if_then_else(j < 30, x + w, w * 2.0)), torch.randn(M, N), torch.randn(M)
    )


def test_no_number_past_the_end():
    """What the padding has of a row of infinities is no number, in the whole kernel too."""
    x, w = torch.randn(M, N), torch.tensor([1.0, torch.inf, 0.5, -torch.inf, 2.0, 3.0])
    func = in_fragment(lambda x, w, j: x * w)
    expected = unsharded(func, x, w)
    assert expected.isnan().tolist() == [False, True, False, True, False, False]
    with machine(1):
        found = run(func, {"x": 3}, COLUMNS, x, w)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def by_blocks(load, scale="fixed"):
    """`Y[m]` sums what `load` leaves of blocks of columns, minus `W[m]`."""
    blocks = -(-N // BLOCK)

    @T.prim_func
    def kernel(X: T.Tensor((M, N), "float32"), W: T.Tensor((M,), "float32"), Y: T.Tensor((M,), "float32")):
        with T.Kernel(M // 2, threads=32) as row:
            staged = T.alloc_shared((2, BLOCK), "float32")
            x = T.alloc_fragment((2, BLOCK), "float32")
            w = T.alloc_fragment((2,), "float32")
            of_block = T.alloc_fragment((2,), "float32")
            total = T.alloc_fragment((2,), "float32")
            flag = T.alloc_var("float32")
            flag = 0.0
            T.copy(W[row * 2], w)
            T.clear(total)
            T.clear(staged)
            for k in T.serial(blocks):
                if k < blocks - 1 if load != "first" else k > 0:
                    if load != "late":
                        T.copy(X[row * 2, k * BLOCK], staged)
                    if load == "flag":
                        flag = T.cast(k, "float32") + 1.0
                    for i, j in T.Parallel(2, BLOCK):
                        x[i, j] = staged[i, j] * (2.0 if load == "twice" else 1.0)
                else:
                    for i, j in T.Parallel(2, BLOCK):
                        x[i, j] = T.if_then_else(
                            (j > 0) if load == "first" else (k * BLOCK + j < N), X[row * 2 + i, k * BLOCK + j], 0.0
                        )
                if load == "late":
                    T.copy(X[row * 2, k * BLOCK], staged)
                for i, j in T.Parallel(2, BLOCK):
                    x[i, j] = (x[i, j] - w[i]) * (x[i, j] - w[i])
                T.reduce_sum(x, of_block, dim=1)
                for i in T.Parallel(2):
                    total[i] = total[i] + of_block[i]
                if scale == "changes":
                    for i in T.Parallel(2):
                        w[i] = w[i] * 0.5
            for i in T.Parallel(2):
                total[i] = total[i] + flag
            T.copy(total, Y[row * 2])

    return kernel


@pytest.mark.parametrize("load", ["plain", "twice", "flag", "first", "late"])
def test_branches(load):
    """The first one leaves twice as much; sets a variable, too; is not taken for a block that others come after;
    takes what the iteration before loaded."""
    inputs = torch.randn(M, N), torch.randn(M)
    if load == "plain":
        assert [step.split("(")[0] for step in steps_at_once(by_blocks(load))] == ["kernel", "all_reduce"]
    right_on_every_mesh(by_blocks(load), *inputs)


def test_what_is_past_the_end_changes_from_block_to_block():
    right_on_every_mesh(by_blocks("plain", "changes"), torch.randn(M, N), torch.randn(M))


def test_another_value_outside():
    """What the first branch copies from outside is not what the second one says; nor is it 0 in what is reduced."""
    blocks = -(-N // BLOCK)

    @T.prim_func
    def kernel(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, 4), threads=32) as row:
            staged = T.alloc_shared((4, BLOCK), "float32")
            x = T.alloc_fragment((4, BLOCK), "float32")
            total = T.alloc_fragment((4,), "float32")
            T.annotate_safe_value({X: 7.0})
            T.clear(total)
            for k in T.serial(blocks):
                if k < blocks:
                    T.copy(X[row * 4, k * BLOCK], staged)
                    for i, j in T.Parallel(4, BLOCK):
                        x[i, j] = staged[i, j]
                else:
                    for i, j in T.Parallel(4, BLOCK):
                        x[i, j] = T.if_then_else(
                            T.And(row * 4 + i < M, k * BLOCK + j < N), X[row * 4 + i, k * BLOCK + j], 0.0
                        )
                T.reduce_sum(x, total, dim=1, clear=False)
            T.copy(total, Y[row * 4])

    right_on_every_mesh(kernel, torch.randn(M, N))
