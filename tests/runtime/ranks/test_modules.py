"""Modules on ranks: random ones and a model, bit for bit as on the virtual mesh."""

import math
from functools import partial

import pytest

from . import exported_bodies
from . import module_bodies as bodies
from .launcher import run


@pytest.mark.parametrize(("sizes", "least"), [((2,), 15), ((2, 2), 8)])
def test_random_modules(sizes, least):
    before = partial(bodies.modules_of, sizes, range(120))
    ran = run(partial(bodies.random_modules, sizes=sizes), math.prod(sizes), before=before)
    assert min(ran) >= least


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_a_model(sizes):
    run(partial(bodies.a_model, sizes=sizes), 2 if sizes == (2,) else 4)


def test_what_goes_to_other_places():
    assert min(run(partial(bodies.shifted, size=3), 3)) == 27 + 8


def test_computed_indices_out_of_range():
    """The second rank has them; the first one meets it when the rows are gathered."""
    first, second = run(bodies.indices_out_of_range, 2)
    assert "R.take: indices from 3 to 6 into a dim of 6" in second
    assert "rank 1 raised" in first
    assert "indices from 3 to 6 into a dim of 6" in first


def test_what_a_model_writes():
    run(bodies.a_cache, 2)


def test_other_sizes():
    run(bodies.other_sizes, 2)


def test_parts_of_an_axis():
    run(partial(bodies.sub_axes, size=4), 4)


def test_order_of_axes_and_manual_computations():
    for refusal in run(partial(bodies.order_and_manual, sizes=(2, 2)), 4):
        assert "a DTensor has no placements for 'S[0:1], S[0]'" in refusal
        assert "in the mesh's order" in refusal


def test_what_a_rank_exports():
    for said in run(exported_bodies.exported, 2):
        assert "constants differ between ranks: rank 0: digest" in said
