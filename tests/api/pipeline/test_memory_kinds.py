"""Values that stages hold in another kind of memory: the same bits, and less on the devices where it is another one."""

import pytest
import torch

import mesh_tensor as mt
from mesh_tensor.runtime import backend as memory_kinds
from tests.api.pipeline.models import chain

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 1}}


def made(stages, **options):
    torch.manual_seed(0)
    module, weights = chain()
    return mt.pipeline(
        module, TOPOLOGY, stages, {}, microbatches=4, schedule="gpipe", train=True, weights=weights, **options
    )


@pytest.mark.parametrize("other_memory", [False, True])
def test_what_is_held_on_the_host(other_memory, monkeypatch):
    """Other memory is made of the CPU's here: what would be copied to the host is."""
    if other_memory:
        monkeypatch.setattr(memory_kinds, "_is_host", lambda device: False)
    plain = made({"layer1": "m0", "layer3": "m1"})
    run = made({"layer1": "m0@pinned_host", "layer3": "m1"}, memory={"layer0": "pinned_host", "layer3": "device"})
    assert {run.memory[name] for name in ("layer0", "layer1")} == {"pinned_host"}
    assert run.memory["layer3"] == "device"
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    for _ in range(2):
        assert torch.equal(run(x, y), plain(x, y))
        wanted = plain.gradients()
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in run.gradients().items())
        layer = 3 * 6 * 4 * 4  # rows of a microbatch, width, bytes, microbatches
        less = {mesh: plain.peak_bytes[mesh] - run.peak_bytes[mesh] for mesh in TOPOLOGY}
        assert less == {"m0": layer, "m1": layer} if other_memory else {"m0": 0, "m1": 0}
    assert run.peak_microbatches == plain.peak_microbatches
    assert "stage 0 holds 'layer0' in memory of kind 'pinned_host'" in run.explain()


def test_memory_that_there_is_not():
    with pytest.raises(mt.MeshTensorError, match=r"'layer1' is in memory of kind 'pinned'; did you mean 'pinned_host'"):
        made({"layer1": "m0@pinned", "layer3": "m1"})
    with pytest.raises(mt.MeshTensorError, match=r"'w0' is a parameter, which stays on its devices"):
        made(["layer1"], memory={"w0": "pinned_host"})
    with pytest.raises(mt.MeshTensorError, match="memory='pinned_host'"):
        made(["layer1"], memory="pinned_host")
