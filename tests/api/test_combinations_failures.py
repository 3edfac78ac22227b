"""What is stated of states and does not hold, or can't be read."""

import pytest
import tilelang.language as T
from tvm import tirx

import mesh_tensor as mt
from kernels.combined import insert, largest_of_rows, one_pass_variance, welford
from tests.refusals import refusal


def _refused(kernel):
    return refusal(mt.compile, mt.annotate(kernel, {"x": 2}, {"A": {"x": 1}}), target="interpret")


def _added(before, after):
    return tuple(a + b for a, b in zip(before, after, strict=True))


def _without_the_distance_of_means(before, after):
    count, mean, _ = welford(before, after)
    return count, mean, before[2] + after[2]


def _the_other_way_round(before, after):
    count, mean, m2 = welford(before, after)
    return count, mean, m2 * 1.001 + before[1] * 0.01


@T.macro
def _the_last_of_equals(before, after):
    """Lists are merged as if those after came first."""
    for i in T.serial(4):
        for n in T.serial(3):
            insert(after[0], after[1], i, before[0][i, n], before[1][i, n], 3)
    T.copy(after[0], before[0])
    T.copy(after[1], before[1])


@T.macro
def _two_of_three(before, after):
    for i in T.serial(4):
        for n in T.serial(2):
            insert(before[0], before[1], i, after[0][i, n], after[1][i, n], 3)


@pytest.mark.parametrize("with_", [_added, _without_the_distance_of_means, _the_other_way_round])
def test_wrong_functions(with_):
    message = _refused(one_pass_variance(8, 64, with_))
    assert "the state 'count', 'mean', 'm2' is not combined by what mt.combine states" in message
    assert "kernel 'one_pass_variance_kernel'" in message
    assert "is off by" in message
    assert "the start has to be neutral" in message


@pytest.mark.parametrize("with_", [_the_last_of_equals, _two_of_three])
def test_wrong_macros(with_):
    message = _refused(largest_of_rows(8, 64, with_))
    assert "the state 'values', 'places' is not combined by what mt.combine states" in message


def test_a_start_that_counts():
    message = _refused(one_pass_variance(8, 64, start=2.0))
    assert "a part of the loop after the start is not that part's state: count is off by" in message


def test_results_that_do_not_fit():
    with pytest.raises(mt.MeshTensorError) as raised:
        one_pass_variance(8, 64, lambda before, after: before[:2])
    message = str(raised.value)
    assert "with_ returns 2 elements, the state has 3: 'count', 'mean', 'm2'" in message
    assert "combined.py:" in message  # the line


def test_buffers_of_several_shapes():
    message = refusal(lambda: _stated(lambda a, b, A: mt.combine(state=(a, b), with_=_added)))
    assert "'a' has the shape [4], 'b' [4, 2]" in message
    assert "T.macro" in message


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (lambda a, b, A: (a, a), "several buffers are named 'a'"),
        (lambda a, b, A: (a, A), "'A' is not on chip"),
        (lambda a, b, A: (a, 3), "3 is no buffer"),
        (lambda a, b, A: (), "no buffer is given"),
    ],
)
def test_what_is_no_state(state, expected):
    message = refusal(lambda: _stated(lambda a, b, A: mt.combine(state=state(a, b, A), with_=_added)))
    assert expected in message
    assert "mt.combine(state=(m, l), with_=function)" in message


def test_no_function():
    with pytest.raises(mt.MeshTensorError, match="with_ is 3, which is no function"):
        _stated(lambda a, b, A: mt.combine(state=a, with_=3))


def test_in_a_loop():
    with pytest.raises(mt.MeshTensorError, match="it is called in a loop or under a condition"):
        _stated(lambda a, b, A: mt.combine(state=a, with_=_added), loops=2)


def test_outside_of_a_kernel():
    with pytest.raises(mt.MeshTensorError, match="it is called outside of a kernel"):
        mt.combine(state=tirx.decl_buffer((4,), "float32", "a", scope="local.fragment"), with_=_added)


def _stated(call, loops=0):
    @T.prim_func
    def main(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            a = T.alloc_fragment((4,), "float32")
            b = T.alloc_fragment((4, 2), "float32")
            if loops:
                for _ in T.serial(loops):
                    call(a, b, A)
            else:
                call(a, b, A)
            T.clear(a)
            T.clear(b)
            T.copy(a, A[0])

    return main
