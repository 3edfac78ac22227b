"""torch's cond: both branches are computed, and one is taken; gradients go through that one alone. Operators that run a
graph, and what they are made of."""

import copy
import operator

import pytest
import torch
from torch import nn
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import mesh_tensor as mt
from tests.importers.models import Function

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]


class Branched(nn.Module):
    """One of two layers; the other one's derivative is infinite where it is not taken."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.first, self.second, (x,))

    def first(self, x):
        return self.a(x).sin(), x.sum(0)

    def second(self, x):
        return self.b(x).abs() + (x * 0).sqrt(), x.mean(0)


def program_of(model, *inputs, **how):
    return torch.export.export(model, inputs, **how)


@pytest.mark.parametrize("sign", [1, -1])
def test_one_branch_is_taken(sign):
    torch.manual_seed(0)
    model, x = Branched(), torch.rand(4, 6) * sign
    module = mt.from_torch(program_of(model, x))
    for mesh, shardings in (
        ({"x": 2}, {"x": {"x": 0}, "a.weight": {"x": 0}}),
        ({"x": 3}, {"x": {"x": 1}, "b.weight": {"x": 1}}),
    ):
        run = mt.distribute_module(module, mesh, shardings, poison=True)
        torch.testing.assert_close(run(x), model(x))
        # Nothing chooses between a weight and itself where no gradient is taken.
        assert str(run.explain()).count("torch where") == 2


@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_are_those_of_the_branch_that_is_taken(sign):
    torch.manual_seed(0)
    model, x, target = Branched(), torch.rand(4, 6) * sign, torch.randn(4, 6)

    def loss(made, target):
        return ((made[0] - target) ** 2).mean() + made[1].sum()

    step = mt.training_step(model, loss, (x, target), optimizer="sgd", lr=0.5)
    run = mt.distribute_module(step, {"x": 2}, {"a.weight": {"x": 0}})
    own = copy.deepcopy(model)
    expected = loss(own(x), target)
    expected.backward()
    torch.optim.SGD(own.parameters(), lr=0.5).step()
    torch.testing.assert_close(run(x, target), expected.detach())
    state = run.state_dict()
    for name, weight in own.named_parameters():
        torch.testing.assert_close(state[name], weight.detach())


class Within(nn.Module):
    """A branch of a branch takes what both are given."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.rand(6))

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.inner, lambda y: (y @ self.w.T).sin() / self.b, (x,))

    def inner(self, x):
        return torch.cond(x.mean() > 0.3, lambda y: (y @ self.w).cos() * self.b, lambda y: y.sqrt() * self.b, (x,))


@pytest.mark.parametrize("scale", [1, 0.1, -1])
def test_gradients_of_branches_within_branches(scale):
    torch.manual_seed(0)
    model, x, target = Within(), torch.rand(4, 6) * scale, torch.randn(4, 6)
    step = mt.training_step(model, nn.functional.mse_loss, (x, target), optimizer="sgd", lr=0.5)
    own = copy.deepcopy(model)
    nn.functional.mse_loss(own(x), target).backward()
    for mesh, layout in (({"x": 2}, {"w": {"x": 0}}), ({"x": 3}, {"x": {"x": 0}, "b": {"x": 0}})):
        run = mt.distribute_module(step, mesh, layout, poison=True)
        run(x, target)
        for name, weight in own.named_parameters():
            moved = weight.detach() - (0 if weight.grad is None else 0.5 * weight.grad)
            torch.testing.assert_close(run.state_dict()[name], moved)


def nested(x):
    def inner(y):
        return torch.cond(y.mean() > 0.5, lambda z: z.cos(), lambda z: z.sin(), (y,))

    return torch.cond(x.sum() > 0, inner, lambda y: y - 1, (x,))


def within_a_loop(x):
    def step(n, y):
        return n + 1, torch.cond(y.sum() > 0, lambda z: z - 0.3, lambda z: z.cos(), (y,))

    return while_loop(lambda n, y: n < 4, step, (torch.tensor(0), x))[1]


def strict(x):
    return strict_mode(lambda y: y.sin() + 1, (x,))


def grown(y):
    """Ends for positive sums only."""
    return while_loop(lambda z: z.sum() < 100, lambda z: (z * 2,), (y,))[0]


def endless_where_not_taken(x):
    return torch.cond(x.sum() > 0, lambda y: grown(y), lambda y: -grown(-y), (x,))


def endless_within_steps(x):
    def step(n, y):
        return n + 1, grown(y) / 10

    def counted(y):
        return while_loop(lambda n, y: n < 2, step, (torch.tensor(0), y))[1]

    return torch.cond(x.sum() > 0, counted, lambda y: y - 1, (x,))


