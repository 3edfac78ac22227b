"""What a plan is priced by: the machine that it is for changes what is sent, never the result."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.base.machine import Link
from mesh_tensor.plan.prices import PRICES, prices_on
from mesh_tensor.plan.reshards import cost_of

X = mt.Mesh({"x": 2})
LINKED = mt.Machine.preset("h100")
SLOW = replace(LINKED, name="slow links", links=(Link("wire", None, rate=1e6, start=1e-2),))
FREE = replace(LINKED, name="free links", links=(Link("wire", None, rate=1e15, start=0.0),))


class Product(nn.Module):
    def forward(self, x, w):
        return x @ w


def _module():
    example = torch.randn(64, 256), torch.randn(256, 8)
    return mt.from_torch(torch.export.export(Product(), example), check=False), example


def _planned(machine):
    """A product whose operands are split along what it sums over, and whose result is to be whole."""
    module, example = _module()
    stated = {"x": {"x": 1}, "w": {}, "lv": {}}
    return mt.distribute_module(module, X, stated, machine=machine), example


def _sent(run):
    return [(step.kind, step.bytes) for step in run.program.collectives]


def test_nothing_said_is_the_processor_that_plans_are_made_for():
    assert prices_on(X, None) is prices_on(X, mt.Machine.preset("cpu")) is PRICES
    assert prices_on(X, LINKED) is prices_on(X, mt.Machine.preset("h100"))


@pytest.mark.parametrize("machine", [None, SLOW, FREE, "h100x2", "laptop"])
def test_the_result_is_the_same_on_every_machine(machine):
    run, (x, w) = _planned(machine)
    torch.testing.assert_close(run(x, w), x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("machine", "sent", "flops"),
    [
        (None, ["all_gather"], 1),
        (SLOW, ["all_gather"], 1),
        (FREE, ["slice", "all_reduce"], 2),
        ("h100x2", ["all_gather"], 1),
    ],
)
def test_a_kernel_repeats_work_unless_links_are_free(machine, sent, flops):
    """To gather A takes half the bytes of an all-reduce of C, and twice the work."""
    made = mt.compile(mt.annotate(matmul(64, 64, 64), X, {"A": {"x": 1}, "B": {}, "C": {}}), machine=machine)
    assert [step.kind for step in made.program.collectives] == sent
    assert [step.flops for step in made.program.kernels] == [2 * 64**3 // flops]
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    torch.testing.assert_close(made(a, b), a @ b, rtol=1e-4, atol=1e-4)


def test_a_module_sends_more_in_fewer_messages_where_these_are_what_takes_long():
    """An all-reduce of 2 KB goes around twice, to gather 32 KB takes one message of NVLink's."""
    assert _sent(_planned(None)[0]) == [("slice", 0), ("all_reduce", 2048)]
    assert _sent(_planned("h100x2")[0]) == [("all_gather", 32768)]
    assert mt.simulate(_planned("h100x2")[0], "h100x2").time < mt.simulate(_planned(None)[0], "h100x2").time


def test_simulating_an_annotated_kernel_plans_it_for_the_machine():
    func = mt.annotate(matmul(64, 64, 64), X, {"A": {"x": 1}, "B": {}, "C": {}})
    planned = [mt.simulate(func, FREE), mt.simulate(mt.compile(func), FREE)]
    assert [[s.kind for s in made.program.collectives] for made in planned] == [["slice", "all_reduce"], ["all_gather"]]


def test_prices_are_the_times_of_simulated_collectives():
    """What a plan's changes of layout cost on a machine is what they take there."""
    run, _ = _planned("h100x2")
    sim = mt.simulate(run, "h100x2")
    sent = sum(group.seconds for group in sim.groups() if group.stream == "NVLink")
    worked = sum(max(0.0, s.end - s.start) for s in sim.steps if s.kind == "matmul")
    assert sent * 1e12 <= cost_of(run.plan.explicit) <= (sent + worked) * 1e12


def test_axes_over_faster_links_are_cheaper():
    mesh = mt.Mesh({"out": 8, "in": 8})
    prices = prices_on(mesh, mt.Machine.preset("h100"))
    whole = mt.Sharding.make(mesh, 1, {})
    near, far = (prices.change((1 << 22,), "float32", mt.Sharding.make(mesh, 1, {a: 0}), whole) for a in ("in", "out"))
    assert near < far
    assert PRICES.change((1 << 22,), "float32", mt.Sharding.make(mesh, 1, {"in": 0}), whole) == PRICES.change(
        (1 << 22,), "float32", mt.Sharding.make(mesh, 1, {"out": 0}), whole
    )


def test_what_is_no_machine_is_refused():
    module, _ = _module()
    kernel = mt.annotate(matmul(64, 64, 64), X, {"A": {"x": 0}})
    for planned in (lambda: mt.distribute_module(module, X, machine=3), lambda: mt.compile(kernel, machine=3)):
        with pytest.raises(mt.MeshTensorError, match=r"3 is no machine[\s\S]*'h100x16'"):
            planned()
    with pytest.raises(mt.MeshTensorError, match="there is no machine 'h101'"):
        mt.distribute_module(module, X, machine="h101")


def test_a_machine_that_lacks_a_rate_or_a_link_is_refused_by_name():
    module, _ = _module()
    rates = replace(LINKED, name="no float32", flops={"bfloat16": 1e14})
    links = replace(LINKED, name="one node", links=LINKED.links[:1])
    stated = {"x": {"x": 1}, "w": {}, "lv": {}}
    with pytest.raises(mt.MeshTensorError, match=r"no rate of operations on float32[\s\S]*machine 'no float32'"):
        mt.distribute_module(module, X, stated, machine=rates)
    with pytest.raises(mt.MeshTensorError, match=r"nothing connects 16 devices[\s\S]*at most 8 devices"):
        mt.distribute_module(module, {"x": 16}, stated, machine=links)
    with pytest.raises(mt.MeshTensorError, match=r"16 devices, the machine 8"):
        mt.distribute_module(module, {"x": 16}, stated, machine="h100x8")
