"""Dims refined to atoms: what reshapes merge and split stays split."""

import math

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.plan.atoms import made_plain, plain_sharding

from .modules import Heads, function, kinds, planned


def test_heads_stay_split_through_the_merged_dim():
    plan = planned(Heads, {"x": 2}, {"w": {"x": 1}})
    values = {value.name: value for value in plan.graph.values()}
    assert plan.atoms.of[values["w"]] == ((12,), (4, 3))
    assert plan.atoms.of[values["merged"]] == ((2, 4), (6,), (3,))
    assert str(plan.layouts.of[values["merged"]]) == "S[1]"  # of (2, 4, 6, 3)
    assert kinds(plan) == []


@pytest.mark.parametrize("sharding", [{"w": {"x": 1}}, {"x": {"x": 0}}, {"x": {"x": 1}}, {"w": {"x": 0}}])
@pytest.mark.parametrize("parts", [2, 3])
def test_right_however_it_is_split(sharding, parts):
    run = mt.distribute_module(Heads, {"x": parts}, sharding)
    x, w = torch.randn(2, 6, 12), torch.randn(12, 12)
    torch.testing.assert_close(run(x, w), 2 * (x @ w))


def test_reshapes_that_do_not_fit_need_the_dims_whole():
    mod = function(lambda emit, x: emit(relax.op.reshape(emit(relax.op.exp(x)), (4, 6))), x=(6, 4))
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}})
    x = torch.randn(6, 4)
    torch.testing.assert_close(run(x), x.exp().reshape(4, 6))
    assert kinds(run.plan) == ["all_gather"]


def test_layouts_over_atoms_have_a_name_where_tiles_are_contiguous():
    mesh = mt.Mesh({"x": 2, "y": 2})
    whole, split = ((12,), (4, 3)), mt.Sharding.parse(mesh, 3, "S[0], S[1]")
    assert str(plain_sharding(split, whole)) == "S[0], S[1]"
    inner = mt.Sharding.parse(mesh, 3, "R, S[2]")
    assert plain_sharding(inner, whole) is None
    assert str(made_plain(inner, whole)) == "R, R"
    uneven = mt.Sharding.parse(mt.Mesh({"x": 3}), 3, "S[1]")
    assert plain_sharding(uneven, whole) is None


@pytest.mark.parametrize(
    ("atoms", "split", "named"),
    [
        ((2, 6), "S[0], S[1]", "S[0], S[0]"),
        ((2, 6), "S[1], S[0]", "S[0:1], S[0]"),  # the device's place along y comes first
        ((1, 2, 6), "S[1], S[2]", "S[0], S[0]"),
        ((4, 6), "S[0], S[1]", None),  # every device has parts of two of the first
        ((2, 3), "S[0], S[1]", None),  # uneven in every one of the first
    ],
)
def test_atoms_that_are_split_one_after_the_other_have_a_name(atoms, split, named):
    mesh = mt.Mesh({"x": 2, "y": 2})
    sharding = mt.Sharding.parse(mesh, len(atoms), split)
    plain = plain_sharding(sharding, (atoms,))
    assert (plain and str(plain)) == named
    if plain is not None:
        assert made_plain(sharding, (atoms,)) == sharding
        x = torch.arange(math.prod(atoms))
        taken_apart = mt.distribute(x.view(atoms), mesh, sharding).tiles()
        for tile, other in zip(mt.distribute(x, mesh, plain).tiles(), taken_apart, strict=True):
            assert torch.equal(tile, other.flatten())