FUNCTIONS = {
    "nested": nested,
    "within a loop": within_a_loop,
    "strict": strict,
    "endless where not taken": endless_where_not_taken,
    "endless within steps": endless_within_steps,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_within_graphs(name):
    model = Function(FUNCTIONS[name])
    for x in (torch.rand(4, 6), -torch.rand(4, 6)):
        program = program_of(model, x)
        run = mt.distribute_module(mt.from_torch(program), {"x": 3}, {}, poison=True)
        torch.testing.assert_close(run(x), model(x))


ELEMENTS = {
    "looked up": lambda x, at: x[at],
    "embedded": lambda x, at: nn.functional.embedding(at, x),
    "put": lambda x, at: x.index_put((at,), torch.ones(6)),
    "put by torch": lambda x, at: x.put(at, torch.ones(3)),
    "divided by": lambda x, at: x[:3] * (6 // (at - 9))[:, None],
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_are_refused_where_the_branch_is_taken(name):
    """What the other branch would make of them is no matter."""
    function, torch_refuses = ELEMENTS[name], (IndexError, RuntimeError)
    model = Function(lambda x, at, ask: torch.cond(ask, function, lambda x, at: function(x, at * 0), (x, at)))
    x, at, yes = torch.randn(8, 6), torch.tensor([1, 7, 0]), torch.tensor([True])
    run = mt.distribute_module(mt.from_torch(program_of(model, x, at, yes)), {"x": 2}, {"inputs_0": {"x": 1}})
    outside = torch.tensor([1, 9, 77])
    torch.testing.assert_close(run(x, at, yes), model(x, at, yes))
    torch.testing.assert_close(run(x, outside, ~yes), model(x, outside, ~yes))
    with pytest.raises(torch_refuses):
        model(x, outside, yes)
    with pytest.raises(mt.MeshTensorError, match="divided by 0" if name == "divided by" else "77"):
        run(x, outside, yes)


@pytest.mark.parametrize("compare", [operator.eq, operator.le])
def test_open_sizes_choose(compare):
    """Whatever the example's size was."""
    model = Function(lambda x: torch.cond(compare(x.shape[0], 3), lambda y: y.sin(), lambda y: y.cos(), (x,)))
    program = program_of(model, torch.randn(4, 6), dynamic_shapes={"inputs": ({0: torch.export.Dim("n", min=1)},)})
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"inputs_0": {"x": 1}})
    for size in (1, 3, 4):
        x = torch.randn(size, 6)
        torch.testing.assert_close(run(x), x.sin() if compare(size, 3) else x.cos())


def biased(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1 * (h + 1))


def causal(q, k, v):
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 12, 12, device="cpu")
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("attention", [biased, causal])
def test_flex_attention(attention):
    torch.manual_seed(0)
    heads = 4 if attention is biased else 2
    q, k, v = torch.randn(2, 4, 12, 8), torch.randn(2, heads, 12, 8), torch.randn(2, heads, 12, 8)
    module = mt.from_torch(program_of(Function(attention), q, k, v))
    expected = attention(q, k, v)
    for mesh, shardings in (({"x": 2}, {"inputs_0": {"x": 1}}), ({"x": 3}, {"inputs_1": {"x": 2}})):
        run = mt.distribute_module(module, mesh, shardings, poison=True)
        torch.testing.assert_close(run(q, k, v), expected)


@torch.library.custom_op("mesh_tensor_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("mesh_tensor_tests::grow", mutates_args=("x",))
def grow(x: torch.Tensor) -> None:
    x.add_(1)


def growing(x):
    y = x * 1
    grow(y)
    return y


def printing(x):
    torch._higher_order_ops.print("{}", 1)
    return x + 1


def whole(x):
    small = x.to(torch.int8)
    return out_dtype(torch.ops.aten.mm.default, torch.int32, small, small.t())


REFUSED = {
    "an operator of one's own": (twice, r"mesh_tensor_tests.twice.default is not known[\s\S]*run_decompositions"),
    "one that writes": (growing, r"auto_functionalized_v2 is not known[\s\S]*gives its results instead of writing"),
    "a print": (printing, r"print has effects besides its results[\s\S]*leave out what prints"),
    "products of another dtype": (whole, r"out_dtype is not known[\s\S]*cast the operands"),
    "random": (lambda x: x + torch.rand_like(x), r"rand_like.default is random[\s\S]*give them to it as an input"),
    "sparse": (lambda x: torch.sparse.mm(x.to_sparse(), x.t()), r"_to_sparse.default is not known[\s\S]*dense"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
        r"quantize_per_tensor.default can't be imported: a tensor of torch.qint8[\s\S]*whole numbers and their scales",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_way_out(name):
    function, message = REFUSED[name]
    with pytest.raises(mt.MeshTensorError, match=message):
        mt.from_torch(program_of(Function(function), torch.randn(4, 6)))


def test_the_way_out_of_an_operator_of_ones_own():
    x = torch.randn(4, 6)
    program = program_of(Function(twice), x)
    program = program.run_decompositions({torch.ops.mesh_tensor_tests.twice.default: lambda x: x * 2})
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"inputs_0": {"x": 0}})
    torch.testing.assert_close(run(x), 2 * x)
