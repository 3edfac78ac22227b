"""Operators of torch that TVM's importer leaves out, or gives another dtype or shape: on a mesh, too."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from tests.importers.models import Function

ROWS = torch.tensor([1, -2, 3])
COLUMN = torch.tensor([[0], [-1]])


def check(function, *inputs, others=(), dynamic_shapes=None):
    """What the module computes on one device and on a mesh is what torch computes, in the same dtypes."""
    model = Function(function)
    module = mt.from_torch(torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes))
    first = {module.mod["main"].params[0].name_hint: dict(zip("xy", range(inputs[0].ndim), strict=False))}
    run = mt.distribute_module(module.mod, {"x": 2, "y": 2}, first, poison=True)
    for given in (inputs, *others):
        torch.testing.assert_close(mt.run_sequential(module.mod, given), model(*given), equal_nan=True)
        torch.testing.assert_close(run(*given), model(*given), equal_nan=True)


def assigned(*where, value):
    """A function that writes to a copy of its input."""

    def function(x):
        copy = x.clone()
        copy[where] = value(x) if callable(value) else value
        return copy

    return function


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[ROWS, ROWS],
        lambda x: x[:, ROWS, ROWS],
        lambda x: x[ROWS, :, ROWS],
        lambda x: x[COLUMN, ROWS],
        lambda x: x[COLUMN, :, ROWS],
        lambda x: x[COLUMN],
        lambda x: x[..., ROWS],
        lambda x: x[torch.arange(5), x[:, :, 0].argmax(1)],
        assigned(ROWS, ROWS, value=lambda x: x[:3, 0]),
        assigned(slice(None), ROWS, ROWS, value=lambda x: x[:, :3, 0]),
        assigned(ROWS, slice(None), ROWS, value=lambda x: x[:3, :, 0]),
        assigned(COLUMN, slice(None), ROWS, value=lambda x: x[:2, :3, :6]),
        assigned(slice(None), ROWS, value=lambda x: x[:, :1]),
        assigned(slice(1, 3), ROWS, value=5.0),
        lambda x: x.index_put((torch.tensor([1, 1, 1]),), x[:3], accumulate=True),
        lambda x: x.index_put((x[..., 0] > 0,), torch.tensor(5.0)),
        lambda x: x.index_put((x > 0,), torch.tensor([0.5]), accumulate=True),
        assigned(slice(None), torch.tensor([True, False, True, True, False, False]), value=5.0),
        assigned(torch.arange(5) % 2 == 0, value=lambda x: x[3]),
        assigned(slice(None), torch.arange(42).reshape(6, 7) % 4 == 1, value=lambda x: x[:, 0, :1]),
        lambda x: x.index_put((x[..., 0] > 0,), x[0, 0], accumulate=True),
        lambda x: x.index_copy(2, torch.tensor([0, 3]), x[..., :2]),
        lambda x: x.index_fill(1, torch.tensor([0, 3]), 7.0),
        lambda x: x.scatter(1, torch.arange(6).flip(0)[None, :, None].expand(5, 6, 7), x * 2),
        lambda x: x.scatter(0, torch.zeros(1, 4, 3, dtype=torch.long), x * 2),
        lambda x: x.scatter_add(1, torch.ones(2, 3, 7, dtype=torch.long), x),
        lambda x: x.scatter_add(1, torch.zeros(5, 6, 7, dtype=torch.long), x),
        lambda x: x.sum().scatter_add(0, torch.tensor(0), x.max()),
    ],
)
def test_indexing(function):
    check(function, torch.randn(5, 6, 7))


def test_keys_and_values_are_written_where_positions_say():
    def attend(query, key, cache, positions):
        cache = cache.clone()
        cache[:, positions] = key
        return torch.einsum("bqd,bkd->bqk", query, cache).softmax(-1) @ cache

    check(attend, torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 9, 8), torch.tensor([4, 5, 6]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x > 2).sum(1),
        lambda x: x.int().sum(),
        lambda x: ((x > 2).any(), (x > 8).any(0), (x < 3).all(1)),
        lambda x: (x.prod(0), x.float().prod()),
        lambda x: x / 2,
        lambda x: x // 3,
        lambda x: torch.div(x, 3, rounding_mode="trunc"),
        lambda x: torch.div(x.float(), 3, rounding_mode="trunc"),
        lambda x: (x.abs() >> 1, x << 2),
        lambda x: 2.0**x,
        lambda x: (x > 0).logical_or(x),
        lambda x: ((x > 0).logical_and(x), x.logical_and(x + 1), x.float().logical_and(x)),
        lambda x: (x + torch.arange(9, -7, -2), x[:, :3] + torch.arange(1, -5, -2, dtype=torch.int32)),
        lambda x: torch.atan2(x.float(), x.float() + 0.5),
        lambda x: x.float().min(1),
        lambda x: x.float().cumsum(1).sort(1, descending=True),
        lambda x: F.one_hot(x.abs(), 10),
        lambda x: (2.0 % (x + 0.5), -7 % (x + 0.5), torch.remainder(3.0, x.double() - 0.25)),
        lambda x: F.cross_entropy(x.float(), x[:, 0].abs() % 8),
    ],
)
def test_dtypes_of_results(function):
    check(function, torch.randint(-9, 9, (5, 8)))


@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_quotients_of_whole_numbers_that_no_float_holds(mode):
    large = torch.randint(2**60, 2**62, (5, 8)) * torch.tensor([1, -1]).repeat(4)
    divisor = torch.tensor([1, 1, 3, 3, -1, -1, -7, -7])
    check(
        lambda x, y: (torch.div(x, y, rounding_mode=mode), torch.div(x, 3, rounding_mode=mode)),
        torch.randint(-9, 9, (5, 8)),
        divisor,
        others=[(large, divisor)],
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(0) / x.shape[0],
        lambda x: (x + x.shape[0]) * x.shape[0],
        lambda x: torch.arange(x.shape[0]) < x.shape[0] // 2,
        lambda x: x.masked_fill((torch.arange(x.shape[0]) >= x.shape[0] - 2)[:, None], 0.0),
        lambda x: torch.cat([x, x[:1]]).reshape((x.shape[0] + 1) * 2, 4),
    ],
)
def test_symbolic_sizes_as_numbers(function):
    check(
        function,
        torch.randn(6, 8),
        others=[(torch.randn(9, 8),)],
        dynamic_shapes=(({0: torch.export.Dim("rows", min=3, max=50)},),),
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x > 0).cumsum(1),
        lambda x: x.int().cumsum(0),
        lambda x: torch.cumsum(x, 1, dtype=torch.float64),
        lambda x: (torch.full_like(x.double(), 1 / 3), torch.full_like(x.int(), 2**25 + 1), torch.full_like(x, 7)),
        lambda x: x.expand(2, 3, -1, -1),
        lambda x: x[:, None].expand(-1, 4, -1) + 1,
        lambda x: torch.cat([x, x.new_zeros(0)], -1),
        lambda x: torch.cat([x.int(), x], 0),
        lambda x: (torch.stack([x, x + 1])[1], torch.stack([x.int(), x, x > 0], -1), torch.stack([x[:0], x[:0]], 1)),
        lambda x: torch.topk(x, 8, sorted=False)[0].sort()[0],
        lambda x: x.masked_scatter(x > 0, torch.arange(40.0)),
        lambda x: x[tuple(torch.tril_indices(5, 8))],
        lambda x: (x.unfold(1, 3, 2), x.diagonal(), torch.diag_embed(x)),
        lambda x: (*torch.cummax(x, 1), torch.logcumsumexp(x, 1), *torch.kthvalue(x, 2, 0)),
        lambda x: (*torch.var_mean(x, 1), F.selu(x), F.celu(x, 2.0), x.logical_not()),
        lambda x: (torch.cdist(x, x), torch.searchsorted(torch.arange(-2.0, 2.0), x)),
        lambda x: (x.exp2(), torch.hypot(x, x), torch.round(x, decimals=1), *torch.sort(x, stable=True, dim=1)),
        lambda x: x.scatter_reduce(1, (x > 0).long(), x, "mean"),
        lambda x: F.max_pool1d(x[None], 2),
    ],
)
def test_operators_that_relax_lacks_or_reads_in_part(function):
    check(function, torch.randn(5, 8))


def test_products_of_groups():
    """Torch's exporter takes bfloat16 alone, in which sums of small whole numbers are exact."""

    def grouped(x):
        ends = (x[0, :3] * 0 + 4).int().cumsum(0).int()
        rows = x.to(torch.bfloat16)
        return torch._grouped_mm(rows, rows[:24].reshape(3, 16, 8), offs=ends)[:12]

    check(grouped, torch.randint(-2, 3, (28, 16)).float())


