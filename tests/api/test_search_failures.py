"""What can't be searched."""

from dataclasses import replace

import pytest
import torch

import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.models import mlp
from tests.refusals import refusal


@pytest.fixture(scope="module")
def perceptron():
    return mt.from_torch(torch.export.export(mlp.build(), mlp.example_inputs()), check=False)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"devices": True}, "devices is True"),
        ({"devices": 2, "objective": "money"}, "objective is 'money'"),
        ({"devices": 2, "width": 0}, "width is 0"),
        ({"devices": 2, "memory_limit": -1}, "memory_limit is -1"),
        ({"devices": 2, "memory_limit": "1 GB"}, "memory_limit is '1 GB'"),
        ({"devices": 2, "memory_limit": True}, "memory_limit is True"),
        ({"devices": 2, "objective": ["time"]}, "objective is ['time']"),
        ({"devices": 2, "seconds": None}, "seconds is None"),
        ({"devices": 2, "seconds": float("nan")}, "seconds is nan"),
        ({"devices": 2, "progress": 3}, "progress is 3"),
        ({"devices": 2, "meshes": []}, "meshes is []"),
        ({"devices": 2, "meshes": {"x": 2}}, "meshes is {'x': 2}"),
        ({"devices": 2, "uneven": True}, "uneven of a search without a batch"),
        ({"devices": 2, "batch": 8, "inputs": ("x",), "schedules": ["gpipes"]}, "did you mean 'gpipe'?"),
        ({"devices": 16, "machine": "h100x8"}, "the search has 16 devices, the machine 8"),
        ({"devices": 4, "meshes": [{"x": 2}, {"x": 8}]}, 'Mesh({"x": 8}) has 8 devices, the search 4'),
        ({"devices": 2, "machine": "b100"}, "there is no machine 'b100'"),
        ({"devices": 2, "function": "other"}, "other"),
        ({"devices": mt.Topology({"a": {"x": 2}, "b": {"x": 2}})}, "layouts of a module on several meshes"),
    ],
)
def test_bad_questions(perceptron, options, fact):
    message = refusal(mt.search, perceptron, **options)
    assert fact in message


def test_memory_that_is_too_small_for_anything(perceptron):
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.search(perceptron, 2, memory_limit=100)
    message = str(caught.value)
    assert "no strategy fits into 100 bytes per device" in message
    least = mt.search(perceptron, 2, objective="memory").best.memory
    assert f"the smallest that was found needs {least:,}" in message
    assert "take more devices, or a machine with more memory" in message


def test_a_machine_without_a_rate_is_told_why_nothing_can_be_planned(perceptron):
    halves = replace(mt.Machine.preset("h100"), flops={"float16": 1e15})
    for module in (perceptron, matmul(64, 64, 64)):
        with pytest.raises(mt.MeshTensorError, match="no rate of operations on float32"):
            mt.search(module, 2, halves)


def test_a_module_that_has_layouts(perceptron):
    """They were left out of what was simulated, and stood in what was distributed."""
    mod = mt.annotate_module(perceptron.mod, {"x": 2}, {"x": {"x": 1}})
    message = refusal(mt.search, mod, 2)
    assert 'is annotated for Mesh({"x": 2}) already' in message
    assert "search the module as it was before" in message


def test_no_module():
    with pytest.raises(mt.MeshTensorError, match="search"):
        mt.search(3, 2)


@pytest.mark.parametrize("seconds", ["a", 0, -1, float("nan")])
def test_no_time_to_measure_a_machine(seconds):
    with pytest.raises(mt.MeshTensorError, match="Machine.measure") as caught:
        mt.Machine.measure(seconds)
    assert f"seconds is {seconds!r}" in str(caught.value)
