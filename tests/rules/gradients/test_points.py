"""Gradients of what torch exports where they are not one number or not finite: ties, bounds, zeros, infinities, sizes
of 1 and 0. They are torch's, in float64, whole and split unevenly, with poison as padding."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt

INF = float("inf")
TIES = [[1.0, 2, 2, 0, 2], [0, 0, 0, 0, 0], [3, 1, 3, 1, 3], [-1, -1, -2, -1, -2]]
EDGES = [[-3, -1, -0.5, 0, 0.5], [1, 3, 6, -6, 2], [0, 0, 1, -1, 4]]
HOLES = [[1.0, 0, 3, 2], [0, 0, 2, 1], [1, 2, 3, 4], [0, 0, 0, 0]]
TARGET = torch.tensor([1, 0, -100, 3])

POINTS = {
    f"{name} at its bounds": (call, EDGES)
    for name, call in {
        "abs": torch.abs, "sign": torch.sign, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "log": torch.log,
        "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "hardswish": F.hardswish, "elu": F.elu,
        "hardsigmoid": F.hardsigmoid, "softshrink": F.softshrink, "hardshrink": F.hardshrink, "leaky": F.leaky_relu,
        "softplus": lambda x: F.softplus(x, 2.0, 1.0), "threshold": lambda x: F.threshold(x, 1.0, 7.0),
        "clamp": lambda x: x.clamp(-1, 1), "clamp from above to below": lambda x: x.clamp(2, 1),
        "clamp by tensors": lambda x: torch.clamp(x, x.detach() * 0 - 1, x.detach() * 0 + 1),
        "remainder": lambda x: x % 2, "square root of a square": lambda x: (x * x).sqrt(),
        "masked logarithm": lambda x: torch.where(x > 0, x.log(), 0.0),
    }.items()
} | {
    f"power {power}": (lambda x, power=power: x**power, EDGES) for power in (0, 1, 2, 3, -1)
} | {
    f"norm {order} of zeros": (lambda x, order=order: torch.linalg.vector_norm(x, order, 1), HOLES)
    for order in (0.5, 1, 2, 3, INF, -INF, -1)
} | {
    f"{name} of equal ones": (call, TIES)
    for name, call in {
        "amax": lambda x: x.amax(1), "amin of all": lambda x: x.amin(), "max": lambda x: x.max(1, True).values,
        "min": lambda x: x.min(0).values, "max of all": torch.max, "median": lambda x: x.median(1).values,
        "median of all": torch.median, "nanmedian": lambda x: x.nanmedian(), "mode": lambda x: x.mode(1).values,
        "sort": lambda x: x.sort(1).values, "sort downwards": lambda x: x.sort(0, descending=True).values,
        "topk": lambda x: x.topk(3, 1).values, "smallest": lambda x: x.topk(2, 0, largest=False).values,
        "kthvalue": lambda x: x.kthvalue(2, 1).values, "cummax": lambda x: x.cummax(1).values,
        "maximum": lambda x: torch.maximum(x[:, :4], x[:, 1:]), "fmin": lambda x: torch.fmin(x[:, :4], x[:, 1:]),
        "pooling": lambda x: F.max_pool2d(x[None, None], 2, 1), "deviation": lambda x: x.std(1),
        "layer norm": lambda x: F.layer_norm(x, (5,)), "absolute loss": lambda x: F.l1_loss(x[:, :4], x[:, 1:]),
        "smooth loss": lambda x: F.smooth_l1_loss(x[:, :4], x[:, 1:]), "huber": lambda x: F.huber_loss(x[0], x[2]),
        "distances": lambda x: torch.cdist(x, x.flip(0)), "scattered": lambda x: x.scatter_reduce(
            1, torch.tensor([[0, 0, 2], [1, 4, 1]]), x[:2, :3] * 1, "amax"),
        "normalized": lambda x: F.normalize(x, dim=1), "cosines": lambda x: F.cosine_similarity(x, x.flip(0)),
    }.items()
} | {
    "product with zeros": (lambda x: x.prod(1), HOLES),
    "running product with zeros": (lambda x: x.cumprod(1), HOLES),
    "logsumexp of infinities": (lambda x: x.logsumexp(1), [[1.0, -INF, 3], [2, 1, -INF], [0, 1, 2]]),
    "softmax of infinities": (lambda x: x.softmax(1), [[1.0, -INF, 3], [2, 1, -INF], [0, 1, 2]]),
    "hypotenuse of zeros": (lambda x: torch.hypot(x, x * 1), HOLES),
    "xlogy of zeros": (lambda x: torch.xlogy(x, x + 1), HOLES),
    "classes that don't count": (lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.2), TIES),
    "probabilities of 0 and 1": (lambda x: F.binary_cross_entropy(x, x.detach() * 0.5), [[0.0, 1, 0.5], [0.2, 0, 1]]),
    "variance of one": (lambda x: x.var(1, correction=0), [[1.0], [2], [0]]),
    "sum of nothing": (lambda x: x[:0].sum(1), HOLES),
    "unbound rows of nothing": (lambda x: x[:, :0].unsqueeze(0).unbind(0)[0], HOLES),
    "product over nothing": (lambda x: x[:, :0] @ x[:0] + x, [[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]),
    "rows taken twice": (lambda x: x[torch.tensor([0, 0, -1])], HOLES),
    "rows written twice": (lambda x: x.index_put((torch.tensor([0, 0]),), x[1:3] * 2, accumulate=True), HOLES),
}  # fmt: skip


class Point(nn.Module):
    def __init__(self, call, values):
        super().__init__()
        self.call, self.x = call, nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, weights):
        return (self.call(self.x) * weights).sum()


@pytest.mark.parametrize("name", POINTS)
def test_gradient_is_torchs(name):
    model = Point(*POINTS[name])
    torch.manual_seed(0)
    weights = torch.randn(model.call(model.x).shape, dtype=torch.float64)
    (expected,) = torch.autograd.grad(model(weights), [model.x])
    made = mt.gradient(mt.from_torch(torch.export.export(model, (weights,))))
    for mesh, layout in (({"a": 1}, {}), ({"a": 3}, {"x": {"a": 0}}), ({"a": 2}, {"x": {"a": 1}})):
        run = mt.distribute_module(made.mod, mesh, layout, weights=made.params, poison=True)
        _, (found,) = run(weights)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
