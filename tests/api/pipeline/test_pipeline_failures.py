"""What a pipeline refuses: before anything runs, or by the stage and action where it happened."""

import copy
from functools import partial

import pytest
import torch

import mesh_tensor as mt
from mesh_tensor import MeshTensorError
from tests.api.pipeline.models import Net, batch, imported
from tests.refusals import refusal

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 2}}


@pytest.fixture(scope="module")
def module():
    return imported(Net(blocks=2), 2)


refused = partial(refusal, mt.pipeline)


@pytest.mark.parametrize(
    ("stages", "facts"),
    [
        (None, ["no stages are stated", "pass `stages`"]),
        (3.5, ["stages=3.5", 'give {"m0": ["embed", "blocks.0"]']),
        ([], ["stages=[]"]),
        (["blocks.5"], ["stage 0: there is no value 'blocks.5' in 'main'", "did you mean 'blocks.1"]),
        (["head.weight"], ["stage 0: 'head.weight' is a parameter, not a value that 'main' computes"]),
        ({"m0": ["blocks.0"], "m3": ["blocks.1"]}, ["no mesh is called 'm3'", "the topology has 'm0', 'm1'"]),
        ({"m0": ["blocks.0"]}, ["mesh 'm1' has no stage"]),
        ({"m0": ["blocks.0"], "m1": []}, ["stage 1 has no value"]),
        ({"m0": ["embed"], "m1": ["blocks.0", "embed"]}, ["'embed' is in stages 0 and 1"]),
        (
            {"m0": ["blocks.1"], "m1": ["embed"]},
            ["of stage 0 needs 'lv' of stage 1, which comes after it", "why: the cut is cyclic"],
        ),
        ({"embed": "m0", "blocks.0": "m2"}, ["'blocks.0' is assigned to 'm2', which is no mesh"]),
        ({"embed": ("m0", 0), "blocks.0": "m1"}, ["some values have a number of a stage, some have none"]),
        ({"embed": ("m0", 0), "blocks.0": ("m1", 0)}, ["stage 0 is on meshes 'm0', 'm1'"]),
    ],
)
def test_stages_that_can_not_be(module, stages, facts):
    message = refused(module, TOPOLOGY, stages)
    assert all(fact in message for fact in facts), message


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"microbatches": 0}, ["microbatches=0"]),
        ({"schedule": "2f2b"}, ["unknown schedule '2f2b'"]),
        ({"schedule": "1f1b"}, ["it has a backward", "take the schedule 'forward'"]),
        ({"train": True, "schedule": "forward"}, ["it has no backward", "take 1f1b"]),
        ({"train": True, "schedule": mt.Schedule.named("1f1b", 3, 2)}, ["it has 3 meshes, but there are 2"]),
        (
            {
                "train": True,
                "schedule": mt.Schedule.of(["1F0 1B0 1F1 1B1", "0F0 0F1 0B0 0B1"]),
                "stages": {"m0": ["embed"], "m1": ["blocks.0"]},
            },
            ["it has stage 0 on 'm1', but that is on 'm0'", "the schedule is made for other stages"],
        ),
        (
            {"train": True, "schedule": mt.Schedule.of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])},
            ["mesh 0 can't go on at its action 1, 0B0: it needs 1B0"],
        ),
        ({"train": True, "schedule": mt.Schedule.of(["0F0 0F1 0B0", "1F0 1F1 1B0 1B1"])}, ["0B1 is missing"]),
        ({"train": True, "schedule": "gpipe", "limit": 1}, ["mesh 0 can't run its action 1, 0F1, within 1"]),
        ({"train": ["tokens"]}, ["'tokens' is no weight that holds floats"]),
        ({"train": 3}, ["train=3", "give names of weights"]),
        ({"per_microbatch": [3]}, ["per_microbatch=[3]", "name values of submodules"]),
        ({"train": ["head.wieght"]}, ["there is no value 'head.wieght'"]),
        ({"train": True, "weights": {}}, ["there is nothing to train"]),
        ({"shardings": {"head.wieght": {"d": 0}}}, ["there is no value 'head.wieght'"]),
        ({"shardings": {"head.weight": {"e": 0}}}, ["unknown mesh axis 'e'"]),
        ({"shardings": 3}, ["the shardings are 3"]),
        (
            {"shardings": {"head.weight": {"d:(1)2": 0}}},
            ["'head.weight' is laid out by parts of an axis of mesh 'm1'", "as axes of its own"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(module, options, facts):
    options = {"stages": ["blocks.0"], "microbatches": 2, **options}
    message = refused(module, TOPOLOGY, **options)
    assert all(fact in message for fact in facts), message


def test_a_pipeline_is_not_copied(module):
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"])
    with pytest.raises(MeshTensorError, match="can't be pickled or copied"):
        copy.deepcopy(run)


def test_three_stages_on_two_meshes_have_no_named_schedule(module):
    assert "3 stages on 2 meshes" in refused(module, TOPOLOGY, ["embed", "blocks.0"], schedule="1f1b", train=True)


def test_batches_that_do_not_fit(module):
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], microbatches=3)
    with pytest.raises(
        MeshTensorError, match=r"(?s)a batch of 7 rows in 3 microbatches, but the module takes 2 rows.*3 x 2"
    ):
        run(*batch(7))
    with pytest.raises(MeshTensorError, match="input 'labels' has 5 rows, others 6"):
        run(batch(6)[0], batch(5)[1])
    with pytest.raises(MeshTensorError, match="1 arguments in order and none by name"):
        run(batch(6)[0])
    tokens, labels = batch(6)
    tokens[4, 1] = 11
    with pytest.raises(MeshTensorError, match="parameter 'tokens' has elements from 0 to 11"):
        run(tokens, labels)
    with pytest.raises(MeshTensorError, match="there are no gradients yet"):
        run.gradients()


