"""Simulations beside published measurements, by the preset's constants as they are."""

import statistics

import pytest

from benchmarks.bench_published import SIZES, TENSOR_PARALLEL, half_precision, layer_of, layer_seconds, table_2, table_4
from benchmarks.bench_published_training import dlperf, ptdp, recomputed, simulated
from mesh_tensor.base.machine import Machine


def test_a_layer_of_a_22b_model_on_eight_a100():
    """2205.05198, table 4."""
    errors = [abs(ours / theirs - 1) for _, theirs, ours in table_4(half_precision())]
    assert statistics.mean(errors) < 0.05
    assert max(errors) < 0.1


def test_the_bytes_of_activations():
    """2205.05198, table 2: s b h (34 + 5 a s / h) and what of it is split, gathered again, or recomputed."""
    made = list(table_2(half_precision(), ["22B"]))
    assert len(made) == 6
    assert [ours for _, _, ours in made] == [theirs for _, theirs, _ in made]


def test_more_than_half_of_the_peak_and_not_more_than_there_is():
    """72 b s h^2 (1 + s / 6h) operations of a layer, forward and backward, over 8 GPUs."""
    width, heads, rows = SIZES["22B"]
    flops = 72 * rows * 2048 * width**2 * (1 + 2048 / (6 * width)) / TENSOR_PARALLEL
    machine = half_precision()
    forward, backward, _ = layer_seconds(layer_of(rows, width, heads, machine, TENSOR_PARALLEL, False), machine)
    share = flops / (forward + backward) / Machine.preset("a100").peak("float16")
    assert 0.4 < share < 0.7


@pytest.mark.parametrize(
    "step", [ptdp()[0], ptdp()[5], recomputed()[1], recomputed()[5], dlperf()[5]], ids=lambda s: f"{s.name} {s.choice}"
)
def test_steps_of_training(step):
    """2104.04473, table 1; 2205.05198, table 5; DLPerf's report."""
    preset = "v100" if step in dlperf() else "a100"
    assert simulated(step, half_precision(preset)) == pytest.approx(step.seconds, rel=0.12)
