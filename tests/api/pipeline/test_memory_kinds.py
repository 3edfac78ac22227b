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


@pytest.mark.parametrize("other_memory", [False, True])
def test_weights_on_the_host(other_memory, monkeypatch):
    """They are copied to the device for every action that takes them, and come back when they are updated."""
    copies = []
    to_host = memory_kinds._to_host
    monkeypatch.setattr(memory_kinds, "_to_host", lambda tensor: copies.append(tensor) or to_host(tensor))
    if other_memory:
        monkeypatch.setattr(memory_kinds, "_is_host", lambda device: False)
    plain = made(["layer1"])
    run = made(["layer1"], memory={"w0": "pinned_host", "w2": "pinned_host", "w1": "device"})
    assert "stage 0 has the weight 'w0' in memory of kind 'pinned_host'" in run.explain()
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    count = sum(stage.params.count(name) for stage in run.stages for name in ("w0", "w2"))
    for step in range(2):
        assert torch.equal(run(x, y), plain(x, y))
        wanted = plain.gradients()
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in run.gradients().items())
        away = {name for held in run._weights.of.values() for name, value in held.items() if _is_away(value)}
        assert away == ({"w0", "w2"} if other_memory else set())
        assert len(copies) == (count * (step + 1) if other_memory else 0)
        for each in (run, plain):
            each.update(lambda weight, gradient, state: weight - 0.1 * gradient, max_norm=0.5)
        weights = plain.weights()
        assert all(torch.equal(weight, weights[name]) for name, weight in run.weights().items())


def _is_away(value):
    return isinstance(value, memory_kinds.PutAway)


def test_memory_that_there_is_not():
    with pytest.raises(mt.MeshTensorError, match=r"'layer1' is in memory of kind 'pinned'; did you mean 'pinned_host'"):
        made({"layer1": "m0@pinned", "layer3": "m1"})
    with pytest.raises(mt.MeshTensorError, match=r"'x' is an input, which comes with every batch"):
        made(["layer1"], memory={"x": "pinned_host"})
    with pytest.raises(mt.MeshTensorError, match="memory='pinned_host'"):
        made(["layer1"], memory="pinned_host")
