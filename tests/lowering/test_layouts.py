"""Layout changes of tensors with symbolic sizes, and kernels whose layouts change by permutes and exchanges."""

import pytest
import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor import Mesh, Sharding
from mesh_tensor.lowering.layouts import plan_for
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.steps import CollectiveStep
from mesh_tensor.redistribution.plan import plan_moves

from .kernels import scale

MESH = Mesh({"x": 2, "y": 2})


@pytest.mark.parametrize(
    ("src", "dst"), [("S[0], S[1]", "R, S[0]"), ("P[sum], S[0]", "S[0], S[1]"), ("R, S[0]", "S[0], S[0]")]
)
def test_unknown_sizes_count_as_large(src, dst):
    src, dst = (Sharding.parse(MESH, 2, text) for text in (src, dst))
    symbolic = plan_for(src, dst, (tirx.Var("n", "int32"), tirx.IntImm("int32", 64)))
    assert symbolic == plan_moves(src, dst, (4096, 64))


@pytest.mark.parametrize("shape", [(32, 16), (13, 7)])
@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ({"y": 0}, {"x": 0, "y": 0}, "exchange"),
        ({"x": 0, "y": 1}, {"x": 1, "y": 0}, "permute"),
        ({"x": 0, "y": 0}, {"y": 0}, "exchange"),
    ],
)
def test_kernels_between_layouts(shape, a, b, kind):
    func = mt.annotate(scale(*shape), MESH, {"A": a, "B": b})
    program = lower_to_program(func)
    (step,) = (step for step in program.steps if isinstance(step, CollectiveStep))
    assert (step.kind, step.axes) == (kind, ("x", "y"))
    before, after = (program.values[name].sharding for name in (step.src, step.dst))
    assert f"T.mesh.{kind}" in (text := mt.lower(func).script())
    assert f'"{before}", "{after}", "x", "y")' in text
    tensor = torch.randn(shape)
    assert torch.equal(mt.compile(func, target="interpret", poison=True)(tensor), 2 * tensor)
