"""Operators of torch that nothing else knows: torch's own calls, element by element, by leading dims, or whole."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.rules.operator.aten import ANY, any_text
from mesh_tensor.targets.torch_ops.linear_algebra import is_function
from tests.importers.models import Function
from tests.other_machines import machine

X = {"tensor": 0}


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def definite(count):
    """So many positive definite matrices: zeros and poison are not."""
    made = rows(count, 4, 4)
    return made @ made.mT + torch.eye(4)


def distributed(function, *inputs, mesh=None):
    module = mt.from_torch(torch.export.export(Function(function), inputs))
    names = [param.name_hint for param in module.mod["main"].params]
    with machine(1):
        layouts = {name: {"x": 0} for name, tensor in zip(names, inputs, strict=True) if tensor.dim()}
        return mt.distribute_module(module, mesh or {"x": 2}, layouts, poison=True)


MATRICES = definite(3)
SPLIT = {
    "bessel": (torch.special.bessel_j0, rows(5, 4)),
    "fmax": (torch.fmax, rows(5, 4), rows(5, 4).flip(0)),
    "arc cosine of whole numbers": (torch.acos, torch.arange(5)),
    "greatest common divisors": (torch.gcd, torch.arange(1, 6), torch.arange(6, 11)),
    "an activation without a tag": (F.hardswish, rows(5, 4) * 3),
    "clamped by tensors": (torch.clamp_max, rows(5, 1, 4), rows(5, 3, 4)),
    "two results": (torch.frexp, rows(5, 4)),
    "inverses": (torch.linalg.inv, MATRICES),
    "factors": (lambda a: torch.linalg.cholesky(a), MATRICES),
    "decompositions": (lambda a: torch.linalg.qr(a), MATRICES),
    "solutions": (lambda a, b: torch.linalg.solve(a, b), MATRICES, rows(3, 4, 2)),
    "vectors' solutions": (lambda a, b: torch.linalg.solve(a, b), MATRICES, rows(3, 4)),
    "determinants": (torch.linalg.det, MATRICES),
    "solutions of what was written": (lambda a, b: torch.linalg.solve(a.clone().mul_(2), b), MATRICES, rows(3, 4, 2)),
    "inverses of what was written": (
        lambda a: torch.linalg.matrix_power(a.clone().mul_(2), -1) @ torch.linalg.cholesky(a),
        MATRICES,
    ),
    "pools over the end": (lambda a: F.avg_pool2d(a, 2, ceil_mode=True, divisor_override=3), rows(3, 2, 5, 5)),
    "transposed convolutions": (
        lambda a: F.conv_transpose3d(a, torch.ones(2, 3, 2, 2, 2).double(), stride=2, output_padding=1, dilation=2),
        rows(3, 2, 3, 3, 3).double(),
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_rows_stay_where_they_are(name):
    """What torch refuses in matrices of zeros, it does not see: padding is none of its business."""
    function, *inputs = SPLIT[name]
    run = distributed(function, *inputs)
    torch.testing.assert_close(run(*inputs), function(*inputs), equal_nan=True)
    assert "gather" not in run.explain()


@pytest.mark.parametrize(
    "function",
    [
        lambda a: torch.linalg.qr(a),  # of one matrix
        lambda a: torch.index_reduce(a, 1, torch.tensor([0, 2, 2]), a[:, :3], "amax"),
        lambda a: torch.linalg.solve(a, a.T.expand(2, 4, 4)),
        lambda a: torch.nanmedian(a),
        lambda a: torch.pdist(a.T),
    ],
)
def test_what_needs_all_rows_gets_them(function):
    matrix = definite(1)[0]
    run = distributed(function, matrix)
    torch.testing.assert_close(run(matrix), function(matrix))
    assert "all_gather" in run.explain()


def test_each_place_of_four_devices():
    """Two devices have no row at all."""
    run = distributed(torch.linalg.inv, definite(2), mesh={"x": 4})
    torch.testing.assert_close(run(definite(2)), torch.linalg.inv(definite(2)))


def test_what_torch_refuses_is_refused():
    run = distributed(torch.linalg.inv, MATRICES)
    with pytest.raises(mt.MeshTensorError, match=r"aten.linalg_inv.default fails .*singular"):
        run(torch.zeros(3, 4, 4))


def test_they_train():
    torch.manual_seed(3)
    model, x, y = (
        nn.Sequential(nn.Linear(4, 4), Function(lambda h: torch.fmax(h, torch.special.i0(h)))),
        rows(5, 4),
        rows(5, 4),
    )
    step = mt.training_step(model, F.mse_loss, (x, y), optimizer="sgd", lr=0.1)
    run = mt.distribute_module(step, {"x": 2}, {"input": {"x": 0}, "target": {"x": 0}})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        expected = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(run(x, y), expected.detach())


def test_gradients_of_what_is_broadcast():
    """Padding of the result's gradient is none of the sum."""
    x, y = rows(5, 2), torch.tensor(0.3)
    model = Function(lambda a, b: (torch.fmax(a, b) * a.detach().cos()).sum())
    imported = mt.from_torch(torch.export.export(model, (x, y)))
    names = [param.name_hint for param in imported.mod["main"].params]
    with machine(1):
        run = mt.distribute_module(mt.gradient(imported, wrt=names), {"x": 3}, {names[0]: {"x": 0}}, poison=True)
    given = [x.requires_grad_(), y.requires_grad_()]
    expected = torch.autograd.grad(model(*given), given)
    torch.testing.assert_close(run(x.detach(), y.detach())[1], expected)


