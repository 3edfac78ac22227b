"""A sample of random sequences over gloo."""

from functools import partial

import pytest

from tests.runtime.ranks.launcher import run

from . import gloo_bodies as bodies


@pytest.mark.parametrize(("count", "sequences"), [(2, 10), (3, 6)])
def test_right_or_raised(count, sequences):
    for counts in run(partial(bodies.many, count=count, seed=count, sequences=sequences), count):
        assert counts["right"] >= sequences
        assert counts["refused"] > 0
