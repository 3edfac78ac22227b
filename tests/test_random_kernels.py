"""Random kernels on random meshes: what `compile` does not refuse has the unsharded kernel's result."""

from collections import Counter

import pytest
from hypothesis import given, settings

from tests.random_kernels.check import run
from tests.random_kernels.programs import program_cases
from tests.random_kernels.strategy import cases, relaid

COUNTS: Counter = Counter()


@pytest.fixture(scope="module", autouse=True)
def few_are_refused():
    """Refusing everything would never be wrong."""
    COUNTS.clear()
    yield
    assert COUNTS["refused"] <= 0.05 * sum(COUNTS.values())


def check(case):
    """Most of a case's time is TileLang's, which reads the source: every kernel is run in two layouts."""
    for laid_out in (case, relaid(case)):
        outcome = run(laid_out)
        COUNTS[outcome.verdict] += 1
        assert outcome.verdict != "wrong", f"{outcome.reason}\n{laid_out}"


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(cases())
def test_sharded_as_unsharded(case):
    check(case)


@settings(max_examples=12)
@given(cases())
def test_compiled_as_unsharded(case):
    outcome = run(case, target="c")
    assert outcome.verdict != "wrong", outcome.reason


@settings(max_examples=settings.default.max_examples // 5)
@given(program_cases())
def test_programs_sharded_as_unsharded(case):
    check(case)


@settings(max_examples=8)
@given(program_cases())
def test_programs_compiled_as_unsharded(case):
    outcome = run(case, target="c")
    assert outcome.verdict != "wrong", outcome.reason
