"""Pipelines called as their models are: with nested inputs, by name, submodules used twice; scaled losses, threads."""

import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor import MeshTensorError
from mesh_tensor.api.pipeline.rows import Row
from tests.refusals import refusal

from .models import Net, batch, imported

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 1}}
TWO = {"m0": {"d": 1}, "m1": {"d": 1}}


class Towers(nn.Module):
    """One tower on both of a pair; a loss, and what it was of."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 1)

    def forward(self, pair, *, labels):
        score = self.head(self.tower(pair["a"]) * self.tower(pair["b"][0])).squeeze(1)
        return {"loss": F.mse_loss(score, labels), "score": score}


def example(rows):
    return {"a": torch.randn(rows, 6), "b": (torch.randn(rows, 6),)}, torch.randn(rows)


@pytest.mark.parametrize(("stages", "open_size"), [({"m0": ["tower"], "m1": ["head"]}, False), (2, True)])
def test_nested_inputs_and_a_submodule_that_is_called_twice(stages, open_size):
    model, (pair, labels) = Towers(), example(3)
    rows = torch.export.Dim("rows", min=2, max=64) if open_size else 3
    shapes = {"pair": {"a": {0: rows}, "b": ({0: rows},)}, "labels": {0: rows}} if open_size else None
    module = mt.from_torch(torch.export.export(model, (pair,), {"labels": labels}, dynamic_shapes=shapes))
    run = mt.pipeline(module, TOPOLOGY, stages, {"pair_a": {"d": 0}}, microbatches=4, train=True)
    pair, labels = example(11 if open_size else 12)
    got, wanted = run(pair, labels=labels), model(pair, labels=labels)
    assert got.keys() == wanted.keys()
    torch.testing.assert_close(got["loss"], wanted["loss"].detach())
    torch.testing.assert_close(got["score"], wanted["score"].detach())
    wanted["loss"].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.gradients()[module.names[name]], parameter.grad, msg=name)
    with pytest.raises(MeshTensorError, match="recorded with"):
        run((pair["a"], pair["b"]), labels=labels)


class Small(nn.Module):
    """Its gradients are too small for its dtype."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 4, dtype=dtype)

    def forward(self, x, y):
        made = self.b(torch.tanh(self.a(x.to(self.a.weight.dtype))))
        return F.mse_loss(made.float(), y) * 1e-6


def sgd(weight, gradient, state):
    return weight - 1e4 * gradient


@pytest.mark.parametrize(("dtype", "scale", "error"), [("float16", 2.0**16, 2e-3), ("bfloat16", None, 2e-2)])
def test_small_gradients_are_added_up_in_float32(dtype, scale, error):
    model, wide = Small(getattr(torch, dtype)), Small(torch.float32)
    wide.load_state_dict(model.state_dict())
    x, y = torch.randn(12, 8), torch.randn(12, 4)
    module = mt.from_torch(torch.export.export(model, (x[:3], y[:3])))
    options = {"microbatches": 4, "train": True, "schedule": "zb-h1", "loss_scale": scale}
    run = mt.pipeline(module, TOPOLOGY, ["a"], {"x": {"d": 0}}, **options)
    loss = wide(x, y)
    torch.testing.assert_close(run(x, y), loss.detach(), rtol=error, atol=0)
    (loss * 2**16).backward()
    for name, parameter in wide.named_parameters():
        found = run.gradients()[module.names[name]]
        assert found.dtype == torch.float32
        assert (found * 2**16 - parameter.grad).abs().max() < error * parameter.grad.abs().max()


def test_a_dynamic_scale_falls_where_gradients_overflow():
    model, x, y = Small(torch.float16), torch.randn(12, 8), torch.randn(12, 4) * 1e10
    module = mt.from_torch(torch.export.export(model, (x[:3], y[:3])))
    options = {"microbatches": 4, "train": True}
    run = mt.pipeline(module, TOPOLOGY, ["a"], loss_scale="dynamic", **options)
    before = run.weights()
    run(x, y)
    run.update(sgd)
    assert (run.skipped, run.loss_scale) == (1, 2.0**15)
    assert all(torch.equal(weight, before[name]) for name, weight in run.weights().items())
    state = run.state_dict()
    assert (state["opt.loss_scale"], state["opt.loss_scale_steps"]) == (2.0**15, 0)
    again = mt.pipeline(module, TOPOLOGY, ["a"], loss_scale="dynamic", **options)
    again.load_state_dict(state)
    again(x, y * 1e-10)
    again.update(sgd)
    assert (again.skipped, again.loss_scale) == (0, 2.0**15)
    assert not any(torch.equal(weight, before[name]) for name, weight in again.weights().items())
    fixed = mt.pipeline(module, TOPOLOGY, ["a"], loss_scale=2.0**16, **options)
    fixed(x, y)
    with pytest.raises(MeshTensorError, match="not finite"):
        fixed.update(sgd)


