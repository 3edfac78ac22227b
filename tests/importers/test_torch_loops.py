"""torch's scan, while_loop and map: loops that are planned once. Gradients unroll them."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.importers import torch_decompositions

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(4, 4) * 0.4)

    def forward(self, x):
        return self.function(scan, self.weight, x)


def loop(step, state, xs, dim=0, reverse=False):
    """What scan gives, step by step."""
    columns = [x.unbind(dim) for x in (xs if isinstance(xs, tuple) else (xs,))]
    rows, made = list(zip(*columns, strict=True)), []
    for row in rows[::-1] if reverse else rows:
        state, more = step(state, row if isinstance(xs, tuple) else row[0])
        made.append(more if isinstance(more, tuple) else (more,))
    stacked = tuple(torch.stack(column[::-1] if reverse else column, dim) for column in zip(*made, strict=True))
    return state, stacked


def recurrent(scan, w, x, **how):
    """A recurrent layer, of (steps, batch, features)."""

    def step(state, row):
        new = torch.tanh(state @ w + row)
        return new, new * 2

    return scan(step, x.select(how.get("dim", 0), 0) * 0, x, **how)


def decayed(scan, w, x):
    """Two states, two inputs of each step, two results; softmax and split are taken apart further."""

    def step(states, rows):
        total, peak = states
        row, rate = rows
        left, right = (row @ w).softmax(-1).split([1, 3], -1)
        total, peak = total * rate + torch.cat([right, left], -1), torch.maximum(peak, row)
        return (total, peak), (total + peak, peak.sum(-1))

    states = x.new_zeros(x.shape[1:]), x.new_full(x.shape[1:], -9.0)
    return scan(step, states, (x, x.sigmoid()))


def handed_on(scan, w, x):
    """What steps give is a state before them, an input, and nothing of either."""
    return scan(lambda state, row: (state + row, (state.clone(), row.clone(), w * 3)), x[0] @ w, x)


def nested(scan, w, x):
    """A scan in the body of one, beside something that is written in place."""

    def outer(state, row):
        inner, sums = scan(lambda total, part: (total + part, total * part), state[0] * 1, row + state)
        (sums,) = tensors(sums)
        return state + inner, sums

    y = x.clone()
    y.add_(1)
    return scan(outer, x[0] @ w, y)


def nothing_besides(scan, w, x):
    state, _ = scan(lambda state, row: (F.silu(state @ w) + row, torch.zeros(0)), x[0] * 0, x)
    return state


FUNCTIONS = {
    "recurrent": recurrent,
    "backwards": lambda scan, w, x: recurrent(scan, w, x, reverse=True),
    "along another dim": lambda scan, w, x: recurrent(scan, w, x, dim=1),
    "several states": decayed,
    "handed on": handed_on,
    "nested": nested,
    "nothing besides": nothing_besides,
    "one step": lambda scan, w, x: recurrent(scan, w, x[:1]),
}


def exported(function, *, steps=5, **how):
    torch.manual_seed(0)
    torch._dynamo.reset()  # it remembers which sizes were open
    model, x = Of(function), torch.randn(steps, 3, 4)
    return model, x, torch.export.export(model, (x,), **how)


def tensors(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scans_are_loops(name):
    """Right with steps, rows and features split; gradients, of steps that are unrolled, too."""
    model, x, program = exported(FUNCTIONS[name])
    module = mt.from_torch(program)
    x = torch.randn_like(x).requires_grad_()
    expected = tensors(model.function(loop, model.weight, x))
    for dim in range(3):
        run = mt.distribute_module(module, {"x": 2}, {"x": {"x": dim}}, weights={}, poison=True)
        weight = model.weight.detach().clone()
        torch.testing.assert_close(tensors(run(x.detach(), weight=weight)), expected)
        assert len(run.program.loops) == (name != "one step")
    if name in ("several states", "handed on", "nested"):
        seeds = [torch.randn_like(y) for y in expected]
        wanted = torch.autograd.grad(expected, [x, model.weight], seeds)
        found = tensors(run(x, weight=weight.requires_grad_()))
        torch.testing.assert_close(torch.autograd.grad(found, [x, weight], seeds), wanted)


def test_steps_are_taken_apart_once(monkeypatch):
    traced, make = [], torch_decompositions.make_fx
    program = exported(decayed)[2]
    monkeypatch.setattr(torch_decompositions, "make_fx", lambda *a, **k: traced.append(1) or make(*a, **k))
    mod = mt.from_torch(program, check=False).mod
    (name,) = [var.name_hint for var in mod.get_global_vars() if var.name_hint != "main"]
    text = mod[name].script()
    assert text.count("R.exp(") + text.count("R.nn.softmax(") == 1
    assert len(traced) < 10


def counted(scan, w, x):
    return while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, torch.tanh(y @ w)), (torch.tensor(0), x))


def as_data_say(scan, w, x):
    """The condition is a sum over what is split."""
    return while_loop(
        lambda n, y: (y.norm() > 0.1) & (n < 50), lambda n, y: (n + 1, y @ w * 0.5), (x.sum().long() * 0, x)
    )


def exchanged(scan, w, x):
    return while_loop(lambda n, a, b: n < 3, lambda n, a, b: (n + 1, b.clone(), a + n), (torch.tensor(0), x, x * 2))


def within(scan, w, x):
    """As many inner steps as the outer count says."""

    def body(n, y):
        _, z = while_loop(lambda m, z: m < n + 1, lambda m, z: (m + 1, torch.tanh(z @ w)), (n * 0, y))
        return n + 1, z + y

    return while_loop(lambda n, y: n < 3, body, (torch.tensor(0), x))


WHILE = {  # with how many loops of known length
    "counted": (counted, [3]),
    "as data say": (as_data_say, [None]),
    "exchanged": (exchanged, [3]),
    "within": (within, [3]),
}


@pytest.mark.parametrize("name", WHILE)
def test_while_loops(name):
    function, counts = WHILE[name]
    model, x, program = exported(function)
    module, x = mt.from_torch(program), torch.randn_like(x)
    expected = tensors(model(x))
    for dim, size in ((0, 2), (1, 2), (2, 3)):
        run = mt.distribute_module(module, {"x": size}, {"x": {"x": dim}}, poison=True)
        torch.testing.assert_close(tensors(run(x)), expected)
        assert [step.count for step in run.program.loops] == counts


def test_open_sizes():
    """The batch's size, and how many steps there are, are known at the call."""
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = exported(recurrent, dynamic_shapes=(sizes,))[2]
    model = Of(recurrent)
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"x": {"x": 1}}, weights={})
    for steps, batch in ((5, 4), (30, 7), (1, 4)):
        x = torch.randn(steps, batch, 4)
        expected = tensors(model.function(loop, model.weight, x))
        torch.testing.assert_close(tensors(run(x, weight=model.weight.detach())), expected)
        assert [step.count for step in run.program.loops] == ([steps] if steps > 1 else [])


def uniform(scan, w, x):
    """What torch.vmap can record is computed for all rows at once."""
    return mapped(lambda row, m: torch.sin(row @ m).softmax(-1), x, w)


def counted(scan, w, x):
    """A loop within has no rule in torch.vmap: row by row."""

    def rounds(row, m):
        return while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, torch.tanh(y @ m)), (torch.tensor(0), row))[1]

    return mapped(rounds, x, w)


@pytest.mark.parametrize(("function", "loops"), [(uniform, 0), (counted, 1)])
@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}])
def test_map(function, loops, mesh):
    model, x, program = exported(function)
    expected = tensors(program.module()(x))
    for shardings in ({"x": {"x": 0}}, {"x": {"x": 1}, "weight": {"x": 0}}):
        run = mt.distribute_module(mt.from_torch(program), mesh, shardings, poison=True)
        torch.testing.assert_close(tensors(run(x)), expected)
        assert len(run.program.loops) == loops
