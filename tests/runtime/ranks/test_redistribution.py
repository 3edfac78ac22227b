"""Redistributions on gloo: the bits of the virtual mesh, DTensors in and out, and never more bytes than DTensor."""

import math
from functools import partial

import pytest

from . import redistribution_bodies as bodies
from .launcher import run

EVEN, UNEVEN = [(12,), (8, 4), (4, 8, 4)], [(7,), (5, 3), (3, 5, 2)]


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}], ids=str)
def test_every_pair_of_layouts(mesh):
    _check(mesh, EVEN + UNEVEN)


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_pairs_on_two_axes(shapes):
    mesh = {"x": 2, "y": 2}
    _check(mesh, shapes[:2])
    _check(mesh, shapes[2:], step=5)


def _check(mesh, shapes, step=1):
    before = partial(bodies.pairs, mesh, shapes, step)
    run(partial(bodies.every_pair, sizes=mesh), math.prod(mesh.values()), before=before)


@pytest.mark.parametrize("body", [bodies.ways_to_call, bodies.refusals], ids=lambda body: body.__name__)
def test_dtensors(body):
    run(body, 2)


def test_a_rank_dies():
    first, second = run(bodies.dies_meanwhile, 2)
    assert second is None
    assert "rank 1 has ended, hangs, or is not in this collective" in first
    assert "'S[0]' -> 'S[1]' of a tensor (4, 4) torch.float32" in first
    assert "mt.redistribute" in first


def test_layouts_that_torch_splits_otherwise():
    run(bodies.layouts_that_torch_splits_otherwise, 4)


@pytest.mark.parametrize(
    ("sizes", "shape", "step"),
    [
        ((2,), (4, 8, 4), 1),
        ((4,), (4, 8, 4), 1),
        ((2, 2), (8,), 1),
        ((2, 2), (4, 8), 1),
        ((2, 2), (8, 4, 8), 3),
        ((2, 3), (6, 12), 1),
        ((2, 3), (6, 12, 6), 3),
        ((2, 2, 2), (8, 16), 7),
        ((2, 2, 2), (8, 8, 16), 31),
    ],
    ids=str,
)
def test_never_more_bytes_than_dtensor(sizes, shape, step):
    (better,) = run(partial(bodies.dtensor_never_moves_less, sizes=sizes, shape=shape, step=step), 1, group=False)
    assert better > 0 or len(sizes) == 1
