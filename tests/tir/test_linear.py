"""Linear forms of index expressions."""

import numpy as np
import pytest
import tilelang  # noqa: F401  (brings the tvm below)
from tvm import tirx

from mesh_tensor.tir.linear import Linear, linear_form, vars_of

i, j, n = (tirx.Var(name, "int32") for name in "ijn")


def value(form, values):
    return form.const + sum(coefficient * values[var] for var, coefficient in form.terms.items())


@pytest.mark.parametrize(
    ("expr", "terms", "const"),
    [
        (i * 4 + j, {i: 4, j: 1}, 0),
        (3 * i - j * 2 + 7, {i: 3, j: -2}, 7),
        ((i + 2) * 5 - 10, {i: 5}, 0),
        (i - i, {}, 0),
        (tirx.IntImm("int32", 9), {}, 9),
        (i * 0, {}, 0),
        (tirx.Cast("int64", i) * 2, {i: 2}, 0),
    ],
    ids=str,
)
def test_linear_expressions(expr, terms, const):
    form = linear_form(expr, {})
    assert dict(form.terms) == terms
    assert form.const == const


@pytest.mark.parametrize(
    "expr", [i * j, i // 2, i % 4, tirx.Max(i, j), tirx.Cast("int32", tirx.Cast("float32", i))], ids=str
)
def test_what_is_not_linear(expr):
    assert linear_form(expr, {}) is None


def test_a_bound_variable_is_what_it_is_bound_to():
    row = tirx.Var("row", "int32")
    binds = {row: i * 8 + j}
    assert dict(linear_form(row * 2 + 1, binds).terms) == {i: 16, j: 2}
    assert vars_of([row + n], binds) == {i, j, n}
    assert vars_of([row + n], {}) == {row, n}


def test_arithmetic_agrees_with_evaluation():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = (Linear({v: int(c) for v in (i, j) if (c := rng.integers(-3, 4))}, int(rng.integers(9))) for _ in "ab")
        values = {v: int(x) for v, x in zip((i, j), rng.integers(-9, 9, 2), strict=True)}
        factor = int(rng.integers(-3, 4))
        assert value(a + b, values) == value(a, values) + value(b, values)
        assert value(a - b, values) == value(a, values) - value(b, values)
        assert value(a.scaled(factor), values) == factor * value(a, values)
        assert all((a + b).terms.values()), "zero coefficients are dropped"
        assert a.same_as(a + b - b)


def test_forms_compare_and_order_by_coefficient():
    form = linear_form(j + i * 8, {})
    assert form.ordered == ((i, 8), (j, 1))
    assert not form.same_as(form + Linear({}, 1))
