"""Functions that end by calling themselves: loops that are planned once, right and as cheap as their steps one by one
(but for the first step, of which those know how its operands come)."""

import itertools

import pytest
import torch
import tvm
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from mesh_tensor.plan.loops import recursion_of
from mesh_tensor.plan.reader import read_graph
from tests import random_loops
from tests.random_modules.check import RIGHT

from .loop_modules import LOOPS, looped, unrolled


def data(loop, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in (*loop.carried, *loop.kept)]


def moved(run):
    return sum(step.bytes for step in run.program.steps)


def names(loop):
    shapes = {f"c{n}": shape for n, shape in enumerate(loop.carried)}
    return shapes | {f"k{n}": shape for n, shape in enumerate(loop.kept)}


def layouts(loop):
    """Each parameter split along each of its dims."""
    for name, shape in names(loop).items():
        yield from ({name: {"x": dim}} for dim in range(len(shape)))


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_right_and_as_cheap_as_their_steps(name):
    loop = LOOPS[name]
    mods, given = [make(loop, 4) for make in (looped, unrolled)], data(loop)
    expected = mt.run_sequential(mods[1], given)
    torch.testing.assert_close(mt.run_sequential(mods[0], given), expected)
    for layout, size in itertools.product(layouts(loop), (2, 3)):
        run, steps = (mt.distribute_module(mod, {"x": size}, layout, poison=True) for mod in mods)
        torch.testing.assert_close(run(*given), expected, msg=lambda text: f"{layout}: {text}")  # noqa: B023
        # One layout for all steps: where it turns in every step, or ends as another one, more is moved.
        assert name in ("turned", "same_twice") or moved(run) * 3 <= moved(steps) * 4, layout
        assert [step.count for step in run.program.loops] == [4]
    both = dict(zip(names(loop), itertools.cycle([{"x": 0, "y": 1}, {"y": 0}, {"x": 1}]), strict=False))
    both = {one: {a: d for a, d in at.items() if d < len(names(loop)[one])} for one, at in both.items()}
    run = mt.distribute_module(mods[0], {"x": 2, "y": 2}, both, poison=True)
    torch.testing.assert_close(run(*given), expected)


@pytest.mark.parametrize("number", range(8))
def test_random_loops(number):
    """`python -m tests.fuzz --of loops` makes more of them."""
    assert random_loops.run(random_loops.make_loop_case(number)) == RIGHT


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_steps(steps):
    """Of no step, what is carried is what came."""
    loop = LOOPS["swapped"]
    given = data(loop)
    run = mt.distribute_module(looped(loop, steps), {"x": 2}, {"c0": {"x": 0}})
    made = run(*given)
    torch.testing.assert_close(made, mt.run_sequential(looped(loop, steps), given))
    assert len(run.program.loops) == (steps > 1)


def test_counts_from_elsewhere():
    """Rows that are looked up beyond the first ones."""
    loop = LOOPS["recurrent"]
    given = data(loop)
    mod = looped(loop, 3, first=2)
    rows = slice(2, 5)
    state, made = given[0], []
    for row in given[2][rows]:
        state = torch.tanh(state @ given[1] + row)
        made.append(state)
    for layout in layouts(loop):
        run = mt.distribute_module(mod, {"x": 2}, layout, poison=True)
        with pytest.raises(mt.MeshTensorError, match="scatter_nd|index"):  # it puts rows 2 to 4 into three
            run(*given)


def test_planning_does_not_grow_with_steps():
    """A graph of as many nodes, however often they run; what is the same for all steps is gathered once, before."""
    loop = LOOPS["recurrent"]
    sizes = {}
    for steps in (2, 1000):
        long = loop.__class__(loop.carried, [(4, 4), (steps, 6, 4)], loop.rows, loop.step)
        run = mt.distribute_module(looped(long, steps), {"x": 2}, {"k0": {"x": 0}, "c0": {"x": 0}})
        sizes[steps] = len(run.plan.graph.nodes), len(run.program.steps), len(run.program.loops[0].body.steps)
        assert [step.kind for step in run.program.collectives] == ["all_gather"]
        assert run.program.loops[0].bytes == 0
    assert sizes[2] == sizes[1000]
    given = data(long)
    state = given[0]
    for row in given[2]:
        state = torch.tanh(state @ given[1] + row)
    torch.testing.assert_close(run(*given)[0], state, rtol=1e-4, atol=1e-4)


