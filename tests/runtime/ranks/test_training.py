"""Training on ranks: bit for bit as on the virtual mesh, and saved by four ranks for three."""

from functools import partial

import pytest

from . import training_bodies as bodies
from .launcher import run


def test_as_on_the_virtual_mesh():
    """ZeRO-3 and many others are among random histories."""
    run(partial(bodies.as_on_the_virtual_mesh, size=3, zero=1, layout={"up.weight": {"data": 0}}), 3)


def test_a_gradient_that_is_not_finite_on_one_rank():
    run(partial(bodies.not_finite_on_one_rank, size=2), 2)


def test_parts_of_an_axis():
    run(partial(bodies.parts_of_an_axis, size=4), 4)


def test_saved_by_four_and_loaded_by_others(tmp_path):
    losses = run(partial(bodies.save, size=4, folder=str(tmp_path)), 4)
    assert len(set(losses)) == 1
    assert run(partial(bodies.load, size=4, folder=str(tmp_path)), 4) == losses
    assert run(partial(bodies.load, size=3, folder=str(tmp_path)), 3) == pytest.approx(losses[:3], abs=1e-6)
