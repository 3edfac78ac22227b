"""A deterministic sample of `make sweep`: every kernel on every mesh, at sizes that take turns."""

from dataclasses import replace

import pytest
import torch

import mesh_tensor as mt

from .sweep_points import KERNELS, MESHES, NEVER_REFUSED, Outcome, Point, count_shardings, run, sample, sharding_at

POINTS_PER_MESH = 1
#: Of seven meshes, a kernel is on so many; which ones, kernels take turns with.
MESHES_PER_KERNEL = 4


def points(kernel):
    """A few points of a kernel on some of the meshes; the sizes take turns over the meshes."""
    sizes, first = len(KERNELS[kernel].sizes), list(KERNELS).index(kernel)
    turns = [(first + 2 * step) % len(MESHES) for step in range(MESHES_PER_KERNEL)]
    return [p for turn in turns for p in sample(kernel, MESHES[turn], turn % sizes, POINTS_PER_MESH)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_sample_is_right_or_refused(kernel):
    outcomes = {point.arguments: run(point) for point in points(kernel)}
    wrong = {name: outcome.reason for name, outcome in outcomes.items() if outcome.verdict == "wrong"}
    assert not wrong
    refused = {name: outcome.reason for name, outcome in outcomes.items() if outcome.verdict == "refused"}
    assert kernel not in NEVER_REFUSED or not refused


@pytest.mark.parametrize("kernel", list(KERNELS)[::5])
def test_compiled_kernels_agree(kernel):
    sizes = len(KERNELS[kernel].sizes)
    outcomes = {point.arguments: run(point, target="c") for point in sample(kernel, (2, 2), 1 % sizes, 2)}
    assert not {name: outcome.reason for name, outcome in outcomes.items() if outcome.verdict == "wrong"}


def test_shardings_are_numbered_without_gaps_or_repeats():
    ndims = {"A": 2, "B": 1}
    found = {str(sharding_at(ndims, "xy", index)) for index in range(3**2 * 2**2)}
    assert len(found) == 3**2 * 2**2
    assert count_shardings("vector_add", (2, 2)) == 2 ** (3 * 2)


ADD = KERNELS["vector_add"]


def test_a_result_that_torch_disagrees_with_is_wrong(monkeypatch):
    monkeypatch.setitem(KERNELS, "not_subtract", replace(ADD, reference=lambda a, b: a - b))
    outcome = run(Point("not_subtract", (2,), 0, 1))
    assert outcome.verdict == "wrong"
    assert "C: Tensor-likes are not equal" in outcome.reason


def test_modifying_an_input_is_wrong(monkeypatch):
    def with_c(generator, sizes):
        return [*ADD.inputs(generator, sizes), torch.zeros(sizes["N"])]

    case = replace(ADD, inputs=with_c, outputs=("A",), inouts=("A",), reference=lambda a, b, c: a)
    monkeypatch.setitem(KERNELS, "not_reading", case)
    outcome = run(Point("not_reading", (2,), 0, 1))
    assert outcome.verdict == "wrong"
    assert "input C was modified" in outcome.reason


def test_a_refusal_is_told_by_its_kind(monkeypatch):
    def refuse(*_, **__):
        raise mt.MeshTensorError("buffer 'A' has 3 dims\n  where: here\n  why: axis 'x' is 2")

    monkeypatch.setattr(mt, "compile", refuse)
    assert run(Point("vector_add", (2,), 0, 1)) == Outcome("refused", "buffer '_' has N dims; why: axis '_' is N")


def test_a_crash_is_wrong(monkeypatch):
    monkeypatch.setattr(mt, "compile", lambda *_, **__: 1 // 0)
    assert run(Point("vector_add", (2,), 0, 1)).verdict == "wrong"


def test_a_sample_is_the_same_every_time():
    first = sample("matmul", (2, 2), 1, 20)
    assert first == sample("matmul", (2, 2), 1, 20)
    assert len({point.index for point in first}) == 20
    assert len(sample("vector_add", (2,), 0, 0)) == count_shardings("vector_add", (2,)) == 8