def test_a_scale_without_gradients_is_refused():
    model, x, y = Small(torch.float16), torch.randn(12, 8), torch.randn(12, 4)
    module = mt.from_torch(torch.export.export(model, (x[:3], y[:3])))
    with pytest.raises(MeshTensorError, match="loss_scale=8.0, but no gradients are taken"):
        mt.pipeline(module, TOPOLOGY, ["a"], microbatches=4, loss_scale=8.0)


def test_a_rule_keeps_weights_in_float32():
    def rule(weight, gradient, state):
        state["master"] = state.get("master", weight.float()) - 100 * gradient
        return state["master"]

    model, x, y = Small(torch.bfloat16), torch.randn(12, 8), torch.randn(12, 4)
    module = mt.from_torch(torch.export.export(model, (x[:3], y[:3])))
    run = mt.pipeline(module, TOPOLOGY, ["a"], {"a.weight": {"d": 0}}, microbatches=4, train=True)
    masters = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    for _ in range(3):
        run(x, y)
        masters = {name: master - 100 * run.gradients()[module.names[name]] for name, master in masters.items()}
        run.update(rule)
    state = run.state_dict()
    for name, master in masters.items():
        assert torch.equal(state[f"update.master.{name}"], master)
        assert torch.equal(state[name], master.bfloat16())


@pytest.mark.parametrize(("threads", "of_each"), [(1, 1), (2, 1), (4, 2)])
def test_meshes_share_the_threads_of_torch(monkeypatch, threads, of_each):
    """A new thread would have as many as there are cores."""
    run, found = Row.run, set()

    def watched(row, action):
        found.add((threading.current_thread().name, torch.get_num_threads()))
        run(row, action)

    pipe = mt.pipeline(imported(Net(), 4), TWO, ["blocks.1"], microbatches=2, train=True)
    monkeypatch.setattr(Row, "run", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pipe(*batch(8))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found == {("mesh m0", of_each), ("mesh m1", of_each)}


def test_an_interrupted_call_leaves_no_thread_behind(monkeypatch, interruptible):
    """Ctrl-C comes to the thread that waits; what the meshes do ends with it, and the next call is as ever."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    pipe = mt.pipeline(imported(Net(), 4), TWO, ["blocks.1"], microbatches=8, train=True)
    inputs, before = batch(32), torch.get_num_threads()
    expected, run, ran = pipe(*inputs), Row.run, []

    def interrupting(row, action):
        ran.append(action)
        if len(ran) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.01)
        run(row, action)

    with monkeypatch.context() as patched:
        patched.setattr(Row, "run", interrupting)
        with pytest.raises(KeyboardInterrupt):
            pipe(*inputs)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mesh ")]
    assert len(ran) < sum(map(len, pipe.schedule.rows))
    assert torch.get_num_threads() == before
    with pytest.raises(mt.MeshTensorError, match="there are no gradients yet"):
        pipe.gradients()
    torch.testing.assert_close(pipe(*inputs), expected)


def test_two_threads_that_train(monkeypatch):
    """What one of them goes on from, the other one would have lost."""
    model, run, found = imported(Net(), 4), Row.run, []
    pipe, alone = (mt.pipeline(model, TWO, ["blocks.1"], microbatches=2, train=True) for _ in range(2))
    inputs, state = batch(8), alone.state_dict()

    def rule(weight, gradient, kept):
        return weight - 0.1 * gradient

    calls = {
        "a call of a pipeline": lambda: pipe(*inputs),
        "an update of a pipeline": lambda: pipe.update(rule),
        "gradients of a pipeline": pipe.gradients,
        "weights of a pipeline": pipe.weights,
        "a state that is asked for": pipe.state_dict,
        "a state that is loaded": lambda: pipe.load_state_dict(state),
    }

    def meanwhile(row, action):
        found.append([refusal(call) for call in calls.values()])
        run(row, action)

    with monkeypatch.context() as patched:
        patched.setattr(Row, "run", meanwhile)
        pipe(*inputs)
    for texts in found:
        for what, text in zip(calls, texts, strict=True):
            assert text.startswith(f"{what}, while another thread's is under way")
    alone(*inputs)
    for each in (pipe, alone):
        each.update(rule)
    torch.testing.assert_close(pipe.weights(), alone.weights(), rtol=0, atol=0)


def test_two_threads_that_only_look(monkeypatch):
    """Without weights that are trained, and without what the model writes, calls are each other's no concern."""
    model, run, found = imported(Net(), 4), Row.run, []
    pipe = mt.pipeline(model, TWO, ["blocks.1"], microbatches=2)
    inputs, others = batch(8), batch(8)
    expected = pipe(*inputs), pipe(*others)

    def meanwhile(row, action):
        if not found:
            found.append(None)
            found[0] = pipe(*others)
        run(row, action)

    monkeypatch.setattr(Row, "run", meanwhile)
    torch.testing.assert_close((pipe(*inputs), found[0]), expected, rtol=0, atol=0)
