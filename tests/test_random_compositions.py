"""Random compositions of what the planner knows: what `compile` does not refuse has the unsharded kernel's result."""

from collections import Counter

import pytest
from hypothesis import given, settings

from tests.random_compositions.strategy import cases
from tests.random_kernels.check import run

COUNTS: Counter = Counter()


@pytest.fixture(scope="module", autouse=True)
def few_are_refused():
    """Refusing everything would never be wrong."""
    COUNTS.clear()
    yield
    assert COUNTS["refused"] <= 0.05 * sum(COUNTS.values())


@settings(max_examples=settings.default.max_examples // 8)
@given(cases())
def test_sharded_as_unsharded(case):
    outcome = run(case)
    COUNTS[outcome.verdict] += 1
    assert outcome.verdict != "wrong", f"{outcome.reason}\n{case}"


@settings(max_examples=3)
@given(cases())
def test_compiled_as_unsharded(case):
    outcome = run(case, target="c")
    assert outcome.verdict != "wrong", f"{outcome.reason}\n{case}"
