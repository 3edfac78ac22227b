"""Steps that go through a batch in microbatches: losses, parameters and collectives are those of the whole batch."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor import strategies
from mesh_tensor.program.steps import CollectiveStep
from mesh_tensor.program.verify import peak_bytes
from tests.api.models import MLP
from tests.refusals import refusal

DATA = {"x": {"data": 0}, "target": {"data": 0}}


class Penalised(MLP):
    """Gives its loss: a sum of products over counted rows, and a penalty of weights."""

    def forward(self, x, target):
        return F.cross_entropy(super().forward(x), target) + 0.1 * self.up.weight.square().mean()


class Sequences(nn.Module):
    """Rows are made longer by positions, and joined with them for the loss."""

    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(9, 12), nn.Parameter(torch.randn(5, 12))
        self.block, self.out = nn.TransformerEncoderLayer(12, 2, 16, 0.0, batch_first=True), nn.Linear(12, 9)

    def forward(self, x):
        return self.out(self.block(self.table(x) + self.positions)).flatten(0, 1)


def _labels(rows, ignored=()):
    labels = torch.randint(0, 8, (rows,))
    labels[list(ignored)] = -100
    return labels


def _masked(out, target):
    mask = (target >= 0).float()
    each = F.cross_entropy(out, target, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


CLASSES = torch.rand(8)
LOSSES = {
    "mean": (F.mse_loss, lambda: torch.randn(12, 8)),
    "mean of the labels that count": (F.cross_entropy, lambda: _labels(12, (0, 3, 4))),
    "smooth labels": (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1), lambda: _labels(12, (1,))),
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), lambda: _labels(12)),
    "by hand": (_masked, lambda: _labels(12, (3, 6))),
    "probabilities": (F.binary_cross_entropy_with_logits, lambda: torch.rand(12, 8)),
    "divided by the number of rows": (
        lambda o, t: F.kl_div(o.log_softmax(-1), t, reduction="batchmean"),
        lambda: torch.rand(12, 8).softmax(-1),
    ),
    "classes' probabilities": (lambda o, t: F.cross_entropy(o, t, CLASSES), lambda: torch.rand(12, 8).softmax(-1)),
    "embeddings alike": (lambda o, t: F.hinge_embedding_loss(o, t, margin=0.5), lambda: torch.randn(12, 8).sign()),
    "cosines": (
        lambda o, t: F.cosine_embedding_loss(o, o.roll(1, 1), t, margin=0.1),
        lambda: torch.randn(12).sign(),
    ),
    "ranks": (
        lambda o, t: F.margin_ranking_loss(o[:, 0], o[:, 1], t, margin=0.3, reduction="sum"),
        lambda: torch.randn(12).sign(),
    ),
    "several labels": (F.multilabel_margin_loss, lambda: torch.tensor([[2, 5, -1, 3], [1, 0, 2, -1]] * 6).repeat(1, 2)),
    "rows divided by how many there are": (lambda o, t: ((o - t).square() / len(o)).sum(), lambda: torch.randn(12, 8)),
    "labels by the number of rows": (
        lambda o, t: (F.cross_entropy(o, t, reduction="none") / len(t)).sum(),
        lambda: _labels(12, (0, 5)),
    ),
    "a mean and a sum": (lambda o, t: F.mse_loss(o, t) + 0.1 * o.abs().sum(), lambda: torch.randn(12, 8)),
}


def _assert_trains(run, model, loss, batch, steps=3):
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        expected = theirs(*batch) if loss is None else loss(theirs(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(run(*batch), expected.detach(), rtol=1e-5, atol=1e-6)
    state = run.state_dict()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def _collectives(run):
    return Counter(step.kind for step in run.program.steps if isinstance(step, CollectiveStep) and step.kind != "slice")


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    torch.manual_seed(0)
    loss, target = LOSSES[name]
    model, batch = MLP(), (torch.randn(12, 12), target())
    step = mt.training_step(model, loss, batch, optimizer="sgd", lr=0.05, accumulate=3)
    _assert_trains(mt.distribute_module(step, {"data": 2}, DATA, poison=True), model, loss, batch)


class WithLoss(nn.Module):
    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x, target):
        return self.loss(self.model(x), target)


def imported(model, loss, batch):
    return mt.from_torch(torch.export.export(WithLoss(model, loss), batch))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", ["mean", "mean of the labels that count", "by hand"])
def test_modules_that_were_imported_for_a_microbatch(name, zero):
    torch.manual_seed(0)
    loss, target = LOSSES[name]
    model, batch = MLP(), (torch.randn(12, 12), target())
    module = imported(model, loss, tuple(t[:4] for t in batch))
    step = mt.training_step(module, None, optimizer="sgd", lr=0.05, accumulate=3, zero=zero)
    run = mt.distribute_module(step, {"data": 2}, DATA, poison=True)
    theirs = WithLoss(model, loss)
    _assert_trains(run, theirs, None, batch)


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda o, t: (o - t).square().sum() / o.shape[0], 4),
        (lambda o, t: (o - t).square().sum(0).sum() / o.numel(), 32),
        (lambda o, t: ((o - t).square().sum(1) / o.shape[0]).sum(), 4),
        (lambda o, t: ((o - t).square() / o.numel()).sum(0).sum(), 32),
        (lambda o, t: ((o - t).square().sum(0) / o.numel()).sum(), 32),
        (lambda o, t: ((o - t).square() / 8 / o.shape[0]).sum(0).sum(), 32),
        (lambda o, t: (torch.full((4,), 0.25) @ (o - t).square()).sum(), 4),
        (lambda o, t: ((o - t).square().sum(1) / len(o) + o.abs().sum(1)).sum(), 4),
    ],
)
def test_modules_whose_loss_may_divide_by_the_size_of_a_microbatch(loss, count):
    module = imported(MLP(), loss, (torch.randn(4, 12), torch.randn(4, 8)))
    with pytest.raises(mt.MeshTensorError, match=f"divides a sum by {count}, which may be a constant"):
        mt.training_step(module, None, accumulate=3)


def test_modules_of_one_row_whose_loss_may_divide_by_their_number():
    loss, target = LOSSES["divided by the number of rows"]
    module = imported(MLP(), loss, (torch.randn(1, 12), target()[:1]))
    with pytest.raises(mt.MeshTensorError, match="divides a sum by 1, which may be a constant"):
        mt.training_step(module, None, accumulate=3)


def test_numbers_of_microbatches():
    module = imported(MLP(), F.mse_loss, (torch.randn(4, 12), torch.randn(4, 8)))
    with pytest.raises(mt.MeshTensorError, match=r"accumulate=0(.|\n)*from 1 on"):
        mt.training_step(module, None, accumulate=0)


class TwoNorms(nn.Module):
    """Two batch norms, one of which keeps what it saw last; it gives its loss."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Linear(10, 8)
        self.last, self.reduction = nn.BatchNorm1d(8, momentum=0.7), reduction

    def forward(self, x, target):
        out = self.last(self.down(torch.tanh(self.norm(self.up(x)))))
        return F.mse_loss(out, target, reduction=self.reduction)


