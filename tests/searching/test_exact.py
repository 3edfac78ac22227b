"""The exact referee: integer programming, beside all ways there are, and beside what a search finds."""

from itertools import product

import pytest
import torch
from torch import nn
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.plan.ir import leaves
from mesh_tensor.plan.reshards import cost_of
from mesh_tensor.program.plan_module import PlanOptions, read_module
from mesh_tensor.searching.exact import change_times, exact_price, options_of
from tests.plan.loop_modules import Loop, looped

pytest.importorskip("scipy")
X = Mesh({"x": 4})


class Perceptron(nn.Module):
    def __init__(self, width, residual):
        super().__init__()
        self.up, self.down, self.residual = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), residual

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        return x + y if self.residual else y


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512, 64))

    def forward(self, x):
        return torch.relu(x) @ self.weight


def imported(model, rows, width):
    return mt.from_torch(torch.export.export(model, (torch.zeros(rows, width),)), check=False)


def read(module, mesh, machine):
    return read_module(module.mod, "main", mesh, {}, PlanOptions(machine=mt.Machine.preset(machine)))


def brute_force(graph, atoms):
    """All ways to run all nodes: parameters come, and results stay, as is cheapest; one change per needed layout. What
    loops carry lies alike before every step and after it."""
    change, best, times = graph.prices.change, None, change_times(graph)
    for chosen in product(*(options_of(node, graph, atoms) for node in graph.nodes)):
        price, given, needed = 0, {}, {}
        for node, option in zip(graph.nodes, chosen, strict=True):
            price += option.price
            given |= zip(node.outputs, option.produced, strict=True)
            for value, layout in zip(node.inputs, option.needed, strict=True):
                needed.setdefault(value, set()).add(layout)
        if any(given[now] != given[end] for now, _, end in graph.carried()):
            continue
        for value, layouts in needed.items():
            shape, dtype = atoms.shape(value), value.type.dtype
            starts = [given[value]] if value in given else [layout for layout in layouts if not layout.partial]
            if not starts:
                break
            once = min(sum(change(shape, dtype, start, to) for to in layouts) for start in starts)
            price += once * times.get(value, 1)
        else:
            for value in leaves(graph.result):
                if given[value].partial:
                    axis = given[value].partial[0][0]
                    ends = [mt.Sharding.make(graph.mesh, 2, to) for to in ({}, {axis: 0}, {axis: 1})]
                    shape, dtype = atoms.shape(value), value.type.dtype
                    price += min(change(shape, dtype, given[value], end) for end in ends)
            best = price if best is None else min(best, price)
    return best


@pytest.mark.parametrize("machine", ["cpu", "h100"])
@pytest.mark.parametrize("rows", [16, 2048])
def test_all_ways_of_a_tiny_graph(rows, machine):
    graph, atoms = read(imported(Product(), rows, 512), X, machine)
    made = exact_price(graph, atoms)
    assert made.price == pytest.approx(brute_force(graph, atoms), rel=1e-6)
    assert made.bound == pytest.approx(made.price, rel=1e-6)


@pytest.mark.parametrize(("rows", "width", "residual"), [(16, 512, False), (64, 64, True), (2048, 256, True)])
def test_a_search_finds_what_is_proven_to_be_the_best(rows, width, residual):
    module = imported(Perceptron(width, residual), rows, width)
    found = mt.search(module, 4, "h100x4", meshes=[dict(X.shape)])
    assert min(found.over_exact(strategy) for strategy in found.strategies[:2]) == pytest.approx(1.0, rel=1e-6)


def step(bb, at, carried, kept):
    return [bb.emit(relax.op.nn.relu(bb.emit(relax.op.matmul(carried[0], kept[0]))))], []


@pytest.mark.parametrize(("rows", "width"), [(16, 1024), (4096, 64)])
def test_all_ways_of_a_loop(rows, width):
    mod = looped(Loop([(rows, width)], [(width, width)], [], step), 5)
    options = PlanOptions(machine=mt.Machine.preset("h100"))
    graph, atoms = read_module(mod, "main", X, {}, options, loops=True)
    assert graph.loops
    made = exact_price(graph, atoms)
    assert made.price == pytest.approx(brute_force(graph, atoms), rel=1e-6)
    whole = cost_of(mt.distribute_module(mod, X, machine="h100").plan.explicit)
    # Every step of every device works on its rows alone; nobody splits the count, a number.
    assert whole / 4 < made.price < whole / 4 * 1.0001
    found = mt.search(mod, 4, "h100x4", meshes=[dict(X.shape)])
    assert found.over_exact() >= 1 - 1e-6


def test_changes_in_a_loop_are_made_with_every_step():
    mod = looped(Loop([(64, 64)], [(64, 64)], [], step), 5)
    graph, _ = read_module(mod, "main", X, {}, PlanOptions(machine=mt.Machine.preset("h100")), loops=True)
    times = change_times(graph)
    (now, then, end) = next(carried for carried in graph.carried() if carried[0].type.shape == (64, 64))
    assert (times[now], times[then], times[end]) == (5, 5, 1)


def test_without_time_there_is_no_answer():
    graph, atoms = read(imported(Perceptron(64, True), 64, 64), Mesh({"x": 2, "y": 2}), "h100")
    with pytest.raises(mt.MeshTensorError, match=r"no plan was found in 1e-06 s"):
        exact_price(graph, atoms, seconds=1e-6)
