"""What each rank of a pipeline runs in tests."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import mesh_tensor as mt
from mesh_tensor import MeshTensorError
from tests.api.pipeline.models import Normed, chain, chain_loss
from tests.refusals import refusal

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 2}}
CUTS = {"1f1b": ["layer1"], "zb-h1": ["layer1"], "interleaved": ["layer0", "layer1", "layer2"]}


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    return torch.randn(rows, 6), torch.randn(rows, 6)


def made(schedule: str, ranks: bool, topology: Any = TOPOLOGY) -> tuple[dict[str, torch.Tensor], mt.Pipeline]:
    """Weights, and a pipeline with them."""
    torch.manual_seed(0)
    module, weights = chain()
    layouts = {"m0": {"x": {"d": 0}, "w0": {"d": 1}}, "m1": {"y": {"d": 0}}}
    options = {"microbatches": 4, "schedule": schedule, "train": True}
    return weights, mt.pipeline(module, topology, CUTS[schedule], layouts, ranks=ranks, **options)


def bits_agree(run: mt.Pipeline, virtual: mt.Pipeline, loss: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether losses and gradients of two pipelines are the same, bit for bit."""
    got, gradients = run.gradients(), virtual.gradients()
    alike = got.keys() == gradients.keys() and all(torch.equal(got[name], gradients[name]) for name in got)
    return torch.equal(loss, wanted) and alike


def check(run: mt.Pipeline, weights: dict[str, torch.Tensor]) -> float:
    """Loss and gradients against torch's."""
    inputs = batch(12)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    wanted = chain_loss(leaves, *inputs)
    by_torch = dict(zip(leaves, torch.autograd.grad(wanted, list(leaves.values())), strict=True))
    torch.testing.assert_close(run(*inputs), wanted.detach())
    for name, got in run.gradients().items():
        torch.testing.assert_close(got, by_torch[name], rtol=1e-4, atol=1e-6, msg=name)
    return float(wanted.detach())


def same_as_virtual(rank: int) -> dict[str, float]:
    """Losses and gradients on ranks and on threads; the bits have to be the same."""
    found = {}
    for schedule in CUTS:
        _, virtual = made(schedule, False)
        _, run = made(schedule, True)
        for _ in range(2 if schedule == "1f1b" else 1):
            inputs = batch(12)
            loss, wanted = run(*inputs), virtual(*inputs)
            assert bits_agree(run, virtual, loss, wanted), (schedule, loss, wanted)
        found[schedule] = float(loss)
    return found


