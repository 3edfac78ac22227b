"""Experts that are looked up per token: every device computes what its own contribute, and the results are summed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep

from .modules import kinds

EXPERTS, WIDTH, HIDDEN = 6, 16, 32


class Experts(nn.Module):
    """A layer of looked-up experts: `act` between its products, `top` experts per token, biases or none."""

    def __init__(self, act=F.silu, top=1, biases=False, gated=False, hidden=HIDDEN):
        super().__init__()
        self.act, self.top, self.gated = act, top, gated
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, hidden))
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, hidden)) if gated else None
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, WIDTH))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 1, hidden)) if biases else None
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, 1, WIDTH)) if biases else None

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(self.top, -1)
        ids = chosen.reshape(-1)
        rows = x.unsqueeze(1).expand(-1, self.top, -1).reshape(-1, 1, WIDTH)
        hidden = rows @ self.up[ids]
        if self.up_bias is not None:
            hidden = hidden + self.up_bias[ids]
        hidden = self.act(hidden)
        if self.gate is not None:
            hidden = hidden * (rows @ self.gate[ids])
        out = hidden @ self.down[ids]
        if self.down_bias is not None:
            out = out + self.down_bias[ids]
        out = out.reshape(-1, self.top, WIDTH) * scores.unsqueeze(-1)
        return x + out.sum(1)


def swish(hidden):
    """A function that is not 0 of 0, times its operand."""
    return hidden * torch.sigmoid(1.7 * hidden)


def run(model, x, mesh, layout, dtype=torch.float32):
    """The plan, after a run that is right on a poisoned mesh."""
    model, x = model.eval().to(dtype), x.to(dtype)
    made = mt.from_torch(torch.export.export(model, (x,)), check=False)
    ran = mt.distribute_module(made.mod, mesh, layout, weights=made.params, poison=True)
    with torch.no_grad():
        tolerance = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-1}
        torch.testing.assert_close(ran(x), model(x), **tolerance)
    return ran.plan


def split(model, axis="e"):
    return {name: {axis: 0} for name, weight in model.named_parameters() if weight.ndim == 3}


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"top": 2}, {"act": F.gelu, "biases": True}, {"gated": True, "top": 2}, {"act": swish}, {"act": torch.tanh}],
    ids=["silu", "top2", "biases", "gated", "swish", "tanh"],
)
def test_one_sum(options, devices):
    torch.manual_seed(0)
    model = Experts(**options)
    plan = run(model, torch.randn(7, WIDTH), {"e": devices}, split(model))
    assert kinds(plan) == ["all_reduce"]


def test_tokens_over_the_same_axis_are_gathered_and_scattered():
    model = Experts(hidden=2048)
    plan = run(model, torch.randn(6, WIDTH), {"e": 2}, {"x": {"e": 0}, **split(model)})
    assert kinds(plan) == ["all_gather", "all_gather", "reduce_scatter"]  # choices, tokens; results


@pytest.mark.parametrize("mesh", [{"e": 2, "d": 2}, {"d": 3, "e": 2}])
def test_tokens_and_hidden_features_over_other_axes(mesh):
    model = Experts(top=2, gated=True)
    layout = split(model)
    assert kinds(run(model, torch.randn(7, WIDTH), mesh, {"x": {"d": 0}, **layout})) == ["all_reduce"]
    layout = {name: {"e": 0, "d": 1 if name == "down" else 2} for name in layout}
    assert set(kinds(run(model, torch.randn(7, WIDTH), mesh, layout))) == {"all_reduce"}


@pytest.mark.parametrize("mesh", [{"d": 2}, {"d": 4}, {"e": 2, "d": 2}])
def test_biases_are_added_by_one_device_before_the_chosen_are_summed(mesh):
    """Hidden features are split: parts are summed when there is one row per token."""
    model = Experts(top=2, biases=True)
    layout = {"up": {"d": 2}, "up_bias": {"d": 2}, "down": {"d": 1}}
    plan = run(model, torch.randn(7, WIDTH), mesh, layout)
    sums = [step for step in plan.made.program.steps if isinstance(step, CollectiveStep) and step.bytes]
    assert [step.bytes for step in sums] == [2 * 7 * WIDTH * 4 * (mesh["d"] - 1) // mesh["d"]]


class Shown(Experts):
    """What is in the middle is a result, too; the last product and its bias are the same for all."""

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(self.top, -1)
        rows = x.unsqueeze(1).expand(-1, self.top, -1).reshape(-1, 1, WIDTH)
        hidden = self.act(rows @ self.up[chosen.reshape(-1)])
        out = hidden @ self.down[0] + self.down_bias[0, 0]
        return x + (out.reshape(-1, self.top, WIDTH) * scores.unsqueeze(-1)).sum(1), hidden


@pytest.mark.parametrize("down", [{"e": 1}, {"d": 0, "e": 1}])
def test_biases_are_added_once_where_fewer_sums_wait_than_could(down):
    """Hidden rows could wait for the devices of other experts, but are asked for: only hidden features are summed
    later, and the devices that add biases are those."""
    run(Shown(top=2, biases=True), torch.randn(7, WIDTH), {"d": 2, "e": 2}, {"up": {"d": 0, "e": 2}, "down": down})


def test_biases_of_rows_that_stay_as_many_are_added_to_the_sum():
    model = Experts(top=1, biases=True)
    plan = run(model, torch.randn(7, WIDTH), {"d": 2}, {"up": {"d": 2}, "up_bias": {"d": 2}, "down": {"d": 1}})
    assert kinds(plan) == ["all_reduce"]


def test_low_precision_is_summed_once_for_nothing_is_rounded():
    model = Experts()
    assert kinds(run(model, torch.randn(7, WIDTH), {"e": 3}, split(model), torch.bfloat16)) == ["all_reduce"]


@pytest.mark.parametrize("act", [lambda h: torch.cos(h) + 1, lambda h: h.softmax(-1), torch.sigmoid, torch.exp])
def test_functions_that_are_not_zero_of_zero(act):
    """What the others make of 0 meets 0 again, or is never added."""
    model = Experts(act=act)
    run(model, torch.randn(4, WIDTH) * 0.1, {"e": 2}, split(model))


def test_result_that_is_not_zero_of_zero():
    class Exponential(Experts):
        def forward(self, x):
            ids = self.router(x).argmax(-1)
            return torch.exp(0.1 * (x.unsqueeze(1) @ self.up[ids]))

    model = Exponential()
    run(model, torch.randn(4, WIDTH), {"e": 2}, split(model))


def test_different_choices_don_t_meet():
    """Who owns a token by one choice does not by another."""

    class Twice(Experts):
        def forward(self, x):
            first, second = self.router(x).topk(2, -1).indices.unbind(-1)
            return F.silu(x.unsqueeze(1) @ self.up[first]) @ self.down[second]

    model = Twice()
    run(model, torch.randn(5, WIDTH), {"e": 2}, split(model))


def test_large_batches_gather_the_tables():
    model = Experts()
    plan = run(model, torch.randn(4096, WIDTH), {"e": 2}, {"x": {"e": 0}, **split(model)})
    assert "reduce_scatter" not in kinds(plan)


class Grouped(nn.Module):
    """Rows sorted by expert, and products of groups of rows."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort()
        ends = (chosen.unsqueeze(0) <= torch.arange(EXPERTS).unsqueeze(1)).sum(1).to(torch.int32)
        rows = x[order]
        out = torch._grouped_mm(F.silu(torch._grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)
        return out[order.argsort()]


@pytest.mark.parametrize("devices", [2, 4])
def test_groups_of_rows_are_summed_once(devices):
    model = Grouped()
    plan = run(model, torch.randn(10, WIDTH), {"e": devices}, split(model), torch.bfloat16)
    assert kinds(plan) == ["all_reduce"]


class Gated(nn.Module):
    """Two experts per token, whose gate and up are one tensor of which `parts` are made along a dim, as in Mixtral and
    Qwen: rows in groups, or tables looked up."""

    def __init__(self, grouped, dim=-1):
        super().__init__()
        self.grouped, self.dim = grouped, dim
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN * (2 if dim == 0 else 1), WIDTH) / 4)

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(2, -1)
        ids, order = chosen.reshape(-1).sort(stable=True)
        ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)

        def product(rows, table):
            return torch._grouped_mm(rows, table, offs=ends) if self.grouped else (rows[:, None] @ table[ids])[:, 0]

        gate, up = product(x[order // 2], self.gate_up).chunk(2, self.dim)
        hidden = F.silu(gate) * up
        out = product(hidden if self.dim else hidden.repeat(2, 1), self.down) * scores.reshape(-1)[order].unsqueeze(-1)
        return x + out[order.argsort()].reshape(-1, 2, WIDTH).sum(1)


DTYPES = {True: torch.bfloat16, False: torch.float32}  # as torch multiplies groups


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "looked up"])
@pytest.mark.parametrize("devices", [2, 3])
def test_gate_and_up_in_one_tensor(grouped, devices):
    model = Gated(grouped)
    plan = run(model, torch.randn(12, WIDTH), {"e": devices}, split(model), DTYPES[grouped])
    assert kinds(plan) == ["all_reduce"]


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "looked up"])
def test_other_tokens_have_other_owners(grouped):
    """Parts along the tokens: one token's gate meets another's up, which lies elsewhere."""
    model = Gated(grouped, dim=0)
    plan = run(model, torch.randn(12, WIDTH), {"e": 2}, split(model), DTYPES[grouped])
    assert kinds(plan).count("all_reduce") + kinds(plan).count("all_gather") > 1


class SumBesideFeatures(nn.Module):
    """A product over the split features `k`, put beside features that another axis splits, of which a layer makes
    less."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 12))
        self.last = nn.Parameter(torch.randn(4, 12))

    def forward(self, x, beside):
        return torch.cat((beside, x @ self.weight.T), 1) @ self.last.T


def test_a_pending_sum_is_completed_before_devices_take_windows_of_it():
    torch.manual_seed(0)
    model, given = SumBesideFeatures().eval(), (torch.randn(5, 12), torch.randn(5, 6))
    made = mt.from_torch(torch.export.export(model, given), check=False)
    layout = {"weight": {"k": 1}, "last": {"n": 1}}
    ran = mt.distribute_module(made.mod, {"k": 2, "n": 3}, layout, weights=made.params, poison=True)
    with torch.no_grad():
        torch.testing.assert_close(ran(*given), model(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_of_owners_beside_a_sum_of_all_of_them(devices):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            rows = self.table[x.argmax(-1)]
            return torch.where(x[0, 0] > 0, rows.sum(), rows)

    torch.manual_seed(0)
    run(Chosen(), torch.randn(5, 6), {"e": devices}, {"table": {"e": 0}})
