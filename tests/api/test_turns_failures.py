"""Calls that go on from a state, from several threads at once: one would be lost, so that it is refused."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from tests.api.models import Counted
from tests.api.pipeline.models import chain
from tests.refusals import refusal

MESHES = [{"x": 1}, {"x": 2}]


def in_another_thread(call):
    """What the call is refused with there."""
    found = []
    thread = threading.Thread(target=lambda: found.append(refusal(call)))
    thread.start()
    thread.join()
    return found[0]


def during(monkeypatch, owner, name, call):
    """What `call` is refused with in another thread, at every use of a method."""
    method, found = getattr(owner, name), []

    def interrupted(*args):
        found.append(in_another_thread(call))
        return method(*args)

    monkeypatch.setattr(owner, name, interrupted)
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_of_training(monkeypatch, mesh):
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.randint(0, 3, (6,))
    step = mt.training_step(model, F.cross_entropy, (x, y))
    run, alone = (mt.distribute_module(step, mesh, {"input": {"x": 0}}) for _ in range(2))
    saved = run.state_dict()
    for call, what in (
        (lambda: run(x, y), "a step of training"),
        (run.state_dict, "a state that is asked for"),
        (lambda: run.load_state_dict(saved), "a state that is loaded"),
    ):
        with monkeypatch.context() as patched:
            texts = during(patched, run._module, "step", call)
            assert torch.equal(run(x, y), alone(x, y))
        assert texts[0].startswith(f"{what}, while another thread's is under way")
        assert "make these calls from one thread" in texts[0]
    torch.testing.assert_close(run.state_dict(), alone.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("mesh", MESHES)
def test_modules_that_write(monkeypatch, mesh):
    model, x = Counted(), torch.randn(6, 4)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (x,))), mesh, {"x": {"x": 0}})
    texts = during(monkeypatch, run._state, "call", lambda: run(x))
    for _ in range(2):
        torch.testing.assert_close(run(x), model(x))
    assert all("a call of 'main', which goes on from what it wrote, while another" in text for text in texts)
    assert len(texts) == 2


def test_within_a_step():
    """The schedule is called when it is known which step comes next."""
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.randn(6, 3)
    texts = []

    def schedule(step):
        texts.extend(refusal(call) for call in calls)
        return 1.0

    step = mt.training_step(model, F.mse_loss, (x, y), schedule=schedule)
    run, alone = (mt.distribute_module(step, {"x": 2}, {"input": {"x": 0}}) for _ in range(2))
    calls = [lambda: run(x, y), lambda: run.load_state_dict({}), run.state_dict]
    loss = run(x, y)
    calls.clear()
    assert [alone(x, y), alone(x, y)] == [loss, run(x, y)]
    assert [text.partition("\n")[0] for text in texts] == [
        f"{what}, from within a step of training"
        for what in ("a step of training", "a state that is loaded", "a state that is asked for")
    ]


def test_within_the_rule_of_a_pipeline():
    module, _ = chain()
    run = mt.pipeline(module, {"m0": {"d": 1}, "m1": {"d": 1}}, ["layer1"], {}, microbatches=2, train=True)
    batch = torch.randn(6, 6), torch.randn(6, 6)
    loss = run(*batch)
    calls = (lambda: run(*batch), "a call of a pipeline"), (run.gradients, "gradients of a pipeline")
    for call, what in calls:
        text = refusal(lambda call=call: run.update(lambda weight, gradient, state: call()))
        assert text.startswith(f"{what}, from within the rule of an update")
    assert run(*batch) == loss


def test_copies_of_a_run():
    """A copy had the same parameters, and overwrote them."""
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    run = mt.distribute_module(mt.training_step(nn.Linear(4, 3), F.mse_loss, (x, y)), {"x": 1}, {})
    for made in (copy.copy, copy.deepcopy, pickle.dumps):
        text = refusal(lambda made=made: made(run))
        assert "a TrainingRun can't be copied or pickled" in text
        assert "distribute the step once more, and load the state_dict()" in text
