"""A search is never worse than what people write, on any machine, for modules of several kinds."""

import pytest
import torch

import mesh_tensor as mt
from kernels.models import gpt2, llama, mlp
from mesh_tensor.api import strategies

MACHINES = ("cpu", "h100", "tpu-v4")


def _module(kind):
    model, example = {
        "mlp": lambda: (mlp.build(), mlp.example_inputs()),
        "gpt": lambda: (gpt2.build(gpt2.Config(64, 32, 4, 1, 4, 8)), (torch.zeros(4, 8, dtype=torch.int64),)),
        "llama": lambda: (
            llama.build(llama.Config(32, 32, 64, 4, 4, 1, 4, 8)),
            (torch.zeros(4, 8, dtype=torch.int64),),
        ),
    }[kind]()
    return mt.from_torch(torch.export.export(model.eval(), example), check=False)


def _by_hand(module):
    """Data parallel, Megatron's, and both on two axes, as these functions say them."""
    both = {"y": 2, "x": 2}
    yield {"x": 4}, strategies.data_parallel(module, "x")
    if len(module.params) > 4:  # there are linear layers
        yield {"x": 4}, strategies.tensor_parallel(module, "x")
        yield both, strategies.combine(strategies.data_parallel(module, "y"), strategies.tensor_parallel(module, "x"))
    yield {"x": 4}, {}


@pytest.mark.parametrize("kind", ["mlp", "gpt", "llama"])
def test_never_worse_than_what_people_write(kind):
    module = _module(kind)
    for machine in MACHINES:
        meshes = [{"x": 4}, {"y": 2, "x": 2}]
        best = mt.search(module, 4, machine, meshes=meshes, width=1, seconds=0.0).best  # the presets, and little else
        for mesh, layouts in _by_hand(module):
            run = mt.distribute_module(module, mesh, layouts, machine=machine)
            assert best.time <= mt.simulate(run, machine).time * (1 + 1e-9)
