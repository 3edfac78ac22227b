"""What simulations know nothing of, they say."""

import pytest
import tilelang.language as T
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from tests.api.pipeline.models import Net, imported
from tests.plan.loop_modules import Loop, looped, recurrent

LOOP = Loop([(2, 8)], [(8, 8), (5, 2, 8)], [(2, 8)], recurrent)


@pytest.mark.parametrize(("by_data", "said"), [(False, 0), (True, 1)])
def test_how_often_loops_run_that_only_data_says(by_data, said):
    made = mt.simulate(mt.distribute_module(looped(LOOP, 5, by_data=by_data), {"x": 1}), "cpu")
    assert len(made.left_out) == said
    assert all(text.startswith("how often the steps of loop ") for text in made.left_out)
    assert str(made).count("  not simulated: ") == said


def test_how_often_loops_of_kernels_run_that_only_data_says():
    @T.prim_func
    def ragged(A: T.Tensor((8, 4)), N: T.Tensor((8,), "int32"), C: T.Tensor((8, 4))):
        with T.Kernel(8, threads=32) as bx:
            for i in T.serial(N[bx]):
                C[bx, i] = A[bx, i] * 2.0

    made = mt.simulate(mt.annotate(ragged, {"x": 1}, {}), "cpu")
    assert made.left_out == ("how often loops of kernel ragged run (N[bx]), which data says: they count as once",)


def test_what_training_does_beside_its_program():
    x, y = torch.randn(8, 6), torch.randint(5, (8,))
    step = mt.training_step(nn.Linear(6, 5), F.cross_entropy, (x, y), optimizer="sgd", lr=0.1)
    made = mt.simulate(mt.distribute_module(step, {"data": 2}, {"input": {"data": 0}}), "cpu")
    assert made.left_out == ("looking through what a step leaves for numbers that are not finite",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        ({"train": True}, ["the optimizer's update"]),
        (
            {"train": True, "memory": {"blocks.0": "pinned_host"}},
            [
                "values that are held in pinned_host, and their way there: as if they stayed on the device",
                "the optimizer's update",
            ],
        ),
    ],
)
def test_what_pipelines_do_beside_their_actions(options, said):
    run = mt.pipeline(imported(Net(), 4), {"m0": {"d": 1}, "m1": {"d": 1}}, ["blocks.1"], **options)
    made = mt.simulate(run, "cpu")
    assert list(made.left_out) == said
    assert str(made).count("  not simulated: ") == len(said)
