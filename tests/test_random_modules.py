"""Random modules on random meshes: what is not refused has the result that one device has, and padding never shows."""

from collections import Counter

import pytest
from hypothesis import given

from tests.random_modules.check import run
from tests.random_modules.strategy import cases

COUNTS: Counter = Counter()


@pytest.fixture(scope="module", autouse=True)
def few_are_refused():
    """Refusing everything would never be wrong."""
    COUNTS.clear()
    yield
    assert COUNTS["refused"] <= 0.02 * sum(COUNTS.values())


@given(cases())
def test_distributed_as_on_one_device(case):
    outcome = run(case)
    COUNTS[outcome.verdict] += 1
    assert outcome.verdict != "wrong", f"{outcome.reason}\n{case}"
