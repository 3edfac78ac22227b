"""Random kernels in two styles: over tiles, what is not refused has the result that the kernel has on one device."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.random_kernels.check_tiles import run
from tests.random_kernels.over_tiles import make_tiles_case

CASES = st.integers(0, 2**40).map(make_tiles_case)
COUNTS: Counter = Counter()


@pytest.fixture(scope="module", autouse=True)
def few_are_refused():
    """Refusing everything would never be wrong. Tiles of one element are refused now and then."""
    COUNTS.clear()
    yield
    assert COUNTS["refused"] <= 0.2 * sum(COUNTS.values())


@given(CASES)
@example(make_tiles_case(473925))
def test_both_styles_as_on_one_device(case):
    outcome = run(case)
    if not case.forgot:
        COUNTS[outcome.verdict] += 1
    assert outcome.verdict != "wrong", outcome.reason


@settings(max_examples=10)
@given(CASES)
def test_compiled(case):
    outcome = run(case, target="c")
    assert outcome.verdict != "wrong", outcome.reason