def test_assertions_are_left_out():
    """Torch makes them of `assert`, too."""

    def asserts(x):
        torch._assert_async((x < 50).all(), "too large")
        return x + 1

    check(asserts, torch.randint(9, (5, 8)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, size=(5, 7), mode="bicubic", antialias=True),
        lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1).tanh(), align_corners=False),
        lambda x: F.adaptive_max_pool2d(x, (2, 3)),
        lambda x: F.max_pool2d(x, 2, return_indices=True),
    ],
)
def test_images(function):
    check(function, torch.randn(3, 4, 6, 9))


@pytest.mark.parametrize(
    "function",
    [
        lambda i: (i >= 0.5, i == 0.5, i < 0.5, i != 0.5),
        lambda i: (i * 0.5, i + 1.5, 1.5 - i, i / 3),
        lambda i: (i % 0.7, torch.fmod(i, 0.7), i.abs() ** 0.5),
        lambda i: (i.clamp(0.5, 1.5), i.clamp(min=0.5)),
        lambda i: torch.where(i > 0, i, 0.5),
        lambda i: (torch.maximum(i, i * 0.5), i == (i > 0)),
        lambda i: torch.add(i * 0.5, i, alpha=2),
    ],
)
def test_whole_numbers_and_fractions(function):
    """They meet as floats, in comparisons, too."""
    check(function, torch.randint(-3, 3, (5, 8)))


