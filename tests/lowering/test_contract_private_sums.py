"""Clause 8: what every iteration of a T.Parallel sums in a loop of its own is completed before it is used, where
iterations know nothing of each other; else its dim stays whole. What is best of all positions may be kept beside sums,
in loops within a block, and by what an iteration computes."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.other_machines import machine

ROWS, COLUMNS = 6, 7
X = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def gathers(func, inputs, expected, split):
    """Whether a dim that is split is gathered by the kernel, having given the expected results on poisoned devices."""
    annotated = mt.annotate(func, mt.Mesh({"x": 3}), split)
    with machine(1):
        results = mt.compile(annotated, target="interpret", poison=True)(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    strict = "ok"
    try:
        mt.lower(annotated, strict=True)
    except mt.MeshTensorError as error:
        strict = str(error)
    assert strict == "ok" or "needs replication" in strict
    return strict != "ok"


@T.prim_func
def row_softmax(X: T.Tensor((ROWS, COLUMNS)), Y: T.Tensor((ROWS, COLUMNS))):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(3):
            largest = T.alloc_var("float32")
            total = T.alloc_var("float32")
            largest = -T.infinity("float32")
            total = 0.0
            for k in T.serial(COLUMNS):
                largest = T.max(largest, X[b * 3 + i, k])
            for k in T.serial(COLUMNS):
                total += T.exp(X[b * 3 + i, k] - largest)
            scale = 1.0 / total
            for k in T.serial(COLUMNS):
                Y[b * 3 + i, k] = T.exp(X[b * 3 + i, k] - largest) * scale


@T.prim_func
def squared_sums(X: T.Tensor((ROWS, COLUMNS)), Y: T.Tensor((8,))):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(4):
            total = T.alloc_var("float32")
            if b * 4 + i < ROWS:
                total = 0.0
                for k in T.serial(COLUMNS):
                    total += X[b * 4 + i, k]
                Y[b * 4 + i] = total * total


@T.prim_func
def scaled_in_place(X: T.Tensor((ROWS, COLUMNS))):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(3):
            total = T.alloc_var("float32")
            total = 0.0
            for k in T.serial(COLUMNS):
                total += X[b * 3 + i, k] * X[b * 3 + i, k]
            for k in T.serial(COLUMNS):
                X[b * 3 + i, k] = X[b * 3 + i, k] * T.rsqrt(total)


@T.prim_func
def ends_of_their_own(
    X: T.Tensor((ROWS, COLUMNS)), Ends: T.Tensor((ROWS,), "int32"), Z: T.Tensor((8,)), Y: T.Tensor((ROWS,))
):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(3):
            total = T.alloc_var("float32")
            total = 0.0
            end = Ends[b * 3 + i]
            for k in T.serial(COLUMNS):
                total += X[b * 3 + i, k]
            for k in T.serial(end):
                total = total * Z[k]
            Y[b * 3 + i] = total


@T.prim_func
def shares_under_a_condition(X: T.Tensor((ROWS, COLUMNS)), Y: T.Tensor((ROWS,))):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(3):
            share = T.alloc_var("int32")
            total = T.alloc_var("float32")
            if b > 0:
                share = 100 // b + i
                total = 0.0
                for k in T.serial(COLUMNS):
                    total += X[b * 3 + i, k] * T.cast(share, "float32")
                Y[b * 3 + i] = total * total


SHARES = torch.tensor([0, 0, 0, 100, 101, 102])
ENDS, Z = torch.tensor([3, 0, 8, 1, 5, 2]).int(), X[0, :1] + torch.arange(8.0)
PRODUCTS = torch.cat([torch.ones(1), Z.cumprod(0)])[ENDS]
BOTH = {"X": {"x": 1}, "Y": {"x": 1}}


@pytest.mark.parametrize(
    ("func", "inputs", "expected", "split"),
    [
        (row_softmax, [X], [X.softmax(1)], BOTH),
        (squared_sums, [X, torch.zeros(8)], [torch.cat([X.sum(1) ** 2, torch.zeros(2)])], {"X": {"x": 1}}),
        (ends_of_their_own, [X, ENDS, Z], [X.sum(1) * PRODUCTS], {"X": {"x": 1}}),
        (shares_under_a_condition, [X, torch.zeros(ROWS)], [(X.sum(1) * SHARES) ** 2], {"X": {"x": 1}}),
        (scaled_in_place, [X.clone()], [X * torch.rsqrt((X * X).sum(1, keepdim=True))], {"X": {"x": 1}}),
    ],
    ids=["softmax", "under_a_condition", "ends_of_their_own", "division", "in_place"],
)
def test_sums_of_iterations_are_completed(func, inputs, expected, split):
    assert not gathers(func, inputs, expected, split)


@T.prim_func
def as_far_as_the_row(X: T.Tensor((ROWS, COLUMNS)), Y: T.Tensor((ROWS,))):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(ROWS):
            total = T.alloc_var("float32")
            total = 0.0
            for k in T.serial(i + 1):
                total += X[i, k]
            Y[i] = total * total


@T.prim_func
def what_another_iteration_leaves(X: T.Tensor((ROWS, COLUMNS)), Y: T.Tensor((ROWS,))):
    with T.Kernel(1, threads=32):
        totals = T.alloc_shared((ROWS,), "float32")
        for i in T.Parallel(ROWS):
            totals[i] = 1.0
        for i in T.serial(ROWS):
            for _j in T.Parallel(1):
                total = T.alloc_var("float32")
                total = totals[T.max(i - 1, 0)]
                for k in T.serial(COLUMNS):
                    total += X[i, k]
                totals[i] = total * 0.5
        T.copy(totals, Y)


def left_by_others():
    before, found = torch.tensor(1.0), []
    for row in X:
        before = (before + row.sum()) * 0.5
        found.append(before)
    return torch.stack(found)


def test_what_is_not_an_iteration_s_own_stays_whole():
    assert gathers(what_another_iteration_leaves, [X], [left_by_others()], {"X": {"x": 1}})


def test_columns_that_no_row_reads_stay_where_they_are():
    """The others are handed on: every row ends elsewhere."""
    expected = torch.stack([X[i, : i + 1].sum() ** 2 for i in range(ROWS)])
    assert not gathers(as_far_as_the_row, [X], [expected], {"X": {"x": 1}})


@T.prim_func
def nearest(P: T.Tensor((4, 2)), Q: T.Tensor((COLUMNS, 2)), D: T.Tensor((4,)), At: T.Tensor((4,), "int32")):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(2):
            best = T.alloc_var("float32")
            at = T.alloc_var("int32")
            apart = T.alloc_var("float32")
            best = T.infinity("float32")
            at = -1
            for k in T.serial(COLUMNS):
                apart = 0.0
                for c in T.serial(2):
                    apart += (P[b * 2 + i, c] - Q[k, c]) * (P[b * 2 + i, c] - Q[k, c])
                if apart < best:
                    best = apart
                    at = k
            D[b * 2 + i] = best
            At[b * 2 + i] = at


def test_the_nearest_of_points_on_other_devices():
    p, q = X[:4, :2].contiguous(), torch.cat([X[:3, 2:4], X[:3, 2:4], X[3:4, 2:4]])  # the first of equals
    apart = ((p[:, None] - q[None]) ** 2).sum(2)
    expected = [
        apart.min(1).values,
        apart[:, [0, 1, 2, 6]].argmin(1).where(apart[:, :6].min(1).values <= apart[:, 6], 6),
    ]
    assert not gathers(nearest, [p, q], [expected[0], expected[1].int()], {"Q": {"x": 0}})


@T.prim_func
def statistics(
    X: T.Tensor((ROWS, COLUMNS)),
    Sum: T.Tensor((ROWS,)),
    Low: T.Tensor((ROWS,)),
    High: T.Tensor((ROWS,)),
    At: T.Tensor((ROWS,), "int32"),
    Positive: T.Tensor((ROWS,), "int32"),
):
    with T.Kernel(ROWS, threads=32) as b:
        total = T.alloc_var("float32")
        low = T.alloc_var("float32")
        high = T.alloc_var("float32")
        at = T.alloc_var("int32")
        positive = T.alloc_var("int32")
        total = 0.0
        low = T.infinity("float32")
        high = -T.infinity("float32")
        at = 0
        positive = 0
        for k in T.serial(COLUMNS):
            total += X[b, k]
            low = T.min(low, X[b, k])
            if X[b, k] > high:
                high = X[b, k]
                at = k
            if X[b, k] > 0.0:
                positive += 1
        Sum[b] = total
        Low[b] = low
        High[b] = high
        At[b] = at
        Positive[b] = positive


def test_the_best_beside_sums_and_counts():
    expected = [X.sum(1), X.min(1).values, X.max(1).values, X.argmax(1).int(), (X > 0).sum(1).int()]
    assert not gathers(statistics, [X], expected, {"X": {"x": 1}})


def best_in_blocks(apart):
    """The best of blocks of 4, position by position; `apart`: the inner loop goes through all of another tensor."""

    @T.prim_func
    def kernel(X: T.Tensor((3, 12)), High: T.Tensor((3,)), At: T.Tensor((3,), "int32")):
        with T.Kernel(3, threads=32) as b:
            high = T.alloc_var("float32")
            at = T.alloc_var("int32")
            block = T.alloc_shared((12 if apart else 4,), "float32")
            high = -T.infinity("float32")
            at = -1
            for ko in T.serial(3):
                T.copy(X[b, 0 if apart else ko * 4], block)
                for j in T.serial(12 if apart else 4):
                    if block[j] + X[b, ko * 4] > high:
                        high = block[j] + X[b, ko * 4]
                        at = ko * 4 + j
            High[b] = high
            At[b] = at

    return kernel


@pytest.mark.parametrize("apart", [False, True])
def test_the_best_of_loops_within_blocks(apart):
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    values = (x[:, None] if apart else x.view(3, 3, 4)) + x[:, ::4, None]
    high, at = values.flatten(1).max(1)
    at = at // 12 * 4 + at % 12 if apart else at
    assert gathers(best_in_blocks(apart), [x], [high, at.int()], {"X": {"x": 1}}) is apart


def kept_at_times(last):
    """A running best, kept beside what one position leaves: the best one's place, or the last one's above 0."""

    @T.prim_func
    def kernel(X: T.Tensor((ROWS, COLUMNS)), At: T.Tensor((ROWS,), "int32")):
        with T.Kernel(ROWS, threads=32) as b:
            high = T.alloc_var("float32")
            at = T.alloc_var("int32")
            high = -T.infinity("float32")
            at = -1
            for k in T.serial(COLUMNS):
                if X[b, k] > high:
                    high = X[b, k]
                if X[b, k] > (0.0 if last else high - 0.25):
                    at = k
            At[b] = at

    return kernel


@pytest.mark.parametrize("last", [False, True])
def test_what_is_kept_under_another_condition_is_handed_on(last):
    highs = X.cummax(1).values
    found = (X if last else X - highs + 0.25) > 0
    at = torch.where(found, torch.arange(COLUMNS), -1).max(1).values
    assert not gathers(kept_at_times(last), [X], [at.int()], {"X": {"x": 1}})


@T.prim_func
def one_row_a_block(X: T.Tensor((ROWS, COLUMNS)), Y: T.Tensor((ROWS, COLUMNS)), Mean: T.Tensor((ROWS,))):
    with T.Kernel(ROWS, threads=32) as b:
        row = T.alloc_fragment((1, COLUMNS), "float32")
        total = T.alloc_fragment((1,), "float32")
        mean = T.alloc_fragment((1,), "float32")
        T.copy(X[b, 0], row)
        T.reduce_sum(row, total, dim=1)
        for i in T.Parallel(1):
            mean[i] = total[i] / COLUMNS
            Mean[b + i] = mean[i]
        for i, j in T.Parallel(1, COLUMNS):
            row[i, j] -= mean[i]
        T.copy(row, Y[b, 0])


@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_one_row(dim):
    split = {"X": {"x": dim}, "Y": {"x": dim}, "Mean": {"x": 0 if dim == 0 else None}}
    mean = X.mean(1)
    assert not gathers(one_row_a_block, [X], [X - mean[:, None], mean], split)
