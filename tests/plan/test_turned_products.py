"""Gradients of weights that a layer takes transposed: one product, in the weight's own order."""

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from mesh_tensor.plan.gradient import gradient_function


class Layers(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        if tied:
            self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x))).square().mean()


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradients_of_linear_layers_are_not_transposed(tied):
    """A weight that two layers have has two products, which are added; none is copied into another order."""
    model, x = Layers(tied), torch.randn(2, 3, 6)
    module = mt.from_torch(torch.export.export(model, (x,)))
    weights = [module.names[name] for name, _ in model.named_parameters()]
    made = gradient_function(module.mod, "main", weights)
    calls = [
        binding.value
        for block in made["main"].body.blocks
        for binding in block.bindings
        if hasattr(binding.value, "op") and hasattr(binding.value.op, "name")
    ]
    products = {str(call.attrs.subscripts) for call in calls if call.op.name == "relax.einsum"}
    assert products == {"aby,abz->zy"}
    forward = [call for call in calls if call.op.name == "relax.permute_dims" and call.args[0].name_hint in weights]
    turned = [call for call in calls if call.op.name == "relax.permute_dims"]
    assert len(turned) == len(forward) + 1  # the gradient of what lies between the layers takes the weight again
    run = mt.distribute_module(made, {"d": 2, "m": 2}, {"x": {"d": 0}, weights[0]: {"m": 1}})
    loss = model(x)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    value, gradients = run(*[{**module.params, "x": x}[p.name_hint] for p in made["main"].params])
    torch.testing.assert_close(value, loss.detach())
    for got, gradient in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-6)
