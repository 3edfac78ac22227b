"""The legality checks let every lowering pass, and run where the environment asks for them."""

import pytest

from kernels.catalogue import CASES
from mesh_tensor.lowering import verify
from mesh_tensor.program.from_kernel import build_program
from mesh_tensor.program.verify import verify_program

from .kernels import matmul
from .support import lowered

K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}}


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_what_is_lowered_is_legal(case):
    func = case.build(**case.sizes[-1])
    ndims = {func.buffer_map[p].name: len(func.buffer_map[p].shape) for p in func.params if p in func.buffer_map}
    layouts = {name: {"x": 0, "y": ndim - 1} for name, ndim in ndims.items()}
    result = lowered(func, {"x": 2, "y": 3}, layouts)
    assert not verify.explicit_problems(result)
    verify_program(build_program(result))


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_asks_for_it(monkeypatch, value, on):
    if value is None:
        monkeypatch.delenv("MESH_TENSOR_VERIFY")
    else:
        monkeypatch.setenv("MESH_TENSOR_VERIFY", value)
    assert verify.enabled() is on


def test_lowering_checks_every_stage_and_building_the_program(monkeypatch):
    seen = []
    monkeypatch.setattr("mesh_tensor.lowering.pipeline.raise_on", lambda problems, what: seen.append(what))
    monkeypatch.setattr("mesh_tensor.program.verify.verify_program", lambda program: seen.append(program.name))
    build_program(lowered(matmul(32, 32, 32), {"x": 2}, K_SPLIT))
    stages = ["Annotated", "Ruled", "Part", "Parts", "LocalParts", "Lowered"]
    assert seen == [*(f"the record {stage}" for stage in stages), "matmul"]
    monkeypatch.setenv("MESH_TENSOR_VERIFY", "0")
    build_program(lowered(matmul(32, 32, 32), {"x": 2}, K_SPLIT))
    assert len(seen) == len(stages) + 1