def test_an_open_batch_that_leaves_microbatches_empty():
    run = mt.pipeline(imported(Net(blocks=1), 2, open_size=True), TOPOLOGY, ["embed"], microbatches=4)
    with pytest.raises(MeshTensorError, match="a batch of 3 rows in 4 microbatches leaves some without rows"):
        run(*batch(3))


def test_what_fails_on_one_mesh_ends_all_with_its_name(module, monkeypatch):
    from mesh_tensor.api.pipeline import rows as pipeline_rows

    def broken(row, here, action):
        if str(action) == "1B1":
            raise RuntimeError("out of luck")
        forward(row, here, action)

    forward = pipeline_rows._ACTIONS["B"]
    monkeypatch.setitem(pipeline_rows._ACTIONS, "B", broken)
    run = mt.pipeline(module, TOPOLOGY, ["blocks.0"], microbatches=4, train=True)
    with pytest.raises(MeshTensorError) as raised:
        run(*batch(8))
    assert str(raised.value) == "RuntimeError: out of luck\n  where: 1B1 (backward of stage 1) on mesh 'm1'"
    monkeypatch.undo()
    assert torch.isfinite(run(*batch(8)))


class Returns(torch.nn.Module):
    """Returns what a function makes of a linear layer's rows."""

    def __init__(self, function):
        super().__init__()
        self.fc = torch.nn.Linear(6, 6)
        self.function = function

    def forward(self, x):
        return self.function(self.fc(x))


def returning(function, **options):
    model = Returns(function)
    module = mt.from_torch(torch.export.export(model, (torch.randn(3, 6),)))
    return model, lambda: mt.pipeline(module, {"m0": {"d": 2}}, {"m0": ["fc"]}, microbatches=2, **options)


@pytest.mark.parametrize(
    ("function", "options", "facts"),
    [
        (lambda y: y.t(), {}, ["the first dim of the result", "is not the batch's", "microbatches=1"]),
        (lambda y: y - y.mean(0, keepdim=True), {}, ["(subtract) takes rows of the batch and", "made of all rows"]),
        (lambda y: y.softmax(0), {}, ["needs the batch's rows together"]),
        (lambda y: y.t().contiguous(), {}, ["the first dim of the result"]),
        (lambda y: y.sum(), {}, ["is a sum", "say reduction='sum'"]),
        (lambda y: y.mean(), {"reduction": "max"}, ["reduction='max'"]),
        (lambda y: y, {"train": True}, ["and no loss", "return one number of floats first"]),
    ],
)
def test_results_that_microbatches_do_not_make(function, options, facts):
    _, make = returning(function, **options)
    with pytest.raises(MeshTensorError) as raised:
        make()
    assert all(fact in str(raised.value) for fact in facts), raised.value


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda y: y.sum(), {"reduction": "sum", "train": True}),
        (lambda y: y.mean(), {"train": True}),
        (lambda y: y.mean(0), {}),
        (lambda y: y.softmax(1).reshape(-1), {}),
        (lambda y: (y.relu(), y.mean()), {}),
    ],
)
def test_results_that_they_do_make(function, options):
    model, make = returning(function, **options)
    run, x = make(), torch.randn(6, 6)
    wanted = model(x)
    torch.testing.assert_close(run(x), torch.utils._pytree.tree_map(torch.Tensor.detach, wanted))
    if options:
        weight, _ = torch.autograd.grad(wanted, [model.fc.weight, model.fc.bias])
        torch.testing.assert_close(next(iter(run.gradients().values())), weight, rtol=1e-5, atol=1e-5)
