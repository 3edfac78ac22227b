"""Rows that masks choose: all are computed, and what becomes of those that were chosen is what torch makes of them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.base.errors import MeshTensorError


class Model(nn.Module):
    """`body`, with a layer, and a table."""

    def __init__(self, body):
        super().__init__()
        self.body, self.layer, self.table = body, nn.Linear(4, 4), nn.Embedding(5, 4)

    def forward(self, *given):
        return self.body(self, *given)


def rows_put_back(model, x):
    y, mask = x.clone(), x[:, 0] > 0
    y[mask] = torch.tanh(model.layer(x[mask]))
    y[mask] += x[mask].mean(-1, keepdim=True)
    y[:, x[0] > 0] *= 2
    return y


def rows_in_other_shapes(model, x):
    y, mask = x.clone(), x[:, 0] > 0
    h = x[mask]
    k = (h @ model.layer.weight).softmax(-1) + F.layer_norm(h, (4,))
    z = torch.cat([h, k, h.new_zeros(h.shape[0], 2)], -1).view(-1, 2, 5).transpose(1, 2)
    best, where = z.sum(-1)[:, :4].max(-1)
    y[mask] = best[:, None] + h.gather(1, where[:, None].expand(-1, 4) % 4)
    return y


def elements(model, x):
    y = torch.zeros_like(x)
    rows, columns = torch.where(x.T > 0)
    y[columns, rows] = x[columns, rows].exp()
    return y, x.masked_select(x > 0).sum(), x[x > 0].mean(), x[x[:, 1] > 0].mean(0), (x[x > 0] > 1).sum()


def nothing_chosen(model, x):
    y, mask = x.clone(), x[:, 0] > 100
    y[mask] = model.layer(x[mask])
    return y, x[mask].mean(), x[mask].sum(0)


def added_at_places(model, x, ids):
    places = torch.nonzero(x[:, 0] > 0).squeeze(-1)
    return torch.zeros(5, 4).index_add(0, ids[places] % 5, model.layer(x[places]) + model.table(ids[places].abs() % 5))


def ids_that_mean_nothing(model, x, ids):
    known, made = ids >= 0, torch.zeros(6, 4)
    made[known] = model.table(ids[known])
    return made, F.cross_entropy(x[known], ids[known].clamp(max=3))


def edges_and_loops(model, x, edges, weights):
    """As graph layers do it: loops of a graph are taken out, and one is added to each node, with its weight."""
    others, loop = edges[0] != edges[1], weights.new_ones(6)
    loop[edges[0][~others]] = weights[~others]
    weights = torch.cat([weights[others], loop])
    start, end = torch.cat([edges[:, others], torch.arange(6).expand(2, 6)], 1)
    degree = torch.zeros(6).scatter_add(0, end, weights)
    messages = model.layer(x)[start] * (weights / degree[end])[:, None]
    most = torch.zeros(6).scatter_reduce(0, end, messages[:, 0], "amax", include_self=False)
    scores = (messages[:, 0] - most[end]).exp()
    weights[start == end] *= 2
    return torch.zeros(6, 4).index_add(0, end, messages * (scores * weights)[:, None]), most


def rows_of_experts(model, x):
    """As Mistral's and DeepSeek's own code has it: a row is among those of an expert once, at most."""
    y, chosen = torch.zeros_like(x), model.layer(x).topk(2).indices
    order, z = x.argsort(0, descending=True)[:2], x.clone()  # (2, columns)
    for expert in range(3):
        rows, slots = torch.where(chosen == expert)
        y[rows] += model.layer(x[rows]) * (slots[:, None] + expert)
    places, columns = torch.where(order == 1)
    z[3, columns] = x[places, columns]
    z.T[columns] *= 7.0
    return y, z


def rows_together(model, x):
    h, flags = x[x[:, 0] > 0], x[x[:, 1] > 0] > 1
    largest, where = h.max(0)
    made = h.new_zeros(6, 4)
    made[x[:, 0] > 0] = h.cumsum(0) + h.softmax(0) + h.log_softmax(0)
    far = (h.var(0), h.std(), x[x > 0].std(), h[:, 0].argmin(), h.prod(0), h.amin(), h.amax((0, 1)))
    return largest, where, made, flags.any(), flags.all(0), (h - torch.inf).max(0)[1], *far


def numbers_of_data(model, x):
    h, most = x[x[:, 0] > 0], x.abs().max().item()
    total = h.sum(0) / h.shape[0] + (x > 0).sum().item() / x.abs()
    made = torch.full((3,), most) * h.numel() + (most * 3 > x[0, :3])
    loss = h.square().sum() / max(1, (x[:, 0] > 0).sum().item())
    return total, made, loss, (x * 5).long() * h.shape[0] + (x.half() * most).float().round(), h.shape[0] - x


def rows_of_known_number(model, x, ids):
    y = model.table(ids.clamp(min=0))
    y[ids < 0] = x[:2] + 0
    y[(ids == 0)[:, None].expand(6, 4)] = x[4]
    return y, x[ids < 0] + x[:2]


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
IDS = torch.tensor([3, -100, 0, 4, -100, 2])
EDGES = torch.tensor([[0, 3, 2, 5, 1, 1, 0], [1, 3, 4, 5, 1, 0, 4]])


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (rows_put_back, (X,)),
        (rows_in_other_shapes, (X,)),
        (rows_of_experts, (X,)),
        (elements, (X,)),
        (nothing_chosen, (X,)),
        (added_at_places, (X, IDS)),
        (ids_that_mean_nothing, (X, IDS)),
        (rows_together, (X,)),
        (numbers_of_data, (X,)),
        (edges_and_loops, (X, EDGES, torch.rand(7) + 0.5)),
        (rows_of_known_number, (X, IDS)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_as_torch(body, given):
    torch.manual_seed(0)
    model = Model(body).eval()
    module = mt.from_torch(torch.export.export(model, given))
    inputs = [param.name_hint for param in module.mod["main"].params][: len(given)]
    run = mt.distribute_module(module, {"x": 2}, {name: {"x": 0} for name in inputs}, poison=True)
    others = tuple(value.flip(0) for value in given)
    with torch.no_grad():
        for arguments in (given, others):
            torch.testing.assert_close(run(*arguments), model(*arguments), rtol=1e-4, atol=1e-5, equal_nan=True)


class Experts(nn.Module):
    """As transformers' mixtures of experts were written: each expert is given the tokens that chose it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8)) for _ in range(3))

    def forward(self, x):
        tokens = x.view(-1, 8)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, dim=-1)
        masks, made = F.one_hot(chosen, 3).permute(2, 1, 0), torch.zeros_like(tokens)
        for mask, expert in zip(masks, self.experts, strict=True):
            number, token = torch.where(mask)
            made.index_add_(0, token, expert(tokens[token]) * weights[token, number, None])
        return made.view_as(x)


