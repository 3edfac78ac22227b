"""A deterministic sample of `make sweep`: every kernel on every mesh, at sizes that take turns."""

import pytest

from tests.sweep_points import KERNELS, MESHES, NEVER_REFUSED, count_shardings, run, sample, sharding_at

POINTS_PER_MESH = 1


def points(kernel):
    """A few points of a kernel on each mesh; the sizes take turns over the meshes."""
    sizes = len(KERNELS[kernel].sizes)
    return [point for turn, mesh in enumerate(MESHES) for point in sample(kernel, mesh, turn % sizes, POINTS_PER_MESH)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_sample_is_right_or_refused(kernel):
    outcomes = {point.arguments: run(point) for point in points(kernel)}
    wrong = {name: outcome.reason for name, outcome in outcomes.items() if outcome.verdict == "wrong"}
    assert not wrong
    refused = {name: outcome.reason for name, outcome in outcomes.items() if outcome.verdict == "refused"}
    assert kernel not in NEVER_REFUSED or not refused


def test_shardings_are_numbered_without_gaps_or_repeats():
    ndims = {"A": 2, "B": 1}
    found = {str(sharding_at(ndims, "xy", index)) for index in range(3**2 * 2**2)}
    assert len(found) == 3**2 * 2**2
    assert count_shardings("vector_add", (2, 2)) == 2 ** (3 * 2)
