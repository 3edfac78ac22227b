"""Every kernel, unsharded, against its torch reference: interpreted at all sizes, compiled for the CPU at one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from tvm import tirx

import mesh_tensor as mt
from kernels.catalogue import CASES, KernelCase
from kernels.layer_norm import group_norm, group_norm_reference
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.interpreter import interpret

from .adversarial import ADVERSARIAL_CASES, PERSISTENT_CASE

ALL_CASES = (*CASES, *ADVERSARIAL_CASES)


def run_interpreted(case: KernelCase, func: tirx.PrimFunc, sizes: dict[str, int], seed: int, poison: bool) -> None:
    """Run the kernel on the interpreter and check its outputs, and that its inputs are as before."""
    inputs = case.make_inputs(sizes, seed)
    arguments = case.arguments(func, inputs)
    before = {name: tensor.clone() for name, tensor in arguments.items() if name not in case.outputs}
    interpret(func, [as_numpy(tensor) for tensor in arguments.values()], poison=poison)
    case.check(arguments, case.expected(inputs))
    for name, tensor in before.items():
        assert torch.equal(arguments[name], tensor), f"{case.name} changes its input {name}"


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as a numpy array."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def describe(value: object) -> str | None:
    """A test id: the case's name, or its sizes."""
    if isinstance(value, KernelCase):
        return value.name
    return ",".join(f"{name}={extent}" for name, extent in value.items()) if isinstance(value, dict) else None


@pytest.mark.parametrize(("case", "sizes"), [(case, sizes) for case in ALL_CASES for sizes in case.sizes], ids=describe)
def test_interpreted(case: KernelCase, sizes: dict[str, int]):
    func = case.build(**sizes)
    run_interpreted(case, func, sizes, seed=0, poison=False)
    if not case.reads_padding:
        run_interpreted(case, func, sizes, seed=1, poison=True)


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.reads_padding], ids=describe)
def test_loads_past_the_end_are_refused_under_poison(case: KernelCase):
    with pytest.raises(MeshTensorError, match=r"reads (\w+)\[(13|30)\b.*\], which is outside \1's shape \(\2,"):
        run_interpreted(case, case.build(**case.sizes[1]), case.sizes[1], seed=0, poison=True)


@pytest.mark.parametrize("case", ALL_CASES, ids=describe)
def test_compiled(case: KernelCase):
    sizes = case.sizes[min(1, len(case.sizes) - 1)]
    func, inputs = case.build(**sizes), case.make_inputs(sizes, seed=2)
    arguments = case.arguments(func, inputs)
    compile_for_cpu(func)(*arguments.values())
    case.check(arguments, case.expected(inputs))


def test_group_norm_by_images_and_groups():
    mesh, layouts = mt.Mesh({"x": 2, "y": 2}), {"X": {"x": 0, "y": 1}, "weight": {"y": 0}, "bias": {"y": 0}}
    kernel = mt.compile(mt.annotate(group_norm(3, 12, 40, 4), mesh, layouts), target="c", strict=True)
    x, weight, bias = torch.randn(3, 12, 40), torch.randn(12), torch.randn(12)
    torch.testing.assert_close(kernel(x, weight, bias), group_norm_reference(x, weight, bias, 4), rtol=1e-4, atol=1e-4)


def test_index_that_is_bound_before_its_loop_is_refused():
    sizes = PERSISTENT_CASE.sizes[0]
    with pytest.raises(MeshTensorError, match="can't give a value to variable 'w'"):
        run_interpreted(PERSISTENT_CASE, PERSISTENT_CASE.build(**sizes), sizes, seed=0, poison=False)
