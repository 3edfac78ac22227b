"""Random models with their losses on random meshes: results, gradients and a step of the whole model; or refused."""

import traceback
from collections.abc import Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import settings

import mesh_tensor as mt
from mesh_tensor.runtime import backend
from tests.api.pipeline.random_models import Case, built, inputs_of, make_case
from tests.random_modules.check import RIGHT, Outcome
from tests.runtime.ranks.launcher import run as on_ranks

# Schedules have sizes, random names of cuts may not make stages.
REFUSED = (
    "to fill both directions",
    "stages per mesh, but the order is made for",
    "computes nothing that another stage or the result takes",
)


@pytest.mark.parametrize("first", range(0, settings.default.max_examples // 3, 10))  # each is a model, a plan, a step
def test_random_models(first: int):
    for number in range(first, first + 10):
        check(make_case(number))


def test_random_models_on_ranks():
    """In one start of four ranks: as torch has them, and as the virtual topology."""
    found = on_ranks(partial(check_on_rank, [make_case(number, ranks=True) for number in range(5)]), 4)
    assert all(refusals == found[0] for refusals in found)
    assert found[0].count("") >= 3


def check_on_rank(cases: Sequence[Case], rank: int) -> list[str]:
    """On one of the ranks: the refusal of each case, if there is one."""
    return [check(case) for case in cases]


def run(case: Case) -> Outcome:
    """What becomes of a case."""
    torch.manual_seed(0)
    try:
        refusal = on_ranks(partial(check_on_rank, [case]), 4)[0][0] if case.ranks else check(case)
    except (Exception, pytest.fail.Exception):
        return Outcome("wrong", traceback.format_exc())
    return Outcome("refused", refusal) if refusal else RIGHT


def check(case: Case) -> str:
    """Compare with torch; the refusal, if there is one. Memory of the host is other memory than the devices' here."""
    with mock.patch.object(backend, "_is_host", return_value=False):
        return _check(case)


def _check(case: Case) -> str:
    torch.manual_seed(0)
    model = case.model
    made = built(model)
    leaves = {name: (torch.randn(shape) / 2).requires_grad_() for name, shape in made.weights.items()}
    inputs = inputs_of(model, model.rows * case.microbatches)
    results = made.by_torch(inputs, leaves)
    gradients = torch.autograd.grad(results[0], list(leaves.values()), allow_unused=True)
    wanted = {
        name: gradient
        for name, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None and name not in case.frozen
    }

    def pipeline(ranks: bool) -> mt.Pipeline:
        return mt.pipeline(
            made.module,
            {f"m{i}": mesh for i, mesh in enumerate(case.meshes)},
            [made.names[cut] for cut in case.cuts] or {"m0": [made.names[-1]]},
            case.layouts,
            microbatches=case.microbatches,
            schedule=case.schedule if wanted else "forward",
            train=list(wanted) or False,
            reduction="sum" if model.loss == "sum" else None,
            weights={name: leaf.detach() for name, leaf in leaves.items()},
            recompute=case.recompute,
            memory=case.memory,
            poison=case.poison,
            ranks=ranks,
        )

    try:
        run = pipeline(case.ranks)
    except mt.MeshTensorError as error:
        if not any(words in str(error) for words in REFUSED):
            raise
        return str(error)
    got = run(*inputs.values())
    got = got if isinstance(got, tuple) else (got,)
    for result, by_torch in zip(got, results, strict=True):
        torch.testing.assert_close(result, by_torch.detach(), rtol=1e-4, atol=1e-5)
    if case.ranks:
        _check_alike(run, pipeline(False), got, inputs)
    if wanted:
        found = run.gradients()
        assert found.keys() == wanted.keys()
        scale = max(1e-3, *(float(gradient.abs().max()) for gradient in wanted.values()))  # some losses are constant
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name] / scale, gradient / scale, rtol=1e-4, atol=1e-5, msg=name)
        _check_step(run, case, leaves, wanted)
    return ""


def _check_alike(run, virtual, got, inputs) -> None:
    """What ranks make is what the virtual topology makes; products of matrices may differ in the last bit, by where
    their operands lie in memory."""
    same = virtual(*inputs.values())
    pairs = list(zip(got, same if isinstance(same, tuple) else (same,), strict=True))
    if run.trained:
        ours, theirs = run.gradients(), virtual.gradients()
        assert ours.keys() == theirs.keys()
        pairs += [(ours[name], theirs[name]) for name in ours]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def _check_step(run, case: Case, leaves, wanted) -> None:
    norm = float(torch.stack([gradient.square().sum() for gradient in wanted.values()]).sum().sqrt())
    factor = 1.0 if case.max_norm is None else min(1.0, case.max_norm / (norm + 1e-6))
    run.update(lambda weight, gradient, state: weight - 0.1 * gradient, max_norm=case.max_norm)
    updated = run.weights()
    for name, leaf in leaves.items():
        if name in updated:
            step = 0.1 * factor * wanted[name] if name in wanted else 0.0
            torch.testing.assert_close(updated[name], leaf.detach() - step, rtol=1e-4, atol=1e-5, msg=name)