class Attends(torch.nn.Module):
    """Two layers of a norm and causal attention, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))
        self.projs = torch.nn.ModuleList(torch.nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(rows, 20, 8) twice -> a number."""
        for norm, proj in zip(self.norms, self.projs, strict=True):
            q, k, v = proj(norm(x)).view(-1, 20, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            z = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + z.transpose(1, 2).reshape(-1, 20, 8)
        return torch.nn.functional.mse_loss(x, y)


def keeps(rank: int) -> dict[str, list[str]]:
    """What torch keeps of norms and attention from a forward to its backward changes no bit: what was carried."""
    from mesh_tensor.api.pipeline.carriers import RankCarrier

    torch.manual_seed(0)
    example = torch.randn(2, 20, 8), torch.randn(2, 20, 8)
    module = mt.from_torch(torch.export.export(Attends(), example))
    inputs, found, call = (torch.randn(8, 20, 8), torch.randn(8, 20, 8)), {}, RankCarrier.run
    for schedule in ("1f1b", "zb-h1"):
        virtual, run = (
            mt.pipeline(
                module, TOPOLOGY, {"m0": ["projs.0"], "m1": ["projs.1"]}, {"x": {"d": 0}, "y": {"d": 0}},
                microbatches=4, schedule=schedule, train=True, ranks=ranks,
            )
            for ranks in (False, True)
        )  # fmt: skip
        names = found[schedule] = list[str]()

        def noting(carrier: Any, fragment: Any, values: Any, kept: Any, *rest: Any, names: list[str] = names) -> Any:
            before, made = len(kept), call(carrier, fragment, values, kept, *rest)
            names.append(f"{fragment.kind} {len(kept) - before:+}")
            return made

        RankCarrier.run = noting  # type: ignore[method-assign]
        loss = run(*inputs)
        RankCarrier.run = call  # type: ignore[method-assign]
        assert bits_agree(run, virtual, loss, virtual(*inputs)), schedule
    return found


class Scaled(torch.nn.Module):
    """Layers of a norm and a product of which only gradients of weights need the result, where it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(8) for _ in range(4))
        self.projs = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(rows, 8) twice -> a number."""
        for norm, proj in zip(self.norms, self.projs, strict=True):
            x = proj(norm(x))
        return torch.nn.functional.mse_loss(x, y)


def recomputes(rank: int) -> float:
    """Gradients of norms find what torch keeps of these, where stages compute again and hand on early."""
    torch.manual_seed(0)
    example = torch.randn(2, 8), torch.randn(2, 8)
    model, inputs = Scaled(), (torch.randn(4, 8), torch.randn(4, 8))
    wanted = model(*inputs)
    wanted.backward()
    run = mt.pipeline(
        mt.from_torch(torch.export.export(model, example)), {f"m{n}": {"d": 1} for n in range(4)},
        {f"m{n}": [f"projs.{n}"] for n in range(4)}, {},
        microbatches=2, schedule="1f1b", recompute=True, train=True, ranks=True,
    )  # fmt: skip
    torch.testing.assert_close(run(*inputs), wanted.detach())
    got = run.gradients()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(got[name.replace(".", "_")], weight.grad, rtol=1e-4, atol=1e-6, msg=name)
    return float(wanted.detach())


def hands_on(rank: int) -> list[str]:
    """Of stages on one device each: what fragments hand on before they end; the bits are those of a virtual
    topology."""
    from mesh_tensor.api.pipeline.carriers import RankCarrier

    torch.manual_seed(0)
    module, _ = chain()
    topology, cuts = {f"m{n}": {"d": 1} for n in range(4)}, [f"layer{n}" for n in range(3)]
    virtual, run = (
        mt.pipeline(module, topology, cuts, {}, microbatches=4, schedule="1f1b", train=True, ranks=ranks)
        for ranks in (False, True)
    )
    inputs, found, call = batch(12), list[str](), RankCarrier.run

    def noting(carrier: Any, fragment: Any, values: Any, kept: Any, totals: Any, hand_on: Any) -> Any:
        def handing(made: dict[int, Any]) -> None:
            found.extend(f"{fragment.kind} {fragment.gives[number]}" for number in made)
            hand_on(made)

        return call(carrier, fragment, values, kept, totals, handing)

    RankCarrier.run = noting  # type: ignore[method-assign]
    loss = run(*inputs)
    RankCarrier.run = call  # type: ignore[method-assign]
    assert bits_agree(run, virtual, loss, virtual(*inputs))
    return found


def momentum(weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
    """A rule that keeps a number and a tensor."""
    state["steps"] = state.get("steps", 0) + 1
    state["m"] = 0.9 * state["m"] + gradient if "m" in state else gradient
    return weight - 0.1 * state["m"]


def writes(rank: int) -> str:
    """Statistics, and what rules keep, are those of the virtual topology bit for bit; a call that raises on one rank,
    after its own actions, leaves all as they were; a state goes to another pipeline. What one rank is told that loads
    another state; what is no state on one of them is refused on all."""
    from mesh_tensor.api.pipeline.carriers import RankCarrier

    module = mt.from_torch(torch.export.export(Normed(True), batch(4)))
    virtual, run, other = (
        mt.pipeline(
            module, TOPOLOGY, ["fcs.1"], {"x": {"d": 0}, "y": {"d": 0}}, microbatches=3, train=True, ranks=ranks,
            schedule=schedule, per_microbatch=["norms.0", "norms.1", "fcs.1"],
        )
        for ranks, schedule in ((False, "1f1b"), (True, "1f1b"), (True, "zb-h1"))
    )  # fmt: skip
    for used in (run, other):
        inputs = batch(12)
        assert torch.equal(used(*inputs), virtual(*inputs))
        virtual.update(momentum)
        used.update(momentum)
        wanted, state = virtual.state_dict(), used.state_dict()
        assert wanted.keys() == state.keys()
        assert "update.m.fcs.2.weight" in state
        assert state["update.steps.fcs.0.bias"] == (2 if used is other else 1)
        assert all(torch.equal(torch.as_tensor(wanted[name]), torch.as_tensor(state[name])) for name in wanted)
        other.load_state_dict(state)

    def unlucky(*_: Any) -> Any:
        raise MeshTensorError("out of luck")

    whole = RankCarrier.whole
    if rank == 3:
        RankCarrier.whole = unlucky  # type: ignore[method-assign]
    refusal(lambda: other(*batch(12)))
    RankCarrier.whole = whole  # type: ignore[method-assign]
    mt.resume(other.topology)
    after = other.state_dict()
    assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(after[name])) for name in state)
    text = refusal(lambda: other.load_state_dict(None if rank == 2 else state))  # type: ignore[arg-type]
    assert "None is no state" in text
    mt.resume(other.topology)
    bad = {**state, "fcs.0.bias": state["fcs.0.bias"] + (2 if rank == 1 else 1)}
    return refusal(lambda: other.load_state_dict(bad))


