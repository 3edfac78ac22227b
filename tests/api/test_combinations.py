"""States that loops carry, with what their authors say of them: in every layout as on one device."""

import pytest
import torch

import mesh_tensor as mt
from tests.lowering.every_layout import check
from tests.lowering.support import lowered, outline, run
from tests.other_machines import machine

from .combine_kernels import (
    delta_rule,
    delta_rule_reference,
    in_local_memory,
    in_variables,
    top_k,
    welford,
)

X = torch.randn(8, 64)
MESHES = [{"x": 2}]


@pytest.mark.parametrize("cols", [64, 40])
def test_welford(cols):
    x = X[:, :cols].contiguous()
    with machine(1):
        check(welford(8, cols), [x], x.var(1, unbiased=False), MESHES)


@pytest.mark.parametrize("layouts", [{"A": {"x": 1}}, {"A": {"x": 1, "y": 0}, "V": {"y": 0}, "W": {"x": 0}}])
def test_top_k_with_ties(layouts):
    x = torch.randint(0, 12, (8, 64)).float()
    order = torch.sort(x, dim=1, descending=True, stable=True)
    with machine(1):
        values, places = run(top_k(8, 64), {"x": 2, "y": 2}, layouts, x)
    torch.testing.assert_close(values, order.values[:, :3])
    torch.testing.assert_close(places, order.indices[:, :3].int())


@pytest.mark.parametrize("layouts", [dict.fromkeys("QKVBY", {"x": 0}), {"K": {"x": 0}, "V": {"y": 0}, "Y": {"y": 1}}])
def test_the_delta_rule(layouts):
    q, k, v = (torch.randn(12, 8) for _ in range(3))
    k, b = k / k.norm(dim=1, keepdim=True), torch.rand(12)
    with machine(1):
        result = run(delta_rule(12, 8), {"x": 3, "y": 2}, layouts, q, k, v, b)
    torch.testing.assert_close(result, torch.stack(delta_rule_reference(q, k, v, b)), rtol=1e-5, atol=1e-5)


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
        compiled = mt.compile(mt.annotate(welford(8, 64), {"x": 4}, {"A": {"x": 1}}), target="c")
    moved = [step for step in str(compiled.explain()).splitlines() if " all_gather " in step]
    assert [line.split()[1] for line in moved] == ["count_total_w1", "mean_total_w1", "m2_total_w1"]
    torch.testing.assert_close(compiled(X), X.var(1, unbiased=False))


def test_a_loop_that_only_carries_runs_once():
    """What a device makes of its part is all that it needs: `rest` has no loop."""
    with machine(1):
        compiled = mt.compile(mt.annotate(top_k(8, 64), {"x": 2}, {"A": {"x": 1}}), target="interpret", poison=True)
    assert "places_start" not in compiled.explain()
    torch.testing.assert_close(compiled(X)[0], X.topk(3, 1).values)


def test_what_was_not_tried_is_not_gone_by():
    with machine(1):
        assert outline(lowered(welford(8, 64), {"x": 2}, {"A": {"x": 1}}))[0] == "all_gather(A, dim 1, x)"


def test_without_a_statement():
    """The same kernels, of which nothing is stated, need the dim whole."""
    for kernel in (welford(8, 64, None), top_k(8, 64, None)):
        with pytest.raises(mt.MeshTensorError, match="'A' dim 1 on axis 'x' needs replication"):
            mt.compile(mt.annotate(kernel, {"x": 2}, {"A": {"x": 1}}), target="interpret", strict=True)