def test_experts_of_a_split_batch_move_nothing_and_train():
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(4, 3, 8)
    module = mt.from_torch(torch.export.export(model.eval(), (x,)))
    run = mt.distribute_module(module, {"x": 2}, {"x": {"x": 0}}, poison=True)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    assert "all_" not in run.explain()
    line = "3 masks: 72 rows are computed, of which torch computes those that are chosen (1 of 3, where masks share"
    assert line in run.explain()
    assert line in run.explain(short=True)

    step = mt.training_step(copy.deepcopy(model), F.mse_loss, (x, x), optimizer="sgd", lr=1.0)
    run = mt.distribute_module(step, {"x": 3}, {"x": {"x": 0}}, poison=True)
    run(x, x)
    assert line in run.explain()
    F.mse_loss(model(x), x).backward()
    for name, value in model.named_parameters():
        meant = value.detach() - value.grad
        torch.testing.assert_close(run.state_dict()[name], meant, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "left_out"),
    [
        (lambda model, x: -torch.log(model.layer.weight[:, 0].abs() * x[x[:, 0] > 0]).sum(), 0.0),
        (lambda model, x: (x[x > 0] / x[x > 0].sqrt()).mean() + model.layer.weight.sum(), 0.0),
        (lambda model, x: (h := x[~torch.isnan(x[:, 0])]).sum() + model.layer(h).square().mean(), torch.nan),
        (lambda model, x: (h := x[torch.nonzero(x[:, 0] > 0)[:, 0]] @ model.layer.weight).norm(dim=1).sum(), 0.0),
    ],
)
def test_rows_that_are_left_out_have_no_part_in_gradients(body, left_out):
    model, x = Model(body), torch.rand(6, 4) + 0.5
    x[1::2] = left_out
    given = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(given), [given, model.layer.weight])
    module = mt.from_torch(torch.export.export(model, (x,)))
    made = mt.gradient(module, [module.mod["main"].params[0].name_hint, "layer.weight"])
    for layouts in ({}, {"layer.weight": {"x": 1}}, {module.mod["main"].params[0].name_hint: {"x": 0}}):
        _, gradients = mt.distribute_module(made, {"x": 2}, layouts, poison=True)(x)
        torch.testing.assert_close(gradients, expected)