@pytest.mark.parametrize("options", [{}, {"recompute": "auto", "zero": 1}])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batch_norms_of_each_microbatch(reduction, options):
    """As torch that goes through the microbatches one after the other: losses, weights, and running statistics."""
    torch.manual_seed(0)
    model, count = TwoNorms(reduction), 3
    module = mt.from_torch(torch.export.export(model, (torch.randn(4, 12), torch.randn(4, 8))))
    named = {"accumulate": count, "per_microbatch": ["norm", "last"]}
    step = mt.training_step(module, None, optimizer="sgd", lr=0.01, **named, **options)
    run = mt.distribute_module(step, {"data": 2}, DATA, poison=True)
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for _ in range(3):
        x, target, total = torch.randn(12, 12), torch.randn(12, 8), 0.0
        optimizer.zero_grad()
        for part in range(count):
            loss = theirs(x[part::count], target[part::count]) / (count if reduction == "mean" else 1)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        torch.testing.assert_close(run(x, target), total, rtol=1e-5, atol=1e-6)
    state = run.state_dict()
    assert int(state["norm.num_batches_tracked"]) == 9
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)


class Counting(TwoNorms):
    """Its loss depends on what it saw before."""

    def forward(self, x, target):
        scale = self.norm.running_mean.abs().sum() + 1
        return super().forward(x, target) * scale


