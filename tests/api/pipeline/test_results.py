"""Losses of pipelines are the whole batch's, whatever they divide by; or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from tests.refusals import refusal

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 3}}
CLASSES = torch.rand(5) + 0.5


class Classifier(nn.Module):
    """A loss of the logits of two layers."""

    def __init__(self, loss, norm=False):
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(6, 6), nn.Linear(6, 5), loss
        self.bn = nn.BatchNorm1d(6, track_running_stats=False) if norm else nn.Identity()

    def forward(self, x, y):
        return self.loss(self.b(torch.tanh(self.bn(self.a(x)))), y)


def batch(sizes):
    """Of rows and labels; different numbers of labels are left out in every microbatch."""
    x, y = torch.randn(sum(sizes), 6), torch.randint(5, (sum(sizes),))
    for i, start in enumerate(torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()):
        y[start : start + min(i + 1, sizes[i])] = -100
    return x, y


def pipeline(model, rows, *, open_size=False, **options):
    dim = {0: torch.export.Dim("rows", min=1, max=64)} if open_size else None
    example = torch.randn(rows, 6), torch.randint(5, (rows,))
    module = mt.from_torch(torch.export.export(model, example, dynamic_shapes={"x": dim, "y": dim} if dim else None))
    options = {"microbatches": 3, "train": True, **options}
    return module, mt.pipeline(module, TOPOLOGY, ["a"], {"x": {"d": 0}}, **options)


def check(model, module, run, x, y):
    loss = model(x, y)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(run(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
    got = run.gradients()
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(got[module.names[name]], gradient, rtol=1e-4, atol=1e-6, msg=name)


LOSSES = {
    "ignored labels": F.cross_entropy,
    "classes and smoothing": lambda z, y: F.cross_entropy(z, y, weight=CLASSES, label_smoothing=0.1),
    "at least one": lambda z, y: F.cross_entropy(z, y, reduction="sum") / (y != -100).sum().clamp(min=1),
    "two": lambda z, y: F.cross_entropy(z, y) + (z * z).mean(),
    "weights of the batch": lambda z, y: (z.sum(1) * y.abs() / y.abs().sum()).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_denominators_that_depend_on_the_batch(name):
    model = Classifier(LOSSES[name])
    module, run = pipeline(model, 4, schedule="zb-h1")
    for _ in range(2):
        check(model, module, run, *batch((4, 4, 4)))


def test_microbatches_of_one_row_and_a_ragged_last_one():
    model = Classifier(LOSSES["two"])
    check(model, *pipeline(model, 1), *batch((1, 1, 1))[:1], torch.tensor([2, -100, 3]))
    module, run = pipeline(model, 3, open_size=True)
    check(model, module, run, *batch((3, 3, 2)))
    check(model, module, run, *batch((4, 4, 1)))
    check(model, module, run, *batch((2, 1, 1)))  # 2, 2 and nothing would be left


@pytest.mark.parametrize("open_size", [False, True])
def test_sums_divided_by_what_was_read_off_a_size(open_size):
    """What an export made a number of is a mean if that is said, or if the size is open."""
    model = Classifier(lambda z, y: (z * z).sum() / z.shape[0])
    module, run = pipeline(model, 3, open_size=open_size, **({} if open_size else {"reduction": "mean"}))
    check(model, module, run, *batch((3, 3, 3)))
    if open_size:
        check(model, module, run, *batch((3, 3, 1)))


def test_without_training():
    model = Classifier(lambda z, y: (F.cross_entropy(z, y), z, (y != -100).sum()))
    _, run = pipeline(model, 4, train=False, reduction="sum")
    x, y = batch((4, 4, 4))
    torch.testing.assert_close(run(x, y), model(x, y))


def test_microbatches_without_a_label_that_counts():
    """All of one microbatch, of all but one label, and of all, where torch has no loss, and gradients of 0."""
    model = Classifier(F.cross_entropy)
    module, run = pipeline(model, 4)
    x, y = torch.randn(12, 6), torch.randint(5, (12,))
    for left in (range(4, 8), range(11), range(12)):
        labels = y.clone()
        labels[list(left)] = -100
        loss = model(x, labels)
        wanted = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(run(x, labels), loss.detach(), equal_nan=True)
        got = run.gradients()
        for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(got[module.names[name]], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("train", [True, False])
def test_what_is_divided_by_a_total_of_0_is_refused(train):
    model = Classifier(lambda z, y: (z.mean(1) * (y - 2)).sum() / (y - 2).sum())
    module, run = pipeline(model, 4, train=train)
    x, cancels = torch.randn(12, 6), torch.tensor([0, 4, 1, 3] * 3)
    assert model(x, cancels).isinf()
    message = refusal(run, x, cancels)
    assert "microbatches don't make the result" in message
    assert "of the batch is 0, by which it is divided" in message
    if train:
        assert "there are no gradients" in refusal(run.gradients)
        check(model, module, run, *batch((4, 4, 4)))


def refused(loss, **options):
    return refusal(pipeline, Classifier(loss, options.pop("norm", False)), 4, **options)


@pytest.mark.parametrize(
    ("loss", "options", "facts"),
    [
        (lambda z, y: (z * z).mean().sqrt(), {}, ["(sqrt) is not linear", "per_microbatch=[names]"]),
        (lambda z, y: (z / z.sum()).square().sum(), {}, ["(divide) takes rows of the batch", "made of all rows"]),
        (lambda z, y: z.amax(), {}, ["(max) needs the batch's rows together"]),
        (lambda z, y: z.sum() / 4, {}, ["divides a sum by 4", "say reduction='sum' or 'mean'"]),
        (lambda z, y: z.sum(), {}, ["is a sum", "say reduction='sum'", "open batch size"]),
        (lambda z, y: z.mean(), {"reduction": "sum"}, ["is a mean", "reduction='sum'"]),
        (lambda z, y: (z * z).mean(), {"norm": True}, ["(nn.instance_norm) needs the batch's rows together"]),
        (lambda z, y: z.mean(), {"per_microbatch": ["c"]}, ["there is no value 'c'", "where: per_microbatch"]),
    ],
)
def test_losses_that_microbatches_do_not_make(loss, options, facts):
    message = refused(loss, **options)
    assert all(fact in message for fact in facts), message


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: z.square().mean() * z.shape[0],
        lambda z, y: z.square().mean() / z.shape[0],
        lambda z, y: z.square().mean() + z.shape[0],
        lambda z, y: (z.square() / z.shape[0]).exp().sum(),
        lambda z, y: (z.square() / z.shape[0] + 1).sum(),
        lambda z, y: (z.square() / z.shape[0]).mean(),
        lambda z, y: torch.where(y > 1, z.square().sum(1), z.sum(1) / z.shape[0]).sum(),
        lambda z, y: (z.square() / z.shape[0] / z.shape[0]).sum(),
        lambda z, y: (z.shape[0] / z.exp()).sum(),
        lambda z, y: z / z.shape[0],
        lambda z, y: (z - z.shape[0]).square().mean(),
        lambda z, y: z.square().mean() + CLASSES.sum() / z.shape[0],
        lambda z, y: z.square().mean() * torch.arange(z.shape[0]).sum(),
        lambda z, y: z.square().sum() * torch.zeros(z.shape[0]).softmax(0)[0],
        lambda z, y: z.square().sum() / torch.ones(z.shape[0]).exp().sum(),
    ],
)
def test_what_follows_from_the_number_of_rows(loss):
    """An open size is another number in a microbatch."""
    train = loss(torch.ones(3, 5), torch.ones(3, dtype=torch.int64)).ndim == 0
    assert "how many rows there are" in refused(loss, open_size=True, train=train)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: (F.cross_entropy(z, y, reduction="none") / z.shape[0]).sum(),
        lambda z, y: ((z.square() / z.shape[0]).unsqueeze(1) * CLASSES).flatten(1).sum(0).sum(),
        lambda z, y: (z.square().sum(1) / z.shape[0] @ torch.ones(5, 2)[:1].expand(z.shape[0], 2)).sum(),
        lambda z, y: torch.full((z.shape[0],), 1.0) @ (z.square().sum(1) / z.shape[0]),
        lambda z, y: (z.square() / z.shape[0]).sum() + (z / z.shape[0] * (y > 1)[:, None]).sum(),
    ],
    ids=["by row", "of what is reshaped", "a product", "a product of ones", "two"],
)
def test_rows_that_are_divided_by_how_many_there_are(loss):
    """The sum of what a row gives, by the number of rows: the last microbatch has fewer of them."""
    model = Classifier(loss)
    module, run = pipeline(model, 3, open_size=True)
    check(model, module, run, *batch((3, 3, 1)))


def test_a_constant_that_may_be_a_number_of_rows():
    """61 is none, although sums are looked at in 61 rows."""
    model = Classifier(lambda z, y: z.square().sum() / 61 + z.sum() / torch.ones(z.shape[0]).sum())
    module, run = pipeline(model, 3, open_size=True)
    check(model, module, run, *batch((3, 3, 1)))


class Structured(nn.Module):
    """Gives a structure of results, one of which is what is cut at."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        first = self.a(x)
        second = self.b(first.relu())
        return {"out": second, "more": (first, {"mean": second.mean()}), "none": None, "copy": second.clone()}


