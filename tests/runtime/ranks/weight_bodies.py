"""Weights on ranks: read by tiles, saved by parts, loaded by another number of ranks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor.importers.weight_files import StoredTensor
from tests.refusals import refusal

CONFIG = gpt2.Config(layers=1, fused=True)


def model():
    """The same on all ranks."""
    torch.manual_seed(0)
    return gpt2.build(CONFIG)


def saved(rank, folder):
    """Run, saved with its weights as DTensors, then with other ones."""
    torch.manual_seed(0)
    made, tokens = model(), gpt2.example_inputs(CONFIG)
    module = mt.from_torch(torch.export.export(made, tokens))
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    weights = dict(module.params)
    run = mt.distribute_module(module.mod, device_mesh, gpt2.tensor_parallel(CONFIG, "x"), weights=weights, donate=True)
    assert not weights
    expected = made(*tokens).detach()
    torch.testing.assert_close(run(*tokens), expected)
    held = run.state_dict(full=False)
    assert isinstance(held["blocks.0.fc.weight"], DTensor)
    assert held["blocks.0.fc.weight"].to_local().shape == (64, 32)
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in run.state_dict().items())
    mt.save(run, folder)
    bias = held["norm.bias"]
    again = DTensor.from_local(bias.to_local() + 1, device_mesh, bias.placements)
    assert "with two values" in refusal(
        lambda: run.load_state_dict({"norm.bias": bias, "norm_bias": again}, strict=False)
    )
    wrong = {"norm.bias": torch.ones(32 if rank else 31)}
    text = refusal(lambda: run.load_state_dict(wrong, strict=False))
    torch.testing.assert_close(run(*tokens), expected)
    run.load_state_dict({"norm.bias": torch.ones(32)}, strict=False)
    made.norm.bias.data.fill_(1)
    torch.testing.assert_close(run(*tokens), made(*tokens).detach())
    run.load_state_dict(held)
    torch.testing.assert_close(run(*tokens), expected)
    assert "waited in vain somewhere else" in refusal(lambda: run.state_dict() if rank else run(*tokens))
    mt.resume(device_mesh)
    torch.testing.assert_close(run.state_dict()["norm.bias"], bias.to_local())
    return text


def loaded(rank, folder):
    """What two ranks saved, on three; of how much of a weight a rank has read."""
    read = {}
    whole = StoredTensor.read

    def noted(self, box=None):
        part = whole(self, box)
        read[self.name] = tuple(part.shape)
        return part

    StoredTensor.read = noted
    torch.manual_seed(0)
    made, tokens = model(), gpt2.example_inputs(CONFIG)
    run = mt.load(folder, init_device_mesh("cpu", (3,), mesh_dim_names=("x",)))
    torch.testing.assert_close(run(*tokens), made(*tokens).detach())
    return read["blocks.0.fc.weight"], read["blocks.0.proj.weight"]
