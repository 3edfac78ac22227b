"""Weights that several stages have, and those that have no gradient."""

import pytest
import torch
from torch import nn
from tvm import relax

import mesh_tensor as mt

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 3}}


class Thrice(nn.Module):
    """One weight in three stages, in the last one perhaps without a gradient; perhaps a layer that has none at all."""

    def __init__(self, detached=False, lost=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight
        self.d, self.probe, self.detached, self.lost = nn.Linear(6, 6), nn.Linear(6, 6), detached, lost

    def forward(self, x, y):
        x = self.b(torch.tanh(self.a(x)))
        x = x @ self.c.weight.detach() if self.detached else self.c(torch.tanh(x))
        loss = ((self.d(torch.tanh(x)) - y) ** 2).mean()
        return (loss, self.probe(x.detach())) if self.lost else loss


@pytest.mark.parametrize(("schedule", "detached"), [("1f1b", False), ("zb-h1", True)])
def test_a_weight_of_three_stages(schedule, detached):
    """Clipped by the norm of all, with a last microbatch that is smaller; where one stage has no gradient for it, it
    gets the others'."""
    model, rows = Thrice(detached), torch.export.Dim("rows", min=1, max=64)
    example = torch.randn(3, 6), torch.randn(3, 6)
    module = mt.from_torch(torch.export.export(model, example, dynamic_shapes={"x": {0: rows}, "y": {0: rows}}))
    topology = {"m0": {"d": 2}, "m1": {"d": 3}, "m2": {"d": 1}}
    layouts = {"m0": {"x": {"d": 0}, "a.weight": {"d": 0}}, "m1": {"a.weight": {"d": 1}}}
    stages = {"m0": ["a"], "m1": ["b"], "m2": ["d"]}
    train = [name for name in module.params if "probe" not in name]
    run = mt.pipeline(module, topology, stages, layouts, microbatches=4, schedule=schedule, train=train)
    assert [module.names["a.weight"] in stage.params for stage in run.stages] == [True] * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for count in (10, 12):
        x, y = torch.randn(count, 6), torch.randn(count, 6)
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        torch.testing.assert_close(run(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
        run.update(lambda weight, gradient, state: weight - 0.5 * gradient, max_norm=0.05)
    weights = run.weights()
    for name, weight in model.named_parameters():
        if "probe" not in name:
            torch.testing.assert_close(weights[module.names[name]], weight.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_weights_that_the_loss_does_not_depend_on():
    """Refused by name, of one stage and of several; without them the rest trains."""
    model = Thrice(lost=True)
    module = mt.from_torch(torch.export.export(model, (torch.randn(3, 6), torch.randn(3, 6))))
    options = {"topology": TOPOLOGY, "stages": ["a"], "microbatches": 2}
    with pytest.raises(mt.MeshTensorError) as raised:
        mt.pipeline(module, train=True, **options)
    assert "the loss does not depend on 'probe_weight'" in str(raised.value)
    assert "name the weights that are trained" in str(raised.value)
    run = mt.pipeline(module, train=["a.weight", "d.*"], **options)
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    loss, probed = model(x, y)
    found = run(x, y)
    torch.testing.assert_close(found, (loss.detach(), probed.detach()))
    (wanted,) = torch.autograd.grad(loss, [model.a.weight])
    torch.testing.assert_close(run.gradients()[module.names["a.weight"]], wanted, rtol=1e-4, atol=1e-6)


def test_a_weight_of_several_stages_without_a_gradient_in_any():
    builder = relax.BlockBuilder()
    x, w, v = (relax.Var(name, relax.TensorStructInfo((6, 6), "float32")) for name in "xwv")
    with builder.function("main", [x, w, v]):
        with builder.dataflow():
            first = builder.emit(relax.op.add(relax.op.matmul(x, v), relax.op.sign(w)), "first")
            second = builder.emit(relax.op.multiply(first, relax.op.sign(w)), "second")
            loss = builder.emit_output(relax.op.mean(second), "loss")
        builder.emit_func_output(loss)
    weights = {"w": torch.randn(6, 6), "v": torch.randn(6, 6)}
    options = {"weights": weights, "stages": ["first"]}
    with pytest.raises(mt.MeshTensorError, match="the loss does not depend on 'w'"):
        mt.pipeline(builder.get(), TOPOLOGY, train=True, **options)
    run = mt.pipeline(builder.get(), TOPOLOGY, train=["v"], **options)
    torch.testing.assert_close(
        run(weights["v"]), ((weights["v"] @ weights["v"] + weights["w"].sign()) * weights["w"].sign()).mean()
    )
