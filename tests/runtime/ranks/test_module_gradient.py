"""Gradients of modules on ranks."""

from functools import partial

import pytest

from . import module_gradient_bodies as bodies
from .launcher import run


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_lie_as_what_they_are_of(size):
    sums = run(partial(bodies.gradients, size=size), size)
    assert all(found == sums[0] for found in sums)


def test_refused_on_one_rank():
    run(partial(bodies.refused_on_one, size=2), 2)
