"""States of loops that go position by position, in variables: combined where they are states, else as on one device."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline

STEPS = 15
X = torch.randn(4, STEPS) * 3


def online(update, maximum=None, total=0.0):
    """`update` of a maximum and a sum by every element of a row, and what comes of them."""
    least = -T.infinity("float32") if maximum is None else maximum

    @T.prim_func
    def online_kernel(X: T.Tensor((4, STEPS), "float32"), E: T.Tensor((4, 2), "float32")):
        with T.Kernel(4, threads=32) as bx:
            m = T.alloc_local((1,), "float32")
            s = T.alloc_local((1,), "float32")
            other = T.alloc_local((1,), "float32")
            m[0] = least
            s[0] = total
            other[0] = 0.0
            for t in T.serial(STEPS):
                update(t, X[bx, t], m, s, other)
            E[bx, 0] = m[0]
            E[bx, 1] = s[0]

    return online_kernel


@T.macro
def _log_sum(t, x, m, s, other):
    other[0] = m[0]
    m[0] = T.max(m[0], x)
    s[0] = s[0] * T.exp(other[0] - m[0]) + T.exp(x - m[0])


@T.macro
def _weighted(t, x, m, s, other):
    other[0] = m[0]
    m[0] = T.max(m[0], x)
    s[0] = s[0] * T.exp2(other[0] - m[0]) + T.exp2(x - m[0]) * (x + T.cast(t, "float32"))


@T.macro
def _twice(t, x, m, s, other):
    other[0] = m[0]
    m[0] = T.max(m[0], x)
    for _ in T.serial(2):
        s[0] = s[0] * T.exp(other[0] - m[0]) + T.exp(x - m[0])


@T.macro
def _by_the_maximum_before(t, x, m, s, other):
    s[0] = s[0] * T.exp(T.min(m[0], 0.0)) + T.exp(x)
    m[0] = T.max(m[0], x)


@T.macro
def _by_the_element_before(t, x, m, s, other):
    m[0] = T.max(m[0], x)
    s[0] = s[0] + T.exp(other[0])
    other[0] = x


@T.macro
def _by_another_rate(t, x, m, s, other):
    other[0] = m[0]
    m[0] = T.max(m[0], x)
    s[0] = s[0] * T.exp(2.0 * (other[0] - m[0])) + T.exp(x - m[0])


@T.macro
def _of_maxima(t, x, m, s, other):
    m[0] = T.max(m[0], x)
    s[0] = s[0] + m[0]


@T.macro
def _every_other(t, x, m, s, other):
    other[0] = m[0]
    if t % 2 == 0:
        m[0] = T.max(m[0], x)
    s[0] = s[0] * T.exp(other[0] - m[0]) + T.exp(x - m[0])


@T.macro
def _of_squares(t, x, m, s, other):
    m[0] = T.max(m[0], x * x)
    s[0] = s[0] + x * T.cast(t, "float32")


@pytest.mark.parametrize("update", [_log_sum, _weighted, _of_squares])
@pytest.mark.parametrize("start", [{}, {"maximum": -1.0, "total": 2.0}])
def test_states(update, start):
    kernel = online(update, **start)
    with machine(1):
        assert outline(lowered(kernel, {"x": 4}, {"X": {"x": 1}}))[0].startswith("kernel(X")
        check(kernel, [X], _alone(kernel), [{"x": 4}])


@pytest.mark.parametrize(
    "update", [_twice, _by_the_maximum_before, _by_the_element_before, _by_another_rate, _of_maxima, _every_other]
)
def test_what_is_no_such_state(update):
    kernel = online(update, maximum=-1.0)
    with machine(1):
        check(kernel, [X], _alone(kernel), [{"x": 4}])


def test_rows_that_start_with_nothing():
    """-infinity less -infinity is NaN, as on one device."""
    x = X.clone()
    x[1, :6] = -torch.inf
    kernel = online(_log_sum)
    with machine(1):
        for devices in (2, 4, 20):
            compiled = mt.compile(mt.annotate(kernel, {"x": devices}, {"X": {"x": 1}}), target="interpret", poison=True)
            torch.testing.assert_close(compiled(x), _alone(kernel, x), equal_nan=True)


def _alone(kernel, x=X):
    result = torch.empty(4, 2)
    compile_for_cpu(kernel)(x, result)
    return result
