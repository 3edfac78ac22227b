"""Kernels in slabs compute the bits of bulk, whatever the kernel."""

import pytest
import torch
from tvm import tirx

import mesh_tensor as mt
from kernels.flash_attention import flash_attention
from kernels.matmul_bias_gelu import matmul_bias_gelu
from kernels.reduce import reduce_rows
from mesh_tensor.program.steps import KernelStep, WaitStep
from tests import sweep_points
from tests.runtime.ranks.support import pure

from .test_overlap import BOTH, GATHERED, REDUCED, SCATTERED, X2, program, small

CASES = {
    "reduced": (small(75), X2, REDUCED),
    "gathered": (small(75), X2, GATHERED),
    "scattered": (small(75), X2, SCATTERED),
    "both": (small(75), {"x": 2, "y": 2}, BOTH),
    "split rows": (small(64), {"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}),
    "uneven k": (small(64, 32, 37), {"x": 3}, REDUCED),
    "cut": (matmul_bias_gelu(64, 32, 32, 16, 16, 16), X2, REDUCED),
    "rows": (reduce_rows(64, 32, block_M=16), X2, {"A": {"x": 1}}),
}


def both_ways(func, mesh, layouts, slabs, target):
    """The results in bulk and in slabs, on random inputs, and the inputs."""
    annotated = mt.annotate(func, mesh, layouts)
    bulk, made = (mt.compile(annotated, target=target, poison=target == "interpret", overlap=o) for o in ("off", slabs))
    assert any(isinstance(step, WaitStep) for step in made.program.steps)
    values = made.program.values
    inputs = [torch.randn(values[p.input].shape) for p in made.program.parameters if p.input]
    return bulk(*inputs), made(*inputs), inputs


@pytest.mark.parametrize("slabs", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name, slabs):
    bulk, made, inputs = both_ways(*CASES[name], slabs, "interpret")
    assert torch.equal(pure(bulk), pure(made))
    if len(inputs) == 2:
        torch.testing.assert_close(made, inputs[0] @ inputs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["reduced", "gathered", "cut"])
def test_compiled(name):
    bulk, made, _ = both_ways(*CASES[name], 3, "c")
    assert torch.equal(pure(bulk), pure(made))


def test_coordinates_that_are_values_stay_global():
    """A causal mask compares positions: every slab has kernels of its own."""
    func = flash_attention(1, 1, 64, 64, 8, causal=True, block_M=16, block_N=16, dtype="float32")
    layouts = {"Q": {"x": 3}, "K": {}, "V": {}, "Out": {}}
    made = program(func, X2, layouts, 4)
    kernels = [step for step in made.steps if isinstance(step, KernelStep)]
    assert len({id(step.func) for step in kernels}) == len(kernels) == 4
    bulk, slabs, _ = both_ways(func, X2, layouts, 4, "interpret")
    assert torch.equal(pure(bulk), pure(slabs))


@pytest.mark.parametrize("name", sorted(sweep_points.KERNELS))
def test_catalogue(name):
    """Every kernel, with shardings of which some make collectives beside it: the bits of bulk."""
    case = sweep_points.KERNELS[name]
    func, inputs = case.build(**case.sizes[0]), case.make_inputs(case.sizes[0])
    ndims = {key: tensor.ndim for key, tensor in case.arguments(func, inputs).items()}
    is_open = any(isinstance(size, tirx.Var) for buffer in func.buffer_map.values() for size in buffer.shape)
    for point in sweep_points.sample(name, (2,), 0, 3):
        kernels, outcomes = [], []
        try:
            annotated = mt.annotate(func, mt.Mesh(X2), sweep_points.sharding_at(ndims, "x", point.index))
            for overlap in ("off", 2):
                kernel = mt.compile(annotated, target="interpret", poison=True, overlap=overlap)
                if is_open:  # it is lowered when it is called
                    kernel(*case.arguments(func, inputs).values())
                kernels.append(kernel)
        except mt.MeshTensorError:
            assert not kernels, f"only in slabs it is refused: {point}"
            continue
        bulk, slabs = (kernel.program.steps for kernel in kernels)
        if not any(isinstance(step, WaitStep) for step in slabs):
            assert [(step.words, step.uses, step.writes) for step in bulk] == [
                (step.words, step.uses, step.writes) for step in slabs
            ]
            continue
        for kernel in kernels:
            outcomes.append(case.arguments(func, inputs))
            kernel(*outcomes[-1].values())
        for key, tensor in outcomes[0].items():
            assert torch.equal(pure(tensor), pure(outcomes[1][key])), f"{point.arguments}, {key}"