def test_functions_are_told_from_what_is_none():
    aten = torch.ops.aten
    for op in (aten.add_.Tensor, aten.view.default, aten.as_strided_copy.default, aten.rand_like.default):
        assert not is_function(op), op
    for op in (aten.nonzero.default, aten.empty_like.default, aten.from_file.default, aten.native_batch_norm.default):
        assert not is_function(op), op
    assert is_function(aten.linalg_qr.default)


def module_of(text):
    """A module of one call, as a file may have it."""
    x = relax.Var("x", relax.TensorStructInfo((4, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        call = relax.op.call_pure_packed(ANY, x, relax.StringImm(text), sinfo_args=[x.struct_info])
        builder.emit_func_output(builder.emit(call))
    return builder.get()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (any_text("add_.Tensor", None, [X, X], {}), "aten.add_.Tensor is no function of tensors"),
        (any_text("nothing.default", None, [X], {}), "aten.nothing.default is no function of tensors"),
        (any_text("flip.default", 1, [X, [0]], {}), "1 leading dims of aten.flip.default are not independent"),
        (any_text("flip.default", None, [X, [0]], {}), "None leading dims of aten.flip.default are not independent"),
        (any_text("exp.default", 7, [X], {}), "no call of an operator of torch's"),
        (any_text("exp.default", True, [X], {}), "no call of an operator of torch's"),
        ('["exp.default", null', "no call of an operator of torch's"),
        ("3", "no call of an operator of torch's"),
    ],
)
def test_a_file_states_what_torch_knows(text, said):
    """A module may come from anywhere."""
    with pytest.raises(mt.MeshTensorError, match=said):
        mt.distribute_module(module_of(text), {"x": 2}, {"x": {"x": 0}})(torch.ones(4, 3))


@pytest.mark.parametrize("function", [torch.reciprocal, lambda a: torch.full_like(a, 0.5, dtype=torch.float64)])
def test_attempts_leave_nothing_behind(function):
    """TVM's importer makes whole numbers of these: a division by zero, where torch has infinity."""
    module = mt.from_torch(torch.export.export(Function(function), (torch.arange(5),)))
    assert len(module.mod["main"].body.blocks[0].bindings) <= 2
    run = mt.distribute_module(module, {"x": 2}, {module.mod["main"].params[0].name_hint: {"x": 0}})
    torch.testing.assert_close(run(torch.arange(5)), function(torch.arange(5)))


EDGES = torch.tensor([-1e4, -100, -3, -1, -0.5, 0, 0.5, 1, 3, 6, 100, 1e4])
ROWS = torch.tensor([[0.0, 0, 0], [1, 1, 0], [-1, 2, -2]])
GRADIENTS = {
    **{name: (getattr(F, name), EDGES) for name in ("celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "mish")},
    **{name: (getattr(F, name), EDGES) for name in ("relu6", "selu", "softplus", "logsigmoid", "silu", "gelu")},
    **{name: (getattr(torch.special, name), EDGES) for name in ("entr", "log_ndtr", "logit", "sinc")},
    "norms": (lambda x: x.norm(dim=1), ROWS),
    "cubic norms": (lambda x: x.norm(p=3, dim=1), ROWS),
    "norms by roots": (lambda x: x.norm(p=0.5, dim=1), ROWS),
    "logarithms of zeros": (
        lambda x: torch.xlogy(x, x.detach()) + torch.special.xlog1py(x, x.detach() - 1),
        ROWS.abs(),
    ),
    "norms by the largest": (lambda x: x.norm(p=torch.inf, dim=1), ROWS),
    "norms of negative orders": (lambda x: x.norm(p=-1, dim=1) + x.norm(p=-2.5, dim=0, keepdim=True), ROWS),
    "statistics of a norm": (lambda x: sum(torch.native_layer_norm(x, [3], None, None, 1e-5)), ROWS),
    "filled twice": (lambda x: torch.index_fill(ROWS, 0, torch.tensor([1, 0, 1]), x.sum()) * ROWS.exp(), ROWS),
    "normalized": (lambda x: F.normalize(x, dim=1), ROWS),
    "deviations": (lambda x: x.std(1), ROWS),
    "smallest": (lambda x: x.min(1)[0], ROWS),
    "largest": (lambda x: x.max(1, keepdim=True)[0], ROWS),
    "bounds": (lambda x: torch.clamp(x, max=x.detach() * 0), ROWS),
    "rounded quotients": (lambda x: torch.div(x, x.detach(), rounding_mode="trunc"), ROWS),
    "cross-entropy of certainties": (
        lambda x: F.binary_cross_entropy(x, x.detach() / 2, reduction="none"),
        torch.tensor([0.0, 1, 0.5]),
    ),
    "pools": (lambda x: F.max_pool2d(x, 3, 2, 1), torch.arange(84).reshape(2, 1, 6, 7).remainder(3).float()),
    "pools in a row": (lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True), ROWS[:, None]),
    "rows without keys": (lambda x: torch.ops.aten._safe_softmax(x, 1), ROWS.log()),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_at_edges(name):
    """Far from 0, at bounds, of equal elements and of zeros: torch's own, neither NaN nor that of another side."""
    function, x = GRADIENTS[name]
    weight = rows(*function(x).shape)
    imported = mt.from_torch(torch.export.export(Function(lambda x: (function(x) * weight).sum()), (x,)))
    parameter = imported.mod["main"].params[0].name_hint
    run = mt.distribute_module(mt.gradient(imported, wrt=[parameter]), {"x": 2}, {parameter: {"x": 0}}, poison=True)
    given = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((function(given) * weight).sum(), [given])
    torch.testing.assert_close(run(x)[1][0], expected, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.div(x, 2, rounding_mode="trunc"),
        lambda x: torch.div(x, torch.tensor([-2, 3, 2]), rounding_mode="trunc"),
        lambda x: torch.div(x, torch.tensor([-2, 3, 2]), rounding_mode="floor"),
        lambda x: torch.clamp(x.int(), min=torch.tensor([-2, 3, 2])),
    ],
)
def test_whole_numbers_of_either_sign(function):
    """The example, by which imports are checked, has positive ones alone."""
    model = Function(function)
    module = mt.from_torch(torch.export.export(model, (torch.ones(3, 3, dtype=torch.long),)))
    x = torch.tensor([[-7, 7, -1], [5, -5, 3], [-3, 2, 0]])
    run = mt.distribute_module(module, {"x": 2}, {module.mod["main"].params[0].name_hint: {"x": 0}})
    torch.testing.assert_close(run(x), model(x))