def same_or_refused(rank: int) -> tuple[dict[str, float], str]:
    """`same_as_virtual`, then another schedule on one rank."""
    found = same_as_virtual(rank)
    _, run = made("zb-h1" if rank == 1 else "1f1b", True)
    try:
        run(*batch(12))
    except MeshTensorError as error:
        return found, str(error)
    return found, "ran"


def uneven(rank: int) -> float:
    """Meshes of 2 and 1 devices, 3 rows on 2 devices; a step of gradient descent, and another loss."""
    weights, run = made("1f1b", True, {"m0": {"d": 2}, "m1": {"d": 1}})
    check(run, weights)
    gradients = run.gradients()
    run.update(lambda weight, gradient, state: weight - 0.1 * gradient)
    updated = run.weights()
    for name, weight in weights.items():
        torch.testing.assert_close(updated[name], weight - 0.1 * gradients[name])
    return check(run, updated)


def raises_in_an_action(rank: int) -> str:
    """An action fails on one rank: all say so."""
    from mesh_tensor.api.pipeline import rows as pipeline_rows

    backward = pipeline_rows._ACTIONS["B"]

    def broken(row: Any, here: Any, action: Any) -> None:
        if str(action) == "1B1" and rank == 3:
            raise ValueError("out of luck")
        backward(row, here, action)

    _, run = made("1f1b", True)
    pipeline_rows._ACTIONS["B"] = broken
    try:
        run(*batch(12))
    except MeshTensorError as error:
        return str(error)
    return "ran"


def dies_in_an_action(rank: int, late: int = -1) -> str:
    """A rank is killed in the middle of a schedule; another one, `late` to notice, hears of it from its own mesh."""
    from mesh_tensor.api.pipeline import rows as pipeline_rows

    forward = pipeline_rows._ACTIONS["F"]

    def deadly(row: Any, here: Any, action: Any) -> None:
        if str(action) == "1F2" and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == late and str(action) == "0F2":
            time.sleep(1)
        forward(row, here, action)

    _, run = made("1f1b", True)
    run(*batch(12))
    pipeline_rows._ACTIONS["F"] = deadly
    try:
        run(*batch(12))
    except MeshTensorError as error:
        return str(error)
    return "ran"


def not_finite_on_one_mesh(rank: int) -> str:
    """Every rank refuses, also those whose weights would be finite, and all go on."""
    weights, run = made("1f1b", True)
    run(*batch(12))
    bad = float("inf") if rank == 3 else 0.1
    before = run.weights()
    text = refusal(lambda: run.update(lambda weight, gradient, state: weight - bad * gradient))
    assert all(torch.equal(before[name], now) for name, now in run.weights().items())
    run.update(lambda weight, gradient, state: weight - 0.1 * gradient)
    assert not all(torch.equal(before[name], now) for name, now in run.weights().items())
    check(run, run.weights())
    return text


def on_four(rank: int) -> dict[str, Any]:
    """All for four ranks after which they go on, then what ends them."""
    return {
        "same or refused": same_or_refused(rank),
        "keeps": keeps(rank),
        "hands on": hands_on(rank),
        "recomputes": recomputes(rank),
        "writes": writes(rank),
        "not finite": not_finite_on_one_mesh(rank),
        "raises in an action": raises_in_an_action(rank),
    }