def test_gradients_of_edges_and_loops():
    model, weights = Model(edges_and_loops), torch.rand(7) + 0.5
    model.forward = lambda *given: model.body(model, *given)[0].square().sum()
    given = X.clone().requires_grad_()
    expected = torch.autograd.grad(model(given, EDGES, weights), [given, model.layer.weight])
    module = mt.from_torch(torch.export.export(model, (X, EDGES, weights)))
    x, edges, _ = (param.name_hint for param in module.mod["main"].params[:3])
    made = mt.gradient(module, [x, "layer.weight"])
    for layouts in ({x: {"x": 0}}, {edges: {"x": 1}, "layer.weight": {"x": 1}}):
        _, gradients = mt.distribute_module(made, {"x": 2}, layouts, poison=True)(X, EDGES, weights)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [6, -7])
def test_places_of_chosen_rows_that_are_not_there_are_refused(place):
    def body(model, x, places):
        y, chosen = x.clone(), places != 0
        y[places[chosen]] = x[chosen]
        return y

    places = torch.tensor([0, 5, -6, 0, 1, 0])
    model = Model(body)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (X, places))), {"x": 2}, {})
    torch.testing.assert_close(run(X, places), model(X, places))
    places[1] = place
    with pytest.raises(MeshTensorError, match="keep indices inside the dim"):
        run(X, places)


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x: model.layer(x[x[:, 0] > 0]).std(0).sum() / x[x[:, 0] > 0].shape[0],
        lambda model, x: (model.layer(x[x[:, 0] > 0]).softmax(0) * x[x[:, 0] > 0]).amax(0).sum(),
        lambda model, x: model.layer(x[x[:, 0] > 0]).prod() * (x > 0).sum().item(),
    ],
)
def test_gradients_of_rows_together(body):
    model, x = Model(body), X.clone()
    x[x[:, 0] <= 0] = torch.nan
    (expected,) = torch.autograd.grad(model(x), [model.layer.weight])
    made = mt.gradient(mt.from_torch(torch.export.export(model, (x,))), ["layer.weight"])
    _, (found,) = mt.distribute_module(made, {"x": 2}, {"layer.weight": {"x": 0}}, poison=True)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x: ((h := model.layer(x[x[:, 0] > 0])) - h.mean(0)).square().sum(),
        lambda model, x: ((h := model.layer(x[x[:, 0] > 0])) / h.shape[0]).sum(),
        lambda model, x: ((h := model.layer(x[x[:, 0] > 0])) @ (h.mean(0)[:, None] + model.layer.weight)).tanh().sum(),
    ],
    ids=["less their mean", "by their number", "by what is made of their mean"],
)
def test_gradients_of_no_rows_beside_what_they_have_together(body):
    model = Model(body)
    made = mt.gradient(mt.from_torch(torch.export.export(model, (X,))), ["layer.weight"])
    run = mt.distribute_module(made, {"x": 2}, {"layer.weight": {"x": 0}}, poison=True)
    for x in (X, -X.abs()):
        (expected,) = torch.autograd.grad(model(x), [model.layer.weight])
        torch.testing.assert_close(run(x)[1][0], expected, rtol=1e-4, atol=1e-5)