def test_explain_shows_the_loop():
    run = mt.distribute_module(looped(LOOPS["recurrent"], 4), {"x": 2}, {"c0": {"x": 1}})
    text = run.explain()
    assert "loop loop (call 1), 4 times: steps, on each device" in text
    carried = text[text.index("times: steps") :]
    assert "carried: " in carried
    assert "-> v1 S[1]" in carried
    assert "all_gather" in carried
    assert "4 times" in run.explain(short=True) or "loop" in run.explain(short=True)


def test_layouts_can_be_stated_inside():
    """What is stated of a carried value holds in every step, whatever comes before and after it."""
    loop = LOOPS["summed"]
    given = data(loop)
    mod = mt.annotate_module(looped(loop, 3), {"x": 2}, {"c0": {"x": 0}})
    mod = mt.annotate_module(mod, {"x": 2}, {"v1": {"x": 1}}, function="loop")
    run = mt.distribute_module(mod, {"x": 2}, poison=True)
    (step,) = run.program.loops
    assert str(run.program.values[step.carried[-1].now].sharding) == "S[1]"
    torch.testing.assert_close(run(*given), mt.run_sequential(looped(loop, 3), given))


@I.ir_module
class Halving:
    @R.function
    def main(x: R.Tensor((6, 4), "float32"), least: R.Tensor((), "float32")):
        cls = Halving
        r = cls.halved(x, least, R.const(0, "int64"))
        return r

    @R.function(private=True)
    def halved(x: R.Tensor((6, 4), "float32"), least: R.Tensor((), "float32"), n: R.Tensor((), "int64")) -> R.Tuple(
        R.Tensor((6, 4), "float32"), R.Tensor((), "float32"), R.Tensor((), "int64")
    ):
        cls = Halving
        total = R.sum(R.abs(x))
        small = R.less(total, least)
        if small:
            r = (x, total, n)
        else:
            half = R.multiply(x, R.const(0.5, "float32"))
            shared = R.divide(half, R.maximum(total, R.const(4.0, "float32")))
            new = R.add(half, shared)
            r = cls.halved(new, least, R.add(n, R.const(1, "int64")))
        return r


@pytest.mark.parametrize("least", [0.5, 3.0, 1e9])
def test_data_says_how_long(least):
    """The condition is a sum over all devices, which the steps and the ending take, too; perhaps there is no step."""
    x, least = torch.randn(6, 4), torch.tensor(least)
    expected = mt.run_sequential(Halving, [x, least])
    assert (int(expected[2]) == 0) is (float(least) > 1e6)
    for dim, size in itertools.product((0, 1), (2, 4)):
        run = mt.distribute_module(Halving, {"x": size}, {"x": {"x": dim}}, poison=True)
        kept, made = x.clone(), run(x, least)
        torch.testing.assert_close(made, expected)
        made[0].zero_()
        assert torch.equal(x, kept)
        (step,) = run.program.loops
        assert step.count is None
        assert [one.kind for one in step.test.steps if one.collective is one]


def test_deep_recursion_runs_in_one_frame():
    """run_sequential, too, has no limit on steps."""
    loop = LOOPS["swapped"]
    made = mt.run_sequential(looped(loop, 2500), data(loop))
    assert made[2].shape == (2500, 6, 4)


