"""Weights on ranks: saved on two, loaded on three and on a virtual mesh."""

from functools import partial

import pytest
import torch

import mesh_tensor as mt
from kernels.models import gpt2

from . import weight_bodies as bodies
from .launcher import run

pytest.importorskip("safetensors")


def test_two_ranks_then_three_then_a_virtual_mesh(tmp_path):
    first, second = run(partial(bodies.saved, folder=tmp_path), 2)
    assert "parameter 'norm.bias': (31,), but expected (32,) float32" in first
    assert "rank 0 refused the call" in second
    shapes = run(partial(bodies.loaded, folder=tmp_path), 3)
    assert shapes == [((43, 32), (32, 43)), ((43, 32), (32, 43)), ((42, 32), (32, 42))]
    torch.manual_seed(0)
    model, tokens = bodies.model(), gpt2.example_inputs(bodies.CONFIG)
    torch.testing.assert_close(mt.load(tmp_path, {"x": 2})(*tokens), model(*tokens).detach())
