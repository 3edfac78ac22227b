"""What does not vary along a factor of its operands doesn't in its results: every operator, by torch."""

import numpy as np
import pytest
import torch

from mesh_tensor.plan.batch_kinds import placed_factors
from mesh_tensor.rules.operator import rule_of
from mesh_tensor.rules.operator.rule import atoms_of
from mesh_tensor.targets.torch_ops import torch_function
from tests.rules.operator.cases import CASES


def _alike(tensor, dims):
    """The tensor with the same at all places along some dims."""
    for dim in dims:
        if tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1).expand(tensor.shape)
    return tensor.contiguous()


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_vary(name):
    case = CASES[name]
    call = case.call()
    rule = rule_of(call)
    rng = np.random.default_rng(11)
    operands = [torch.from_numpy(np.asarray(arg.draw(rng)).copy()) for arg in case.args]
    made = [(number, d, dim) for number, dims in enumerate(rule.outputs) for d, dim in enumerate(dims)]
    for number, d, dim in made:
        factors = {*atoms_of(dim)}
        if not factors or factors & placed_factors(rule):
            continue  # it is taken to vary
        along = [[i for i, each in enumerate(dims) if factors & {*atoms_of(each)}] for dims in rule.inputs]
        result = torch_function(call)(*map(_alike, operands, along))[number]
        torch.testing.assert_close(result, _alike(result, [d]), equal_nan=True, rtol=1e-5, atol=1e-6)