def test_numbers_of_data_are_compared_as_torch_does():
    """Rounded, or wrapped, as the tensor's dtype has them."""

    def body(model, x):
        count, most, ints = (x[:, 0] > 0).sum().item(), x.max().item(), (x.abs() * 50).to(torch.uint8)
        return x.half() == most, x.bfloat16() < most, ints > count - 3, ints.to(torch.int8) < count * 90, ints == most

    model = Model(body)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (X,))), {"x": 2}, {})
    for x in (X, -X.abs(), X.flip(1)):
        torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x: (x[x > 0].max(), x[x > 0].any(), x[x > 0].std()),
        lambda model, x: x[x[:, 0] > 0].min(0).indices,
    ],
)
def test_the_largest_of_no_rows_is_refused(body):
    model = Model(body)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (X,))), {"x": 2}, {})
    with pytest.raises(MeshTensorError, match="keep indices inside the dim"):
        run(-X.abs())


def test_more_rows_than_are_known_are_refused():
    model = Model(rows_of_known_number)
    run = mt.distribute_module(mt.from_torch(torch.export.export(model, (X, IDS))), {"x": 2}, {})
    with pytest.raises(MeshTensorError, match="keep indices inside the dim"):
        run(X, IDS - 1)


@pytest.mark.parametrize(
    "body",
    [
        lambda model, ids: (model.layer.weight[0, 0] / ids[ids > 0].float()).sum(),
        lambda model, ids: (model.layer.weight[0, 0] / torch.nonzero(ids > 0)[:, 0].float()).sum(),
        lambda model, ids: (model.layer.weight[0] * model.table(ids[ids > 0]).log()).sum(),
        lambda model, ids: (model.layer.weight[0] * model.table(ids[ids > 0]).exp()).sum(),
        lambda model, ids: (
            model.layer.weight[0] * (h := model.table(ids[ids > 0])).masked_fill(h == 0, -torch.inf).softmax(-1)
        ).sum(),
        lambda model, ids: (
            (model.layer.weight / model.table(ids[ids > 9])[:, None].sqrt()).sum()
            + model.layer(model.table(ids.clamp(min=1))).sum()
        ),
    ],
    ids=["ids", "places", "logarithms", "rows that are NaN", "softmax", "no rows"],
)
@pytest.mark.parametrize("first", [0.0, torch.nan])
def test_ids_that_are_left_out_have_no_part_in_gradients(body, first):
    """Neither have places, nor what is looked up; and where no row is chosen, nothing has."""
    model, ids = Model(body), torch.tensor([0, 3, 0, 2, 4])
    with torch.no_grad():
        model.table.weight.abs_()[0] = first
    wanted = ["layer.weight", "table.weight"]
    expected = torch.autograd.grad(model(ids), [model.get_parameter(name) for name in wanted], allow_unused=True)
    used = [name for name, d in zip(wanted, expected, strict=True) if d is not None]
    made = mt.gradient(mt.from_torch(torch.export.export(model, (ids,))), used)
    _, gradients = mt.distribute_module(made, {"x": 2}, {"layer.weight": {"x": 1}}, poison=True)(ids)
    torch.testing.assert_close(gradients, tuple(d for d in expected if d is not None))


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x: x[x[:, 0] > 0].flip(0).sum(0),
        lambda model, x: (h := x[x[:, 0] > 0]).T @ h,
        lambda model, x: x[x[:, 0] > 0].sort(0)[0].sum(0),
        lambda model, x: x.sum() / (1 / x[x[:, 0] > 0].shape[0]),
        lambda model, x: torch.full((2,), 1 / x.abs().max().item()),
        lambda model, x: x.index_put((torch.where(x > 0)[0],), x[x > 0][:, None]),
        lambda model, x: x.index_put((torch.nonzero(x > 0)[:, :2],), torch.tensor(1.0), accumulate=True),
        lambda model, x: x[:3].index_put((torch.where(x.topk(3)[1] == 1)[1],), x[torch.where(x.topk(3)[1] == 1)[0]]),
        lambda model, x: x[x[:, 0] > 0],
    ],
)
def test_what_takes_rows_together_is_refused(body):
    with pytest.raises(MeshTensorError, match="gives what depends on data"):
        mt.from_torch(torch.export.export(Model(body).eval(), (X,)))
