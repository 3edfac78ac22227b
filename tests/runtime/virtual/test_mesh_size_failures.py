"""Meshes of more devices than a process has tiles for, or a plan goes through: refused at once, by name."""

import pytest
import torch

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.plan.seed_modules import NESTED

ROWS = {"A": {"x": 0}}


@pytest.mark.parametrize(
    "use",
    [
        lambda x: mt.compile(mt.annotate(matmul(64, 64, 64), {"x": x}, ROWS), target="interpret"),
        lambda x: mt.simulate(mt.annotate(matmul(64, 64, 64), {"x": x}, ROWS)),
        lambda x: mt.distribute_module(NESTED, {"x": x}, ROWS),
        lambda x: mt.search(NESTED, devices=x),
        lambda x: mt.plan_transfer((8, 8), torch.float32, mt.Sharding.make({"y": 2}, 2, {"y": 0}), {"x": x}, {"x": 0}),
    ],
)
def test_plans(use):
    with pytest.raises(mt.MeshTensorError, match="a plan for 1,000,000,000 devices") as error:
        use(10**9)
    assert "fix: use a mesh of at most 1,048,576" in str(error.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, a: mt.distribute(a, {"x": x}, {"x": 0}),
        lambda x, a: mt.compile(mt.annotate(matmul(8, 8, 8, 8, 8, 8), {"x": x}, ROWS), target="interpret")(a, a),
    ],
)
def test_tiles_of_one_process(use):
    with pytest.raises(mt.MeshTensorError, match="a virtual mesh of 65,537 devices") as error:
        use(65537, torch.ones(8, 8))
    assert "fix: run on fewer; mt.simulate tells what as many take" in str(error.value)
