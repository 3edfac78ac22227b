"""What can't be compiled for CUDA is refused with a reason."""

import pytest
import tilelang.language as T
import torch

from mesh_tensor import MeshTensorError
from mesh_tensor.targets.cuda import kernel as cuda
from tests.refusals import refusal


def kernel(bad=False):
    @T.prim_func
    def square_kernel(X: T.Tensor((128,))):
        with T.Kernel(1, threads=128):
            block = T.alloc_shared((1 << 20,) if bad else (128,), "float32")
            T.copy(X, block[0:128])
            for i in T.Parallel(128):
                X[i] = block[i] * block[i]

    return square_kernel


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(MeshTensorError, match="needs a GPU") as caught:
        cuda.compile_for_cuda(kernel())
    assert "target='c'" in str(caught.value)


def test_no_nvcc(monkeypatch):
    monkeypatch.setattr(cuda.shutil, "which", lambda name: None)
    with pytest.raises(MeshTensorError, match="no nvcc") as caught:
        cuda.cuda_binary(kernel())
    assert "cuda_source" in str(caught.value)


def test_an_unknown_architecture_names_the_kernel():
    message = refusal(lambda: cuda.cuda_source(kernel(), "sm_none"))
    assert "kernel 'square_kernel'" in message
    assert "why: " in message


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_an_architecture_without_its_variant(arch):
    with pytest.raises(MeshTensorError, match=f"unsupported architecture '{arch}'") as caught:
        cuda.cuda_source(kernel(), arch)
    assert f"use '{arch}a'" in str(caught.value)
