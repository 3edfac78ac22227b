"""Clause 9: dims that loops walk and that data index besides, as the scores of which one is the label's."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.cross_entropy import labelled_cross_entropy, labelled_cross_entropy_reference
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline

MESHES = [{"x": 3}, {"x": 2, "y": 2}]


@pytest.fixture(autouse=True)
def _no_start():
    """Collectives start at once, so that small tensors are split."""
    with machine(1):
        yield


def test_classes_that_are_split_take_three_numbers_a_row():
    made = lowered(labelled_cross_entropy(8, 12), {"x": 2}, {"logits": {"x": 1}, "d_logits": {"x": 1}}, strict=True)
    reduced = [step for step in outline(made) if step.startswith("all_reduce")]
    assert len(reduced) == 3
    assert not [step for step in outline(made) if step.startswith("all_gather")]


def test_cross_entropy_in_every_layout():
    scores, labels = torch.randn(8, 12), torch.tensor([3, -1, 0, 11, 5, -1, 7, 7], dtype=torch.int32)
    expected = labelled_cross_entropy_reference(scores, labels)
    check(labelled_cross_entropy(8, 12), [scores, labels], expected, MESHES)


def test_a_table_that_is_looked_up_and_measured():
    """Rows that ids name, and the length of every row: with rows split, what was looked up is summed."""

    @T.prim_func
    def kernel(E: T.Tensor((12, 6)), Id: T.Tensor((5,), "int32"), Y: T.Tensor((5, 6)), N: T.Tensor((12,))):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(5, 6):
                Y[i, j] = E[Id[i], j] * 2.0
            total = T.alloc_fragment((12,), "float32")
            T.clear(total)
            for j in T.serial(6):
                for i in T.Parallel(12):
                    total[i] += E[i, j] * E[i, j]
            T.copy(total, N)

    table, ids = torch.randn(12, 6), torch.randint(0, 12, (5,), dtype=torch.int32)
    check(kernel, [table, ids], (table[ids.long()] * 2, (table * table).sum(1)), MESHES)
    steps = outline(lowered(kernel, {"x": 3}, {"E": {"x": 0}, "N": {"x": 0}}, strict=True))
    assert steps == ["kernel(E, Id, Y, N)", "all_reduce(Y, sum, x)"]


def test_bins_that_start_at_zero():
    @T.prim_func
    def kernel(V: T.Tensor((20,), "int32"), H: T.Tensor((12,), "int32"), Twice: T.Tensor((12,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(12):
                H[i] = 0
            for i in T.serial(20):
                T.atomic_add(H[V[i]], 1)
            for i in T.Parallel(12):
                Twice[i] = H[i] * 2

    values = torch.randint(0, 12, (20,), dtype=torch.int32)
    counts = values.bincount(minlength=12).int()
    check(kernel, [values], (counts, counts * 2), MESHES)
    steps = outline(lowered(kernel, {"x": 3}, {"H": {"x": 0}, "Twice": {"x": 0}}, strict=True))
    assert steps == ["kernel(V, H, Twice)"]


def permuted():
    """What is written goes where data say, from where the loop is."""

    @T.prim_func
    def kernel(P: T.Tensor((12,), "int32"), A: T.Tensor((12,), "float32"), Z: T.Tensor((12,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(12):
                Z[i] = A[i]
            for i in T.serial(12):
                Z[P[i]] += A[i]

    return kernel, lambda p, a: a.clone().index_add_(0, p, a)


def taken():
    """What is read comes from where data say, to where the loop is."""

    @T.prim_func
    def kernel(P: T.Tensor((12,), "int32"), A: T.Tensor((12,), "float32"), Z: T.Tensor((12,), "float32")):
        with T.Kernel(12, threads=32) as i:
            Z[i] = A[i]
            Z[i] = Z[i] + A[P[i]]

    return kernel, lambda p, a: a + a[p]


def taken_in_a_loop_over_it():
    """What data say is taken once for every place of the dim itself."""

    @T.prim_func
    def kernel(P: T.Tensor((12,), "int32"), A: T.Tensor((12,), "float32"), Z: T.Tensor((12,), "float32")):
        with T.Kernel(1, threads=32):
            total = T.alloc_fragment((12,), "float32")
            T.clear(total)
            for i in T.serial(12):
                total[0] += A[i]
                for q in T.serial(12):
                    total[q] += A[P[q]]
            T.copy(total, Z)

    return kernel, lambda p, a: 12 * a[p] + torch.cat([a.sum()[None], torch.zeros(11)])


@pytest.mark.parametrize("case", [permuted, taken, taken_in_a_loop_over_it])
def test_a_statement_that_walks_the_dim_is_not_where_data_say(case):
    func, reference = case()
    places, values = torch.randint(0, 12, (12,), dtype=torch.int32), torch.randn(12)
    check(func, [places, values], reference(places.long(), values), [*MESHES, {"x": 4}])


def test_a_maximum_with_what_was_looked_up():
    """A running maximum is no sum of what one device has."""

    @T.prim_func
    def kernel(L: T.Tensor((8, 12)), Label: T.Tensor((8,), "int32"), M: T.Tensor((8,)), Y: T.Tensor((8,))):
        with T.Kernel(8, threads=32) as b:
            largest = T.alloc_var("float32")
            largest = -1e30
            for j in T.serial(12):
                largest = T.max(largest, L[b, j])
            M[b] = largest
            Y[b] = T.max(largest, L[b, Label[b]] * 2.0)

    scores, labels = torch.randn(8, 12), torch.randint(0, 12, (8,), dtype=torch.int32)
    largest = scores.amax(1)
    expected = largest, torch.maximum(largest, 2 * scores[torch.arange(8), labels.long()])
    check(kernel, [scores, labels], expected, MESHES)
    assert mt.sharding_rule(kernel).factors["m"] == "parallel"


def test_what_variables_are_bound_to_is_looked_up_where_it_is_used():
    """`s = L[b, label]` before the statements that use it; rows that an id names, which is bound, too."""

    @T.prim_func
    def kernel(L: T.Tensor((8, 12)), Label: T.Tensor((8,), "int32"), M: T.Tensor((8,)), Y: T.Tensor((8,))):
        with T.Kernel(8, threads=32) as b:
            label = Label[b]
            largest = T.alloc_var("float32")
            largest = -1e30
            for j in T.serial(12):
                largest = T.max(largest, L[b, j])
            M[b] = largest
            s = L[b, label]
            if label > 3:
                Y[b] = s - largest
            else:
                Y[b] = s * s

    scores, labels = torch.randn(8, 12), torch.randint(0, 12, (8,), dtype=torch.int32)
    largest, own = scores.amax(1), scores[torch.arange(8), labels.long()]
    check(kernel, [scores, labels], (largest, torch.where(labels > 3, own - largest, own * own)), MESHES)
    assert str(mt.sharding_rule(kernel)) == "L[m, k], Label[m] -> M[m], Y[m]; m parallel; k max, sum"


def test_what_is_bound_is_not_read_again_where_it_is_written():
    @T.prim_func
    def kernel(E: T.Tensor((12,)), Id: T.Tensor((5,), "int32"), Y: T.Tensor((5,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(5):
                at = Id[i]
                before = E[at]
                E[at] = before + 1.0
                Y[i] = before

    values, ids = torch.randn(12), torch.tensor([3, 3, 1, 3, 0], dtype=torch.int32)
    after, seen = values.clone(), torch.zeros(5)
    for i, at in enumerate(ids.tolist()):
        seen[i] = after[at]
        after[at] += 1
    for mesh in MESHES:
        for layouts in ({"E": {"x": 0}}, {"E": {"x": 0}, "Y": {"x": 0}}, {"Id": {"x": 0}, "Y": {"x": 0}}):
            made = mt.compile(mt.annotate(kernel, mesh, layouts), target="interpret", poison=True)
            torch.testing.assert_close(made(values.clone(), ids, torch.zeros(5)), (after, seen))


def test_rows_of_two_tables_may_be_on_different_devices():
    @T.prim_func
    def kernel(
        L: T.Tensor((6, 12)),
        M: T.Tensor((6, 12)),
        First: T.Tensor((6,), "int32"),
        Second: T.Tensor((6,), "int32"),
        Y: T.Tensor((6,)),
        D: T.Tensor((6, 12)),
    ):
        with T.Kernel(6, threads=32) as b:
            for j in T.Parallel(12):
                D[b, j] = L[b, j] + M[b, j]
            Y[b] = L[b, First[b]] * M[b, Second[b]]

    tables, (first, second) = torch.randn(2, 6, 12), torch.randint(0, 12, (2, 6), dtype=torch.int32)
    taken = [table[torch.arange(6), at.long()] for table, at in zip(tables, (first, second), strict=True)]
    check(kernel, [*tables, first, second], (taken[0] * taken[1], tables.sum(0)), [{"x": 2}, {"x": 3}])


def written_at_another_place():
    @T.prim_func
    def kernel(L: T.Tensor((6, 12)), P: T.Tensor((6,), "int32"), Q: T.Tensor((6,), "int32"), D: T.Tensor((6, 12))):
        with T.Kernel(6, threads=32) as b:
            for j in T.Parallel(12):
                D[b, j] = L[b, j]
            D[b, Q[b]] = L[b, P[b]]

    return kernel, lambda x, p, q: x.scatter(1, q, x.gather(1, p))


def written_later():
    @T.prim_func
    def kernel(L: T.Tensor((6, 12)), P: T.Tensor((6,), "int32"), Q: T.Tensor((6,), "int32"), D: T.Tensor((6, 12))):
        with T.Kernel(6, threads=32) as b:
            taken = T.alloc_var("float32")
            for j in T.Parallel(12):
                D[b, j] = L[b, j]
            taken = L[b, P[b]]
            D[b, Q[b]] = taken

    return kernel, lambda x, p, q: x.scatter(1, q, x.gather(1, p))


def written_at_the_same_place():
    @T.prim_func
    def kernel(L: T.Tensor((6, 12)), P: T.Tensor((6,), "int32"), Q: T.Tensor((6,), "int32"), D: T.Tensor((6, 12))):
        with T.Kernel(6, threads=32) as b:
            for j in T.Parallel(12):
                D[b, j] = L[b, j]
            D[b, P[b]] += L[b, P[b]] * 3.0

    return kernel, lambda x, p, q: x.scatter_add(1, p, 3 * x.gather(1, p))


def the_sum_written():
    @T.prim_func
    def kernel(L: T.Tensor((6, 12)), P: T.Tensor((6,), "int32"), Q: T.Tensor((6,), "int32"), D: T.Tensor((6, 12))):
        with T.Kernel(6, threads=32) as b:
            total = T.alloc_var("float32")
            total = 0.0
            for j in T.serial(12):
                total += L[b, j]
            for j in T.Parallel(12):
                D[b, j] = L[b, j]
            T.atomic_add(D[b, Q[b]], total)

    return kernel, lambda x, p, q: x.scatter_add(1, q, x.sum(1, keepdim=True))


@pytest.mark.parametrize("case", [written_at_another_place, written_later, written_at_the_same_place, the_sum_written])
def test_what_is_written_where_data_say_is_whole_there(case):
    """One device has the place: it needs all of the value, not its own part."""
    func, reference = case()
    table, (p, q) = torch.randn(6, 12), torch.randint(0, 12, (2, 6), dtype=torch.int32)
    check(func, [table, p, q], reference(table, p.long()[:, None], q.long()[:, None]), [{"x": 2}, {"x": 3}])
