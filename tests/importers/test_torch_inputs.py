"""What goes into a torch program: classes with tensors, and tensors that are one another."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import mesh_tensor as mt


class Cache:
    """Keys that grow, as transformers' caches do: they begin as an empty tensor, also where torch makes one anew."""

    def __init__(self, keys=None):
        self.keys = torch.tensor([])
        if keys is not None:
            self.update(keys)

    def update(self, keys):
        self.keys = torch.cat([self.keys, keys])
        return self.keys


pytree.register_pytree_node(
    Cache,
    lambda cache: ([cache.keys], None),
    lambda leaves, _: Cache(*leaves),
    serialized_type_name="mesh_tensor_tests.Cache",
    flatten_with_keys_fn=lambda cache: ([(pytree.MappingKey("keys"), cache.keys)], None),
)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, cache):
        return torch.softmax(x @ cache.update(self.fc(x)).t(), -1), cache


@torch.no_grad()
@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}, {"x": 3}])
def test_a_cache_goes_in_and_comes_out(mesh):
    model, x, keys = Growing(), torch.randn(4, 8), torch.randn(5, 8)
    module = mt.from_torch(torch.export.export(model, (x, Cache(keys))))
    run = mt.distribute_module(module, mesh, {"fc.weight": {"x": 0}})
    for given in (keys, torch.randn(5, 8)):
        scores, cache = run(x, Cache(given))
        expected, grown = model(x, Cache(given))
        assert type(cache) is Cache
        torch.testing.assert_close(scores, expected)
        torch.testing.assert_close(cache.keys, grown.keys)


class Two(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.weight = weight

    def forward(self, a, b):
        return a * 2 + (b if self.weight is None else self.weight)


@pytest.mark.parametrize("strict", [False, True])
def test_inputs_that_were_one_tensor_are_refused(strict):
    x = torch.randn(4, 8)
    with pytest.raises(mt.MeshTensorError, match="'a', 'b' were one tensor, of which the program looks at 'b' alone"):
        mt.from_torch(torch.export.export(Two(), (x, x), strict=strict))
    run = mt.distribute_module(mt.from_torch(torch.export.export(Two(), (x, x.clone()), strict=strict)), {"x": 2}, {})
    torch.testing.assert_close(run(x, x + 1), x * 3 + 1)
    torch.testing.assert_close(run(x, x), x * 3)


def test_an_input_that_was_a_weight_is_refused():
    weight = nn.Parameter(torch.randn(4, 8))
    program = torch.export.export(Two(weight), (weight, torch.randn(4, 8)))
    with pytest.raises(mt.MeshTensorError, match="'a', 'p_weight' were one tensor, of which the program looks at 'a'"):
        mt.from_torch(program)


def test_inputs_that_nothing_uses_may_be_one_tensor():
    class First(nn.Module):
        def forward(self, a, b, c):
            return a + 1

    a, b = torch.randn(4, 8), torch.randn(4, 8)
    run = mt.distribute_module(mt.from_torch(torch.export.export(First(), (a, b, b))), {"x": 2}, {"a": {"x": 0}})
    torch.testing.assert_close(run(a, b, a), a + 1)