def test_branches_in_a_step():
    """A branch is the last to use what is carried, but for the next step."""
    lines = ["c = R.less(n, R.const(5, 'int64'))", "if c:", "    up = R.greater(R.sum(x), R.const(0.0, 'float32'))"]
    lines += ["    if up:", "        y = R.subtract(R.tanh(x), R.const(0.5, 'float32'))", "        z = R.add(y, x)"]
    lines += ["    else:", "        y = R.add(x, R.astype(n, 'float32'))", "        z = R.add(y, x)"]
    lines += ["    r = cls.f(R.multiply(z, x), R.add(n, R.const(1, 'int64')))", "else:", "    r = x", "return r"]
    mod, x = recursive(*lines), torch.rand(4, 4) * 0.2
    expected = x
    for n in range(5):
        bent = expected.tanh() - 0.5 if expected.sum() > 0 else expected + n
        expected = (bent + expected) * expected
    torch.testing.assert_close(mt.run_sequential(mod, [x, torch.tensor(0)]), expected)
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}}, poison=True)
    torch.testing.assert_close(run(x, torch.tensor(0)), expected)


def recursive(*lines, more=""):
    """A module whose function `f(x, n)` has this body."""
    text = "\n".join(
        [
            "@I.ir_module",
            "class M:",
            "    @R.function(private=True)",
            '    def f(x: R.Tensor((4, 4), "float32"), n: R.Tensor((), "int64")) -> R.Tensor((4, 4), "float32"):',
            "        cls = M",
            *(f"        {line}" for line in lines),
            "    @R.function",
            '    def main(x: R.Tensor((4, 4), "float32"), n: R.Tensor((), "int64")) -> R.Tensor((4, 4), "float32"):',
            "        cls = M",
            "        z = cls.f(x, n)",
            "        return z",
        ]
    )
    return tvm.script.from_source(text, {"I": I, "R": R})


REFUSED = {
    "twice": (
        ["c = R.less(n, R.const(3, 'int64'))", "if c:", "    a = cls.f(x, n)", "    r = cls.f(a, n)"]
        + ["else:", "    r = x", "return r"],
        "function 'f' calls itself",
    ),
    "used after": (
        ["c = R.less(n, R.const(3, 'int64'))", "if c:", "    a = cls.f(x, n)", "    r = R.add(a, a)"]
        + ["else:", "    r = x", "return r"],
        "function 'f' calls itself",
    ),
    "no end": (["r = cls.f(x, n)", "return r"], "function 'f' calls itself"),
    "both ways": (
        ["c = R.less(n, R.const(3, 'int64'))", "if c:", "    r = cls.f(x, n)", "else:", "    r = cls.f(x, n)"]
        + ["return r"],
        "function 'f' calls itself",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_recursion_is_refused(name):
    lines, message = REFUSED[name]
    with pytest.raises(mt.MeshTensorError, match=message) as error:
        mt.distribute_module(recursive(*lines), {"x": 2})
    assert "fix: end the function by an If of which one branch ends by the call" in str(error.value)


def test_gradients_need_a_number_of_steps():
    mod = recursive(
        *[
            "c = R.less(n, R.const(3, 'int64'))",
            "if c:",
            "    a = R.add(x, x)",
            "    m = R.add(n, R.const(1, 'int64'))",
        ],
        *["    r = cls.f(a, m)", "else:", "    r = x", "return r"],
    )
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}})
    x = torch.randn(4, 4)
    torch.testing.assert_close(run(x, torch.tensor(1)), x * 4)
    with pytest.raises(mt.MeshTensorError, match="function 'f' calls itself as long as data says times"):
        run(x.requires_grad_(), torch.tensor(1))


def test_no_local_view():
    run = mt.distribute_module(looped(LOOPS["turned"], 3), {"x": 2}, {"c0": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match=r"a loop \(loop \(call 1\), 3 times\) has no local view"):
        _ = run.local_module


def test_unrolled_graphs_have_no_loop():
    graph = read_graph(looped(LOOPS["turned"], 3), "main", mt.Mesh({"x": 1}), {})
    assert not graph.loops
    assert sum(node.call.name == "permute_dims" for node in graph.nodes) == 3
    found = recursion_of("loop", looped(LOOPS["turned"], 3)["loop"])
    assert found.counter([0, None, None]).last == 3
    assert found.counter([None, None, None]) is None
