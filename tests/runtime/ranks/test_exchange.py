"""Collectives over gloo: the same bits as on the virtual mesh, for every pair of layouts, dtype and reduction."""

import math
from functools import partial

import pytest

from . import exchange_bodies as bodies
from .launcher import run

MESHES = [{"x": 2}, {"x": 4}, {"x": 2, "y": 2}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pair_of_layouts(mesh):
    run(partial(bodies.all_pairs, sizes=mesh), math.prod(mesh.values()))


@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_large_tensors_take_other_ways(mesh):
    run(partial(bodies.large_ones, sizes=mesh), math.prod(mesh.values()))


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}], ids=str)
def test_every_dtype_and_reduction(mesh):
    run(partial(bodies.all_dtypes_and_ops, sizes=mesh), math.prod(mesh.values()))


@pytest.mark.parametrize("mesh", [{"x": 3}, {"x": 2, "y": 2}], ids=str)
def test_windows(mesh):
    run(partial(bodies.to_windows, sizes=mesh), math.prod(mesh.values()))


def test_other_numbers_of_dims():
    run(partial(bodies.some_triples, sizes={"x": 2}), 2)


def test_in_place():
    run(partial(bodies.in_place, sizes={"x": 2, "y": 2}), 4)


def test_ranks_in_another_order():
    run(bodies.ranks_in_another_order, 4)


def test_part_of_a_device_mesh():
    run(bodies.part_of_a_device_mesh, 4)
