"""Partial values: what is left partial, what completes it, what counts once, where the kernel is cut."""

import pytest
import tilelang.language as T

from kernels.matmul import matmul
from kernels.matmul_bias_gelu import matmul_bias_gelu

from .kernels import analysis, on_rows, reduction, why_blocked


def partial(found, param, dim=0):
    """The partial buffers of splitting a parameter's dim."""
    return {r.buffer.name: op for r, op in reduction(found, param, dim).partial.items()}


def test_a_split_k_leaves_the_accumulator_and_the_output_partial():
    found = analysis(matmul(64, 64, 64, 16, 16, 16))
    assert partial(found, "A", 1) == {"C_local": "sum", "C": "sum"}
    assert partial(found, "A", 0) == partial(found, "B", 1) == {}
    assert reduction(found, "A", 1).cut is None


def test_a_cast_needs_the_whole_value():
    found = analysis(matmul(64, 64, 64, 16, 16, 16, dtype="float16", accum_dtype="float32"))
    assert partial(found, "A", 1) == {"C_local": "sum"}
    assert reduction(found, "A", 1).cut == 2, "the copy that casts"


def test_an_accumulator_that_starts_as_something_counts_once():
    found = analysis(matmul_bias_gelu(64, 64, 64))
    k = reduction(found, "A", 1)
    assert k.cut == 3, "gelu comes fourth"
    assert [r.buffer.name for s in k.gated if s.top < k.cut for r in s.reads] == ["bias_shared"]


@pytest.mark.parametrize(
    ("reduce", "op", "starts"),
    [
        (T.reduce_sum, "sum", 1),
        (T.reduce_max, "max", 0),
        (T.reduce_min, "min", 0),
        (T.reduce_absmax, "max", 0),
    ],
)
def test_a_start_counts_once_unless_the_operation_is_idempotent(reduce, op, starts):
    @T.macro
    def body(A, B, a, b, bx):
        for i in T.Parallel(8):
            b[i] = 3.0
        reduce(a, b, dim=1, clear=False)

    found = analysis(on_rows(body))
    k = reduction(found, "A", 1)
    assert partial(found, "A", 1) == {"b": op, "B": op}
    assert len(k.gated) == starts


@pytest.mark.parametrize(("start", "gated"), [(0.0, 0), (1.0, 1)])
def test_a_neutral_start_needs_no_gate(start, gated):
    @T.macro
    def body(A, B, a, b, bx):
        for i in T.Parallel(8):
            b[i] = start
        T.reduce_sum(a, b, dim=1, clear=False)

    assert len(reduction(analysis(on_rows(body)), "A", 1).gated) == gated


def test_linear_uses_that_are_not_plain_copies_need_the_whole_value():
    @T.macro
    def body(A, B, a, b, bx):
        T.reduce_sum(a, b, dim=1)
        for i in T.Parallel(8):
            b[i] = b[i] + 1.0

    found = analysis(on_rows(body))
    assert reduction(found, "A", 1).cut is None, "adding continues the same sum"
    assert [len(s.values) for s in reduction(found, "A", 1).gated] == [1], "but only one device may add the 1"


@pytest.mark.parametrize("use", [lambda v: v * v, lambda v: T.exp(v), lambda v: T.max(v, 0.0), lambda v: v * 2.0])
def test_a_use_that_needs_the_whole_value_cuts_the_kernel(use):
    @T.macro
    def body(A, B, a, b, bx):
        T.reduce_sum(a, b, dim=1)
        for i in T.Parallel(8):
            b[i] = use(b[i])

    assert reduction(analysis(on_rows(body)), "A", 1).cut == 2


def test_another_operation_on_a_partial_value_cuts_too():
    @T.macro
    def body(A, B, a, b, bx):
        T.reduce_sum(a, b, dim=1)
        for i in T.Parallel(8):
            b[i] = T.max(b[i], 0.5)

    assert reduction(analysis(on_rows(body)), "A", 1).cut == 2


def test_two_operations_on_one_accumulator_block():
    @T.macro
    def body(A, B, a, b, bx):
        T.clear(b)
        T.reduce_sum(a, b, dim=1, clear=False)
        T.reduce_max(a, b, dim=1, clear=False)

    assert "b is combined by sum and by max over the same dim" in why_blocked(body)


def test_a_use_inside_the_loop_that_adds_blocks():
    @T.macro
    def body(A, B, a, b, bx):
        T.clear(b)
        for k in T.serial(48):
            for i in T.Parallel(8):
                b[i] = b[i] + a[i, k]
            for i in T.Parallel(8):
                a[i, k] = b[i]

    assert "inside the loop that is still adding to it" in why_blocked(body)
