"""States that loops carry, with what their authors say of them: in every layout as on one device."""

import pytest
import torch

import mesh_tensor as mt
from kernels.combined import (
    delta_rule,
    delta_rule_reference,
    largest_of_rows,
    largest_of_rows_reference,
    one_pass_variance,
)
from tests.lowering.every_layout import check
from tests.lowering.support import lowered, outline, run
from tests.other_machines import machine

from .combine_kernels import in_local_memory, in_variables

X = torch.randn(8, 64)
MESHES = [{"x": 2}]


@pytest.mark.parametrize("cols", [64, 40])
def test_welford(cols):
    x = X[:, :cols].contiguous()
    with machine(1):
        check(one_pass_variance(8, cols), [x], x.var(1, unbiased=False), MESHES)


@pytest.mark.parametrize("layouts", [{"A": {"x": 1}}, {"A": {"x": 1, "y": 0}, "V": {"y": 0}, "W": {"x": 0}}])
def test_top_k_with_ties(layouts):
    x = torch.randint(0, 12, (8, 64)).float()
    with machine(1):
        result = run(largest_of_rows(8, 64), {"x": 2, "y": 2}, layouts, x)
    torch.testing.assert_close(tuple(result), largest_of_rows_reference(x))


@pytest.mark.parametrize("layouts", [dict.fromkeys("QKVBY", {"x": 0}), {"K": {"x": 0}, "V": {"y": 0}, "Y": {"y": 1}}])
def test_the_delta_rule(layouts):
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    k, b = k / k.norm(dim=2, keepdim=True), torch.rand(12, 2)
    with machine(1):
        result = run(delta_rule(12, 2, 8), {"x": 3, "y": 2}, layouts, q, k, v, b)
    torch.testing.assert_close(result, delta_rule_reference(q, k, v, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [in_variables, in_local_memory])
def test_states_in_variables(kernel):
    x, state, states = X[:4, :15].contiguous(), torch.zeros(4), []
    for t in range(15):
        state = state * 0.5 + x[:, t]
        states.append(state)
    with machine(1):
        check(kernel(15), [x], [torch.stack(states, 1), x.amax(1)], MESHES)


def test_only_states_move():
    with machine(1):
        compiled = mt.compile(mt.annotate(one_pass_variance(8, 64), {"x": 4}, {"A": {"x": 1}}), target="c")
    moved = [step for step in str(compiled.explain()).splitlines() if " all_gather " in step]
    assert [line.split()[1] for line in moved] == ["count_total_w1", "mean_total_w1", "m2_total_w1"]
    torch.testing.assert_close(compiled(X), X.var(1, unbiased=False))


def test_a_loop_that_only_carries_runs_once():
    """What a device makes of its part is all that it needs: `rest` has no loop."""
    with machine(1):
        compiled = mt.compile(
            mt.annotate(largest_of_rows(8, 64), {"x": 2}, {"A": {"x": 1}}), target="interpret", poison=True
        )
    assert "places_start" not in compiled.explain()
    torch.testing.assert_close(compiled(X)[0], X.topk(3, 1).values)


def test_what_was_not_tried_is_not_gone_by():
    with machine(1):
        first = outline(lowered(one_pass_variance(8, 64), {"x": 2}, {"A": {"x": 1}}))[0]
    assert first == "kernel(A, count_turn0_w1, mean_turn0_w1, m2_turn0_w1)"


def test_without_a_statement():
    """For the same kernels, of which nothing is stated, devices take turns."""
    expected = X.var(1, unbiased=False), largest_of_rows_reference(X)[0]
    kernels = one_pass_variance(8, 64, None), largest_of_rows(8, 64, None)
    for kernel, result in zip(kernels, expected, strict=True):
        with machine(1):
            compiled = mt.compile(mt.annotate(kernel, {"x": 2}, {"A": {"x": 1}}), target="interpret", strict=True)
        found = compiled(X)
        torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, result)
        assert "turns" in compiled.explain()


def test_kernels_are_printed_with_what_is_stated():
    assert '"mesh_tensor_combine:count,mean,m2"' in one_pass_variance(8, 64).script()
