"""Collectives of a Program that don't lead from one value's layout to the other's."""

import pytest

from mesh_tensor import Mesh
from mesh_tensor.lowering.verify import VerificationError
from mesh_tensor.program.steps import CollectiveStep
from mesh_tensor.program.verify import verify_collective
from tests.runtime.programs import value

MESH = Mesh({"x": 2, "y": 2})


def step(kind, axes, op=None, dst_dim=None):
    return CollectiveStep(kind, "A", "B", axes, op, None, dst_dim, 0, "")


def test_a_step_must_say_what_its_values_say():
    src, dst = value("A", (4,), MESH, {}, {"x": "sum"}), value("B", (4,), MESH, {})
    verify_collective(step("all_reduce", ("x",), "sum"), src, dst)
    wrong = [
        (step("all_reduce", ("y",), "sum"), "axis y goes from R to R, and not from P[sum] to R"),
        (step("all_reduce", ("x",), "max"), "axis x goes from P[sum] to R, and not from P[max] to R"),
        (step("reduce_scatter", ("x",), "sum", 0), "axis x goes from P[sum] to R, and not from P[sum] to S[0]"),
        (step("exchange", ("x",)), "it goes from P[sum], R to R, R, which changes what is partial"),
        (step("gossip", ("x",)), "there is no such collective; use one of 'all_reduce', 'reduce_scatter'"),
        (step("all_reduce", (), "sum"), "it is over no axis"),
    ]
    for collective, fact in wrong:
        with pytest.raises(VerificationError) as caught:
            verify_collective(collective, src, dst)
        assert f"{collective.kind} of A into B is not legal" in str(caught.value)
        assert fact in str(caught.value)


def test_a_direct_step_must_be_over_all_axes_that_it_takes():
    src, dst = value("A", (4,), MESH, {"x": 0}), value("B", (4,), MESH, {"y": 0})
    verify_collective(step("permute", ("x", "y")), src, dst)
    for kind, axes in (("permute", ("x",)), ("exchange", ("x", "y"))):
        with pytest.raises(VerificationError, match=r"from S\[0\], R to R, S\[0\] leads the permute over x, y"):
            verify_collective(step(kind, axes), src, dst)
