"""Named dims: what is split alike, in how many layers."""

import pytest
import torch

import mesh_tensor as mt
from kernels.models import gpt2, mlp
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.program.plan_module import read_module
from mesh_tensor.searching.named_dims import named_dims


def dims_of(model, *inputs):
    imported = mt.from_torch(torch.export.export(model, inputs), check=False)
    return named_dims(*read_module(imported.mod, "main", Mesh({"x": 1}), {}))


def test_a_perceptron_has_a_batch_an_input_a_hidden_and_an_output_dim():
    found = {frozenset(dim.dims): dim.size for dim in dims_of(mlp.build(), torch.randn(12, 16))}
    assert found == {
        frozenset({("x", 0)}): 12,
        frozenset({("x", 1), ("weight1", 0)}): 16,
        frozenset({("weight1", 1), ("weight2", 0)}): 32,
        frozenset({("weight2", 1)}): 16,
    }


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_are_alike(layers):
    """Heads, head sizes and hidden dims of all layers are one named dim each; the width is one over all of them."""
    config = gpt2.Config(layers=layers)
    found = dims_of(gpt2.build(config), torch.zeros(4, 8, dtype=torch.int64))
    hidden = next(dim for dim in found if ("blocks_0_fc_weight", 0) in dim.dims)
    heads = next(dim for dim in found if ("blocks_0_attn_q_weight", 0) in dim.dims and dim.size == config.heads)
    width = next(dim for dim in found if ("wpe_weight", 1) in dim.dims)
    assert {(f"blocks_{n}_proj_weight", 1) for n in range(layers)} <= set(hidden.dims)
    assert {(f"blocks_{n}_attn_proj_weight", 1) for n in range(layers)} <= set(heads.dims)
    assert (hidden.layers, heads.layers, width.layers) == (layers, layers, 1)
    assert f" in {layers} layers: blocks_0_fc_weight dim 0, blocks_0_fc_bias dim 0, " in str(hidden)
    assert len(found) == len(dims_of(gpt2.build(gpt2.Config(layers=2)), torch.zeros(4, 8, dtype=torch.int64)))