NANS = torch.tensor([[1.0, torch.nan, -torch.inf, 0.0], [torch.nan, torch.nan, 3.0, -2.0], [4.0, 2.0, -torch.inf, 0.5]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.median(), *x.median(1), *x.median(0, keepdim=True)),
        lambda x: (x**0.5, x**-0.5),
        lambda x: torch.addmm(x, x[:, :2].nan_to_num(0, 0, 0), x[:2].nan_to_num(0, 0, 0), beta=0),
    ],
)
def test_numbers_that_are_none(function):
    """Of which an example, that the import is checked with, has none."""
    check(function, torch.randn(3, 4), others=[(NANS,)])


BOOL_MASK = torch.eye(4).bool() | (torch.arange(16).reshape(4, 4) % 3 == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + 0.5,
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.rms_norm(x, (8,)),
        lambda x: torch.where(x > 0, x, float("-inf")),
        lambda x: torch.cat([x, x.new_zeros(3, 4, 2)], -1) + torch.full((10,), 0.5, dtype=x.dtype),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=BOOL_MASK),
        lambda x: F.conv1d(x, x[:2, :, :3]),
        lambda x: x.clamp(min=torch.tensor(-0.5, dtype=x.dtype)),
    ],
)
def test_low_precision(function, dtype):
    model = Function(function)
    x = torch.randn(3, 4, 8).to(dtype)
    module = mt.from_torch(torch.export.export(model, (x,)))
    run = mt.distribute_module(module.mod, {"x": 2, "y": 2}, {module.mod["main"].params[0].name_hint: {"x": 0, "y": 1}})
    expected = model(x)
    allowed = 4 * torch.finfo(dtype).eps
    for result in (mt.run_sequential(module.mod, [x]), run(x)):
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("mesh", [{"d": 2}, {"v": 2}])
def test_the_row_of_padding_has_no_gradient(mesh):
    """Rows of ids that are padding, also where the table is split by its rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, padding_idx=1), nn.Linear(4, 3))
    ids, y = torch.randint(8, (4, 5)), torch.randn(4, 5, 3)
    ids[:, 0] = 1
    step = mt.training_step(model, nn.functional.mse_loss, (torch.full((4, 5), 3), y), optimizer="sgd", lr=1.0)
    run = mt.distribute_module(step, mesh, {"0.weight": {"v": 0}} if "v" in mesh else {"0.weight": {}})
    before = model[0].weight.detach().clone()
    loss = nn.functional.mse_loss(model(ids), y)
    loss.backward()
    torch.testing.assert_close(run(ids, y), loss.detach())
    assert not model[0].weight.grad[1].any()
    torch.testing.assert_close(run.state_dict()["0.weight"], before - model[0].weight.grad)


def test_an_embedding_whose_gradient_is_scaled_by_frequency():
    model = nn.Embedding(8, 4, scale_grad_by_freq=True)
    with pytest.raises(mt.MeshTensorError, match="gradient is scaled by frequency"):
        mt.from_torch(torch.export.export(model, (torch.randint(8, (3,)),)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[3:1],
        lambda x: x[:0].reshape(0, 1, 7),
        lambda x: (x[:0].any(), x[:0].all(0), x[:, :0].prod(1), torch.cat([x[5:4], x])),
        lambda x: torch.arange(2.1, -2.9, -1.0, dtype=torch.int64) + x[:4, :1],
        lambda x: torch.arange(1.0, 5.000001, 2.0, dtype=torch.int64) + x[:, :2],
    ],
)
def test_tensors_without_elements_and_steps_of_fractions(function):
    check(function, torch.randn(5, 7))


def test_an_input_without_elements_is_split_further():
    module = mt.from_torch(torch.export.export(Function(torch.frexp), (torch.zeros(1, 0, 3),)))
    (name,) = [param.name_hint for param in module.mod["main"].params]
    mantissa, exponent = mt.distribute_module(module, {"x": 2, "y": 2}, {name: {"x": 1, "y": 0}})(torch.zeros(1, 0, 3))
    assert (mantissa.shape, mantissa.dtype) == ((1, 0, 3), torch.float32)
    assert (exponent.shape, exponent.dtype) == ((1, 0, 3), torch.int32)


LOWEST = torch.iinfo(torch.int64).min  # what NaN is as an index


@pytest.mark.parametrize(
    ("function", "recorded", "given"),
    [
        (F.cross_entropy, (3, 0, 2), (3, LOWEST, 2)),
        (lambda x, i: x.gather(1, i[:, None]), (3, 0, 2), (3, LOWEST, 2)),
        (lambda x, i: x.scatter(1, i[:, None], 1.0), (3, 0, 2), (3, LOWEST, 2)),
        (lambda x, i: x.index_add(0, i, x, alpha=0.5), (1, 0, 1), (1, -1, 1)),
        (lambda x, i: x.index_copy(1, i, x[:, 1:]), (3, 0, 2), (3, -1, 2)),
        (lambda x, i: F.max_unpool1d(x[:, :1], i[:, None], 4), (3, 0, 2), (3, -1, 2)),
    ],
)
def test_indices_before_the_first_are_refused_as_in_torch(function, recorded, given):
    x, index = torch.randn(3, 4), torch.tensor(given)
    computed = Function(lambda x, index: function(x, index * 1))  # so that no call can be refused by its argument
    module = mt.from_torch(torch.export.export(computed, (x, torch.tensor(recorded))))
    with pytest.raises((IndexError, RuntimeError)):
        function(x, index)
    for layouts in ({}, {"inputs_0": {"x": 0}}, {"inputs_0": {"x": 1}, "inputs_1": {"x": 0}}):
        with pytest.raises(mt.MeshTensorError, match="indices from "):
            mt.distribute_module(module, {"x": 2}, layouts)(x, index)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_max_unpool(dims):
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
    values, places = pool(torch.randn(2, 3, *[6, 4, 4][:dims]), 2, return_indices=True)
    check(lambda x, i: unpool(x, i, 2), values, places)


@pytest.mark.parametrize("of", [F.conv2d, F.conv_transpose2d])
def test_convolutions_of_large_integers(of):
    x, weight = torch.randint(-(2**60), 2**60, (2, 4, 5, 5)), torch.randint(-99, 99, (4, 2, 3, 3))
    check(lambda x, weight: of(x, weight, groups=2, dilation=2), x, weight)


def test_labels_with_nan_and_of_one_number():
    targets = torch.tensor([[0, 2, -1, 1], [1, 3, 2, -1], [-1, 0, 0, 0]])
    x = torch.randn(3, 4)
    holes = torch.where(x > x.median(), torch.nan, x)
    check(lambda x, t: F.multilabel_margin_loss(x, t, reduction="none"), x, targets, others=[(holes, targets)])
    check(F.multilabel_margin_loss, x[0, 0], targets[0, 0])