@pytest.mark.parametrize(
    ("model", "named", "fact"),
    [
        (TwoNorms(), [], "accumulate= of a model that writes 'norm.running_mean'"),
        (TwoNorms(), ["norm"], "(subtract) takes rows of the batch and"),
        (TwoNorms(), ["norm", "lost"], "there is no value 'lost' in 'main'"),
        (Counting(), ["norm", "last"], "is another one for each part"),
    ],
)
def test_batch_norms_that_are_not_said_to_be_of_each_microbatch(model, named, fact):
    module = mt.from_torch(torch.export.export(model, (torch.randn(4, 12), torch.randn(4, 8))))
    message = refusal(mt.training_step, module, None, accumulate=3, per_microbatch=named)
    assert fact in message
    with pytest.raises(mt.MeshTensorError, match=r"per_microbatch=\['norm'\] of a torch model"):
        mt.training_step(MLP(), F.mse_loss, (torch.randn(4, 12),) * 2, accumulate=2, per_microbatch=["norm"])


@pytest.mark.parametrize(
    ("mesh", "layout", "zero"),
    [
        ({"data": 1}, {}, 0),
        ({"data": 3}, DATA, 1),
        ({"data": 5}, DATA, 0),
        ({"data": 2, "model": 2}, DATA | {"up.weight": {"model": 0}, "down.weight": {"model": 1}}, 3),
    ],
    ids=["one", "zero 1", "uneven", "both, zero 3"],
)
def test_layouts(mesh, layout, zero):
    torch.manual_seed(0)
    model, batch = Penalised(), (torch.randn(12, 12), _labels(12, (0, 2)))
    step = mt.training_step(model, None, batch, optimizer="sgd", lr=0.05, accumulate=2, zero=zero, check=False)
    _assert_trains(mt.distribute_module(step, mesh, layout, poison=True), model, None, batch)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_reduced_once(zero, dtype):
    torch.manual_seed(0)
    batch = torch.randn(12, 12).to(dtype), _labels(12)
    once, often = (
        mt.training_step(MLP().to(dtype), F.cross_entropy, batch, accumulate=count, zero=zero, check=False)
        for count in (1, 3)
    )
    expected, found = (_collectives(mt.distribute_module(step, {"data": 2}, DATA)) for step in (once, often))
    # sums of 16 bits are collected in float32, of which there are fuller buckets
    assert found == expected if dtype == torch.float32 else found.total() < expected.total()


def test_half_precision_is_added_up_in_single():
    torch.manual_seed(0)
    model, x, y = MLP().bfloat16(), torch.randn(12, 12).bfloat16(), _labels(12)
    steps = [
        mt.training_step(model, F.cross_entropy, (x, y), optimizer="sgd", lr=0.05, accumulate=n, check=False)
        for n in (1, 3)
    ]
    runs = [mt.distribute_module(step, {"data": 2}, DATA, poison=True) for step in steps]
    for _ in range(2):
        losses = [run(x, y).float() for run in runs]
        torch.testing.assert_close(*losses, rtol=0.02, atol=0.02)
    first, second = (run.state_dict()["opt.master.up.weight"] for run in runs)
    torch.testing.assert_close(first, second, rtol=0.05, atol=2e-3)


def test_sequences_with_tensor_and_sequence_parallelism():
    torch.manual_seed(0)
    model, ids = Sequences(), torch.randint(0, 9, (8, 5))
    target = torch.randint(0, 9, (8, 5))
    loss = lambda out, target: F.cross_entropy(out, target.flatten())  # noqa: E731
    step = mt.training_step(model, loss, (ids, target), optimizer="sgd", lr=0.05, accumulate=2)
    tensor = strategies.tensor_parallel(step)
    layouts = strategies.combine(
        strategies.data_parallel(step), tensor, strategies.sequence_parallel(step, also={"data": 0})
    )
    run = mt.distribute_module(step, {"data": 2, "model": 2}, layouts, poison=True)
    _assert_trains(run, model, loss, (ids, target), steps=2)


