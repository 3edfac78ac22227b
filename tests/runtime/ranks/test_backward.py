"""Gradients of kernels on ranks."""

from functools import partial

import pytest

from . import backward_bodies as bodies
from .launcher import run


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_lie_as_what_they_are_of(size):
    run(partial(bodies.matmuls, size=size), size)


def test_gradients_that_ranks_add_to():
    run(partial(bodies.added_by_atomics, size=2), 2)


def test_local_tensors_have_none():
    run(partial(bodies.local_tensors, size=2), 2)