@pytest.mark.parametrize("stages", [["a"], ["b"], {"m0": ["a"], "m1": ["b"]}])
def test_results_have_the_structure_of_the_models(stages):
    """Also where some are made before the last cut."""
    model, x = Structured(), torch.randn(6, 6)
    module = mt.from_torch(torch.export.export(model, (torch.randn(2, 6),)))
    run = mt.pipeline(module, {"m0": {"d": 2}, "m1": {"d": 1}}, stages, {"x": {"d": 0}}, microbatches=3)
    got, wanted = run(x), model(x)
    assert got.keys() == wanted.keys()
    assert got["none"] is None
    torch.testing.assert_close(got["out"], wanted["out"].detach())
    torch.testing.assert_close(got["more"][0], wanted["more"][0].detach())
    torch.testing.assert_close(got["more"][1]["mean"], wanted["more"][1]["mean"].detach())
    got["out"].zero_()
    torch.testing.assert_close(got["copy"], wanted["copy"].detach())


def test_a_batch_norm_is_that_of_each_microbatch_where_that_is_stated():
    model = Classifier(lambda z, y: (z * z).mean(), norm=True)
    module, run = pipeline(model, 4, per_microbatch=["bn"])
    x, y = batch((4, 4, 4))
    losses = [model(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    loss = torch.stack(losses).mean()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(run(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(run.gradients()[module.names[name]], gradient, rtol=1e-4, atol=1e-6, msg=name)
