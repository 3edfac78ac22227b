"""Calls that differ between the ranks of a pipeline: each body returns what its rank was told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import mesh_tensor as mt
from tests.api.pipeline.rank_bodies import batch, check, made, uneven
from tests.refusals import refusal

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 1}}


def descend(weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
    """A rule that keeps something, and writes into all that it gets."""
    state["steps"] = state.get("steps", 0) + 1
    state["sum"] = gradient.clone() if "sum" not in state else state["sum"].add_(gradient)
    gradient *= 0.1
    weight -= gradient
    return weight


def raising(weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
    """A rule that raises when it has already written."""
    descend(weight, gradient, state)
    raise ValueError("out of luck")


def otherwise(weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
    """A rule that gives no weight."""
    return 3


def rule_raises_on_one_rank(rank: int) -> list[str]:
    """Ranks of either mesh, rules that raise or give no weight: nothing changes, and all go on without resuming."""
    weights, run = made("1f1b", True, TOPOLOGY)
    run(*batch(12))
    run.update(descend)
    texts = []
    for bad, rule in ((0, raising), (2, raising), (1, otherwise)):
        before, gradients = run.weights(), run.gradients()
        begin = time.monotonic()
        texts.append(refusal(lambda bad=bad, rule=rule: run.update(rule if rank == bad else descend)))
        assert time.monotonic() - begin < 30  # the group's timeout is twice that
        for old, now in ((before, run.weights()), (gradients, run.gradients())):
            assert all(torch.equal(old[name], now[name]) for name in old)
    texts.append(refusal(lambda: run.update(raising)))
    assert {state["steps"] for state in run._weights.of_rules.values()} == {1}
    run.update(descend, max_norm=0.5)
    assert {state["steps"] for state in run._weights.of_rules.values()} == {2}
    check(run, run.weights())
    return texts


def calls_differ(rank: int) -> list[str]:
    """One rank, of either mesh, makes another call than the others, for all pairs of calls; then all resume."""
    weights, run = made("1f1b", True, TOPOLOGY)
    inputs = batch(12)
    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: run(*inputs),
        "gradients": run.gradients,
        "weights": run.weights,
        "update": lambda: run.update(descend),
        "clipped": lambda: run.update(descend, max_norm=1.0),
        "bad batch": lambda: run(inputs[0][:5], inputs[1]),
        "no batch": lambda: run(None, 3),
    }
    texts: list[str] = []
    for one, others in (
        ("update", "run"), ("run", "update"), ("gradients", "weights"), ("clipped", "update"), ("bad batch", "run"),
        ("no batch", "update"),
    ):  # fmt: skip
        run(*inputs)
        odd = 2 if len(texts) % 2 else 1
        begin = time.monotonic()
        texts.append(refusal(calls[one if rank == odd else others]))
        assert time.monotonic() - begin < 30, (one, others)
        mt.resume(run.topology)
        if "run" in (one, others):
            assert "there are no gradients yet" in refusal(run.gradients)
        check(run, run.weights())
    return texts


class Step(torch.nn.Module):
    """Two layers with a gelu between, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(rows, 6) twice -> a number."""
        hidden = torch.nn.functional.gelu(self.first(x), approximate="tanh")
        return torch.nn.functional.mse_loss(self.second(hidden), y)


def computes_otherwise(rank: int) -> str:
    """The rank of the mesh without a gelu would leave it to torch, and the others not; without it all go on."""
    from mesh_tensor.targets.cpu import gelu

    torch.manual_seed(0)
    model, library = Step(), gelu._library
    module = mt.from_torch(torch.export.export(model, batch(3)))
    run = mt.pipeline(module, TOPOLOGY, {"m0": ["first"], "m1": ["second"]}, microbatches=4, train=True, ranks=True)
    inputs = batch(12)
    gelu._library = library if rank < 2 else lambda: None  # type: ignore[assignment]
    text = refusal(lambda: run(*inputs))
    gelu._library = library
    run = mt.pipeline(module, TOPOLOGY, {"m0": ["first"], "m1": ["second"]}, microbatches=4, train=True, ranks=True)
    torch.testing.assert_close(run(*inputs), model(*inputs).detach())
    return text


class Weighs(torch.nn.Module):
    """A mean of two layers' rows by weights that may be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(rows, 6), (rows,) -> a number."""
        return (self.second(torch.tanh(self.first(x))).mean(1) * weights).sum() / weights.sum()


