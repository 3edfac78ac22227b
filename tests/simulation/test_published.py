"""Simulations beside published measurements, by the preset's constants as they are."""

import pytest

from benchmarks.bench_published import BACKWARD, FORWARD, MODELS, TENSOR_PARALLEL, half_precision, layer_seconds
from benchmarks.bench_published_training import dlperf, ptdp, recomputed, simulated
from mesh_tensor.base.machine import Machine


def test_a_layer_of_a_22b_model_on_eight_a100():
    """2205.05198, table 4: 7.7 ms forward, 11.9 ms backward."""
    forward, backward = layer_seconds(MODELS[0], half_precision())
    assert forward * 1e3 == pytest.approx(FORWARD, rel=0.1)
    assert backward * 1e3 == pytest.approx(BACKWARD, rel=0.1)


def test_more_than_half_of_the_peak_and_not_more_than_there_is():
    """72 b s h^2 (1 + s / 6h) operations of a layer, forward and backward, over 8 GPUs."""
    model = MODELS[0]
    tokens, width = model.microbatch * 2048, model.width
    flops = 72 * tokens * width**2 * (1 + 2048 / (6 * width)) / TENSOR_PARALLEL
    share = flops / sum(layer_seconds(model, half_precision())) / Machine.preset("a100").peak("float16")
    assert 0.4 < share < 0.7


@pytest.mark.parametrize("step", [ptdp()[0], ptdp()[5], recomputed()[1], dlperf()[5]], ids=lambda step: step.name)
def test_steps_of_training(step):
    """2104.04473, table 1; 2205.05198, table 5; DLPerf's report."""
    preset = "v100" if step in dlperf() else "a100"
    assert simulated(step, half_precision(preset)) == pytest.approx(step.seconds, rel=0.12)
