"""Labels and indices outside what they are looked up in, and weights that a module says it has but nobody gives."""

import pytest
import torch
import tvm
from torch import nn
from torch.nn import functional as F
from tvm import relax

import mesh_tensor as mt
from mesh_tensor import MeshTensorError
from tests.api.pipeline.models import Net, batch, imported

TWO = {"m0": {"d": 2}, "m1": {"d": 1}}


@pytest.mark.parametrize("outside", [11, -1])
def test_labels_outside_are_told_as_such_and_ignored_ones_are_not(outside):
    model = Net(blocks=1)
    run = mt.pipeline(imported(model, 2), TWO, ["blocks.0"], microbatches=2, train=True)
    tokens, labels = batch(4)
    labels[0, 1] = -100
    torch.testing.assert_close(run(tokens, labels), model(tokens, labels).detach(), rtol=1e-5, atol=1e-6)
    labels[3, 0] = outside
    with pytest.raises(MeshTensorError) as raised:
        run(tokens, labels)
    assert "parameter 'labels' has elements from" in str(raised.value)
    assert "in a dim that takes 0 to 10" in str(raised.value)
    assert f" {outside}" in str(raised.value)


class Computed(nn.Module):
    """Looks up what it computes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, places: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.fc(torch.tanh(self.table(places * 2))), y)


def test_computed_indices_outside_are_refused_where_they_are_looked_up():
    model, places, y = Computed(), torch.tensor([0, 1, 2, 2]), torch.randn(4, 3)
    module = mt.from_torch(torch.export.export(model, (places[:2], y[:2])))

    def pipeline(**options):
        return mt.pipeline(module, TWO, ["table"], microbatches=2, train=True, **options)

    run = pipeline()
    expected = model(places, y).detach()
    torch.testing.assert_close(run(places, y), expected)
    bad = torch.tensor([0, 1, 2, 3])
    with pytest.raises(MeshTensorError) as raised:
        run(bad, y)
    assert "R.take: indices from 4 to 6 into a dim of 6" in str(raised.value)
    assert "0F1 (forward of stage 0) on mesh 'm0'" in str(raised.value)
    torch.testing.assert_close(run(places, y), expected)
    assert pipeline(check_indices=False)(bad, y).isnan()


def _stated(attached: bool):
    """tanh(x @ w) @ v, of which it says that what follows x are weights, and perhaps which."""
    values = [torch.randn(4, 4), torch.randn(4, 4)]
    params = [relax.Var(name, relax.TensorStructInfo((2 if name == "x" else 4, 4), "float32")) for name in "xwv"]
    builder = relax.BlockBuilder()
    with builder.function("main", params, attrs={"num_input": 1}):
        with builder.dataflow():
            h = builder.emit(relax.op.tanh(relax.op.matmul(params[0], params[1])), "h")
            out = builder.emit_output(relax.op.matmul(h, params[2]))
        builder.emit_func_output(out)
    mod = builder.get()
    if attached:
        mod["main"] = mod["main"].with_attr("params", [tvm.runtime.tensor(value.numpy()) for value in values])
    return mod, dict(zip("wv", values, strict=True))


def test_weights_that_a_frontend_attached_are_taken():
    mod, weights = _stated(attached=True)
    x = torch.randn(4, 4)
    expected = torch.tanh(x @ weights["w"]) @ weights["v"]
    torch.testing.assert_close(mt.pipeline(mod, TWO, ["h"], microbatches=2)(x), expected)


def test_weights_that_are_not_given_are_named():
    mod, weights = _stated(attached=False)
    with pytest.raises(MeshTensorError) as raised:
        mt.pipeline(mod, TWO, ["h"], microbatches=2, weights={"w": weights["w"]})
    for fact in ("the weights lack 'v'", "first 1 parameters are weights, as its attribute num_input says"):
        assert fact in str(raised.value)
    x = torch.randn(2, 4)  # a batch that isn't split may bring them
    made = mt.pipeline(mod, TWO, ["h"], weights={"w": weights["w"]})(x, weights["v"])
    torch.testing.assert_close(made, torch.tanh(x @ weights["w"]) @ weights["v"])
