"""Rows that are sorted by group, as experts take them, are computed with where they stand; else as they are written."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt

from .modules import kinds

EXPERTS, WIDTH, HIDDEN, TOP = 5, 8, 16, 2
BATCH = {"x": {"d": 0}}


class Experts(nn.Module):
    """Experts as in transformers, whose rows are sorted by expert and multiplied in groups."""

    def __init__(self, top=TOP, biases=False):
        super().__init__()
        self.top = top
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN)) if biases else None

    def routed(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(self.top, -1)
        return scores.reshape(-1), chosen.reshape(-1)

    def sorted(self, ids):
        """The ids in order, and that order."""
        return torch.sort(ids)

    def ends(self, ids):
        return torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)

    def hidden(self, rows, ids, ends):
        made = torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)
        gate, up = (made if self.bias is None else made + self.bias[ids]).chunk(2, -1)
        return F.silu(gate) * up

    def put_back(self, rows, order, x):
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return rows[inverse].view(-1, self.top, WIDTH).sum(1)

    def forward(self, x):
        scores, chosen = self.routed(x)
        ids, order = self.sorted(chosen)
        ends = self.ends(ids)
        out = torch._grouped_mm(self.hidden(x[order // self.top], ids, ends), self.down, offs=ends)
        return x + self.put_back(out * scores[order].unsqueeze(-1), order, x)


class Stable(Experts):
    """A stable sort, whose order is sorted to turn it around."""

    def sorted(self, ids):
        return ids.sort(stable=True)

    def put_back(self, rows, order, x):
        return rows[order.argsort()].view(-1, self.top, WIDTH).sum(1)


class Added(Experts):
    """Results are added to what is there."""

    def put_back(self, rows, order, x):
        return torch.zeros_like(x).index_add_(0, order // self.top, rows)


def run(model, layout=BATCH, mesh=None, tokens=6):
    """The operators of the plan's graph, and its collectives, after a run that is right on a poisoned mesh."""
    torch.manual_seed(0)
    model, x = model.eval().to(torch.bfloat16), torch.randn(tokens, WIDTH, dtype=torch.bfloat16)
    made = mt.from_torch(torch.export.export(model, (x,)), check=False)
    ran = mt.distribute_module(made.mod, mesh or {"d": 2}, layout, weights=made.params, poison=True)
    with torch.no_grad():
        torch.testing.assert_close(ran(x), model(x), rtol=3e-2, atol=3e-2)
    return {node.call.operator for node in ran.plan.graph.nodes}, kinds(ran.plan)


GROUPED, LOOKED_UP = "mesh.grouped_matmul", "mesh.looked_up_matmul"


@pytest.mark.parametrize(
    "make", [Experts, lambda: Experts(biases=True), lambda: Experts(top=1), Stable, Added],
    ids=["sorted", "biases", "top1", "stable", "added"],
)  # fmt: skip
def test_nothing_moves(make):
    operators, moved = run(make())
    assert not moved
    assert operators.isdisjoint({GROUPED, "argsort", "aten.sort.stable", "aten.histc.default", "cumsum"})


def test_rows_that_axes_don_t_divide():
    assert run(Stable(biases=True), mesh={"d": 2, "e": 2}, layout={"x": {"d": 0, "e": 0}}, tokens=7)[1] == []


def test_experts_and_tokens_over_axes():
    """One sum over the experts' axis, as of groups."""
    layout = {name: {"e": 0} for name in ("up", "down", "bias")}
    assert run(Experts(biases=True), {**BATCH, **layout}, {"d": 2, "e": 3})[1] == ["all_reduce"]


def test_hidden_features_are_summed_once():
    layout = {"up": {"d": 1}, "down": {"d": 1}}
    operators, moved = run(Experts(), layout)
    assert (LOOKED_UP in operators, moved) == (True, ["all_reduce"])


def test_a_step_of_training_moves_gradients_only():
    torch.manual_seed(1)
    model, x = Experts(biases=True).to(torch.bfloat16), torch.randn(6, WIDTH, dtype=torch.bfloat16)
    step = mt.training_step(model, lambda out, y: (out - y).square().mean(), (x, x), optimizer="sgd")
    assert set(kinds(mt.distribute_module(step, {"d": 2}, {"x": {"d": 0}, "target": {"d": 0}}).plan)) == {"all_reduce"}


class GivenOut(Experts):
    """Sorted rows are results, too."""

    def put_back(self, rows, order, x):
        return super().put_back(rows, order, x) + 0 * rows[: x.shape[0]]


class ByPlace(Experts):
    """What is done with a row depends on where it was sorted to."""

    def hidden(self, rows, ids, ends):
        return super().hidden(rows * (1 + torch.arange(12).unsqueeze(-1) / 8).to(rows.dtype), ids, ends)


class Accumulated(Experts):
    """Rows are summed with those before them."""

    def hidden(self, rows, ids, ends):
        return super().hidden(rows.cumsum(0) / 4, ids, ends)


class Descending(Experts):
    """The last groups come first; what is said of groups is not true."""

    def sorted(self, ids):
        return torch.sort(ids, descending=True)


class OtherEnds(Experts):
    """Groups are of other numbers than the ids."""

    def ends(self, ids):
        return torch.histc(EXPERTS - 1 - ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)


class OtherBins(Experts):
    """The last bin has two ids."""

    def ends(self, ids):
        return torch.histc(ids.float(), EXPERTS, 0, EXPERTS).cumsum(0, dtype=torch.int32)


class Computed(Experts):
    """Ids that are not known to be 0 at least: no group would be of those, and all others' would begin too early."""

    def routed(self, x):
        scores, ids = super().routed(x)
        return scores, (ids - 1) % EXPERTS


class OtherOrder(Experts):
    """Rows are put back as another order says."""

    def put_back(self, rows, order, x):
        return super().put_back(rows, order, x) + super().put_back(rows, order.flip(0), x)


class TwoOrders(Experts):
    """Rows of two orders are multiplied."""

    def hidden(self, rows, ids, ends):
        made = super().hidden(rows, ids, ends)
        return made * made[made[:, 0].argsort()]


@pytest.mark.parametrize(
    "make", [GivenOut, ByPlace, Accumulated, Descending, OtherEnds, OtherBins, Computed, OtherOrder, TwoOrders]
)
def test_what_minds_the_order_stays(make):
    operators, _ = run(make())
    assert GROUPED in operators
    assert LOOKED_UP not in operators