def weights_that_cancel(rank: int) -> str:
    """What all ranks are told, and go on."""
    torch.manual_seed(0)
    model, x, weights = Weighs(), torch.randn(12, 6), torch.rand(12)
    module = mt.from_torch(torch.export.export(model, (x[:3], weights[:3])))
    run = mt.pipeline(module, TOPOLOGY, ["first"], microbatches=4, train=True, ranks=True)
    text = refusal(lambda: run(x, torch.arange(12) - 5.5))
    assert "there are no gradients" in refusal(run.gradients)
    torch.testing.assert_close(run(x, weights), model(x, weights).detach())
    return text


def traced(rank: int) -> tuple[list[str], list[tuple[int, int, int]]]:
    """The actions by mesh in the order of their times, and how many there are per thread of the trace, which is the
    same on all ranks."""
    torch.manual_seed(0)
    module = mt.from_torch(torch.export.export(Step(), batch(3)))
    run = mt.pipeline(module, TOPOLOGY, ["first"], microbatches=4, train=True, ranks=True)
    assert "no times of a call" in refusal(run.trace)
    run(*batch(12))
    times, bars = run.timeline(), [event for event in run.trace()["traceEvents"] if event["ph"] == "X"]
    ends = [end for row in times.rows for event in row for end in (event.start, event.end)]
    assert 0 <= min(ends) < max(ends) == times.makespan  # a mesh's second rank may have begun first
    places = sorted({(bar["pid"], bar["tid"]) for bar in bars})
    actions = [" ".join(str(event.action) for event in row) for row in times.rows]
    return actions, [(*place, sum((b["pid"], b["tid"]) == place for b in bars)) for place in places]


class Shows(torch.nn.Module):
    """Two layers; gives a loss, the second one's weight, and the rows that come in, all of them as views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(rows, 6) -> a number, (36,), (rows, 6, 1)."""
        return self.second(self.first(x)).square().mean(), self.second.weight.reshape(36), x.unsqueeze(2)


def what_is_given_is_the_callers(rank: int) -> None:
    """Who writes into results, weights or gradients changes nothing else, also on the rank that has all of them."""
    torch.manual_seed(0)
    model, x = Shows(), torch.randn(3, 6)
    module = mt.from_torch(torch.export.export(model, (x,)))
    for count in (1, 2):
        run = mt.pipeline(module, TOPOLOGY, ["first"], microbatches=count, train=True, ranks=True)
        inputs = x.repeat(count, 1)
        for _ in range(2):
            results = run(inputs)
            for found, wanted in zip(results, model(inputs), strict=True):
                torch.testing.assert_close(found, wanted.detach())
            given = [*results, *run.weights().values(), *run.gradients().values(), *run.state_dict().values()]
            assert all(gradient.any() for gradient in run.gradients().values())
            for tensor in given:
                tensor.zero_()
        assert torch.equal(inputs, x.repeat(count, 1))
        assert all(gradient.any() for gradient in run.gradients().values())


def on_three(rank: int) -> dict[str, Any]:
    """All for three ranks, one after the other."""
    what_is_given_is_the_callers(rank)
    return {
        "uneven": uneven(rank),
        "rule raises": rule_raises_on_one_rank(rank),
        "computes otherwise": computes_otherwise(rank),
        "calls differ": calls_differ(rank),
        "weights cancel": weights_that_cancel(rank),
        "traced": traced(rank),
    }