def test_less_is_held():
    torch.manual_seed(0)
    model, batch = MLP(), (torch.randn(384, 12), _labels(384))
    held = [
        peak_bytes(mt.distribute_module(step, {"data": 2}, DATA).program)
        for count in (1, 4)
        for step in [mt.training_step(model, F.cross_entropy, batch, accumulate=count, check=False)]
    ]
    assert held[1] < 0.6 * held[0]


class Normed(nn.Module):
    def __init__(self, track):
        super().__init__()
        self.layer, self.norm = nn.Linear(12, 8), nn.BatchNorm1d(8, track_running_stats=track)

    def forward(self, x):
        return self.norm(self.layer(x))


class Mixed(MLP):
    def forward(self, x):
        return super().forward(x).softmax(0)


@pytest.mark.parametrize(
    ("model", "loss", "count", "said"),
    [
        (MLP(), F.mse_loss, 5, "accumulate=5, but a batch of 12 rows"),
        (MLP(), F.mse_loss, 0, "accumulate=0"),
        (Normed(True), F.mse_loss, 2, "accumulate= of a model that writes 'norm.running_mean'"),
        (Normed(False), F.mse_loss, 2, "microbatches don't make the loss of a batch"),
        (Mixed(), F.mse_loss, 2, "(nn.softmax) needs the batch's rows together"),
        (MLP(), lambda o, t: F.mse_loss(o, t).sqrt(), 2, "(sqrt) is not linear in"),
        (MLP(), lambda o, t: (o - t).square().sum() / o.shape[0] ** 2, 2, "which depend on how many rows there are"),
        (MLP(), lambda o, t: (o - t - 1e3).relu().mean() * len(o), 2, "(multiply) computes with const"),
        (MLP(), lambda o, t: ((o - t).square() / len(o) + 1).sum(), 2, "(add) is not linear in"),
        (MLP(), lambda o, t: (o - t)[:, : len(o) // 2].abs().sum(), 2, "(strided_slice) computes with sizes"),
        (MLP(), lambda o, t: o.sum() * torch.zeros(len(o)).softmax(0)[0], 2, "(nn.softmax) computes with sizes"),
        (MLP(), lambda o, t: (o.sum(0) * torch.tensor([len(o), *range(7)])).sum(), 2, "computes with"),
        (MLP(), lambda o, t: (o - t).square().mean() if len(o) > 6 else (o - t).abs().mean(), 2, "for all rows"),
        (MLP(), lambda o, t: (o - t).abs().sum(1).topk(7)[0].mean(), 2, "raises on inputs of (6, 12) and (6, 8)"),
        (MLP(), lambda o, t: (o - t).abs().max(), 2, "(max) needs the batch's rows together"),
        (MLP(), lambda o, t: (o / o.mean() - t).sum(), 2, "(divide) takes rows of the batch and"),
    ],
)
def test_what_is_refused(model, loss, count, said):
    torch.manual_seed(0)
    message = refusal(
        lambda: mt.training_step(model, loss, (torch.randn(12, 12), torch.randn(12, 8)), accumulate=count, check=False)
    )
    assert said in message
    assert "fix:" in message


@pytest.mark.parametrize("by", [(4, len), (len, 4), (len, len)])
def test_parts_of_a_loss_that_are_nothing_on_the_example(by):
    """What each is divided by, the number of rows or a constant, shows on other batches."""
    one, other = (n if callable(n) else (lambda y, n=n: n) for n in by)

    def loss(y, t):
        return torch.relu(y - 100).sum() / one(y) + ((y - t) ** 2).sum() / other(y)

    model, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.randn(8, 3))
    run = mt.distribute_module(mt.training_step(model, loss, batch, optimizer="sgd", accumulate=2), {"d": 1}, {})
    x, t = batch[0] * 200, batch[1]
    torch.testing.assert_close(run(x, t), loss(model(x), t).detach())


class Masked(MLP):
    """With a buffer, which became a constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.rand(8))

    def forward(self, x):
        return super().forward(x) * self.mask


def test_buffers_that_are_constants():
    torch.manual_seed(0)
    model, batch = Masked(), (torch.randn(12, 12), torch.randn(12, 8))
    step = mt.training_step(model, F.mse_loss, batch, optimizer="sgd", lr=0.05, accumulate=3)
    _assert_trains(mt.distribute_module(step, {"data": 2}, DATA), model, F.mse_loss, batch, steps=1)
