"""Local kernels become CUDA code, and machine code where nvcc is found, without a GPU; where there is one, they run."""

import re
import shutil

import pytest
import torch
import torch.nn.functional as F

import mesh_tensor as mt
from kernels.flash_attention import flash_attention
from kernels.matmul import matmul
from kernels.matmul_bias_gelu import matmul_bias_gelu
from kernels.rms_norm import rms_norm
from kernels.softmax import softmax
from mesh_tensor.lowering.local_view import LocalKernel
from mesh_tensor.lowering.pipeline import lower_kernel
from mesh_tensor.targets.cuda.kernel import compile_for_cuda, cuda_binary, cuda_source
from tests.constructs.tile_operations import reducer

from .kernels import ARCHITECTURES, CASES

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def entries(source):
    """(name, parameter names) of the kernels in CUDA source; a tensor that TMA loads counts under its own name."""
    found = re.findall(r"__global__ void __launch_bounds__\([^)]*\) (\w+)\(([^)]*)\) \{", source)
    return [(name, [p.split()[-1].removesuffix("_desc") for p in params.split(",")]) for name, params in found]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_source(name, arch):
    case = CASES[name]
    steps = case.local_kernels
    sources = [cuda_source(step.func, arch) for step in steps]
    assert len(sources) == case.kernels
    with_products = [source for source in sources if all(text in source for text in ARCHITECTURES[arch])]
    assert len(with_products) == case.products
    for step, source in zip(steps, sources, strict=True):
        ((entry, parameters),) = entries(source)
        assert entry == f"{step.name}_kernel"
        tensors = {step.func.buffer_map[param].name for param in step.func.params if param in step.func.buffer_map}
        assert set(parameters) == tensors | set(step.axes)
        assert parameters[len(tensors) :] == list(step.axes)
    assert sum(bool(step.axes) for step in steps) == case.coordinates


def test_reducers_are_reducers_again():
    """The start, whose part of a split dim it is, counts on one device."""
    func = mt.annotate(reducer("sum", 2.5)(), {"x": 2}, {"X": {"x": 0}})
    first = next(step for step in lower_kernel(func).steps if isinstance(step, LocalKernel))
    source = cuda_source(first.func)
    assert "tl::AllReduce<tl::SumOp" in source
    assert re.search(r"if \(\(?x == 0\)? ?\)? \{\s*condval = 0x1.4p\+1f", source)
    assert "total_seed[0] = condval" in source


def test_the_coordinate_decides_who_adds_the_bias():
    first, _ = CASES["matmul+bias+gelu, K split"].local_kernels
    assert first.axes == ("x",)
    source = cuda_source(first.func, "sm_80")
    assert re.search(r"\bbias\b[^;]*\bint x\)", source)
    assert re.search(r"\(?x == 0\)?|0 == x|x <= 0|x < 1", source.split("{", 1)[1])


@pytest.mark.parametrize(
    ("name", "index", "arch"),
    [
        *(("matmul, K split", 0, arch) for arch in ARCHITECTURES),
        ("matmul, K split", 1, "sm_90a"),
        ("matmul+bias+gelu, K split", 0, "sm_90a"),
        ("softmax, columns split", 1, "sm_80"),
        ("RMSNorm, columns split", 0, "sm_100a"),
        ("MLP, up", 0, "sm_80"),
    ],
)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc; `make cuda` compiles all kernels")
def test_binary(name, index, arch):
    step = CASES[name].local_kernels[index]
    binary = cuda_binary(step.func, arch)
    assert binary[:4] == b"\x7fELF"
    assert f"{step.name}_kernel".encode() in binary


@needs_gpu
def test_a_ragged_matmul_runs():
    a = torch.randn(250, 120, device="cuda", dtype=torch.float16)
    b = torch.randn(120, 136, device="cuda", dtype=torch.float16)
    c = torch.empty(250, 136, device="cuda")
    compile_for_cuda(matmul(250, 136, 120, dtype="float16", out_dtype="float32"))(a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-2, atol=1e-2)


def normal(*shape, dtype=torch.float16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def run_sharded(kernel, shardings, *tensors):
    return mt.compile(mt.annotate(kernel, {"x": 2}, shardings), target="cuda")(*tensors)


@needs_gpu
def test_a_k_split_matmul_runs_on_a_virtual_mesh():
    a, b = normal(256, 512), normal(512, 256)
    c = run_sharded(matmul(256, 256, 512, dtype="float16"), {"A": {"x": 1}, "B": {"x": 0}, "C": {}}, a, b)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-1)


@needs_gpu
def test_a_bias_is_added_once():
    a, b, bias = normal(256, 512) / 16, normal(512, 256), normal(256, dtype=torch.float32)
    kernel = matmul_bias_gelu(256, 256, 512, dtype="float16")
    c = run_sharded(kernel, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}, a, b, bias)
    expected = F.gelu(a.float() @ b.float() + bias, approximate="tanh")
    torch.testing.assert_close(c.float(), expected, rtol=1e-2, atol=1e-2)


@needs_gpu
def test_rows_that_are_split_run():
    x, weight = normal(128, 256, dtype=torch.float32), normal(256, dtype=torch.float32)
    y = run_sharded(softmax(128, 256), {"X": {"x": 1}, "Y": {"x": 1}}, x)
    torch.testing.assert_close(y, torch.softmax(x, 1), rtol=1e-5, atol=1e-6)
    split = {"X": {"x": 1}, "weight": {"x": 0}, "Y": {"x": 1}}
    y = run_sharded(rms_norm(128, 256), split, x, weight)
    torch.testing.assert_close(y, F.rms_norm(x, (256,), weight, eps=1e-6), rtol=1e-5, atol=1e-5)


@needs_gpu
def test_causal_attention_with_split_queries_runs():
    q, k, v = (normal(1, 4, 128, 64) for _ in range(3))
    kernel = flash_attention(1, 4, 128, 128, 64, causal=True)
    out = run_sharded(kernel, {"Q": {"x": 2}, "Out": {"x": 2}}, q, k, v)
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
