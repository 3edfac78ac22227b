"""What is refused of the choice who multiplies blocks."""

import pytest

from mesh_tensor import MeshTensorError
from mesh_tensor.targets.cpu import blas as cpu_blas


def test_an_unknown_choice(monkeypatch):
    monkeypatch.setenv("MESH_TENSOR_GEMM", "mkl")
    with pytest.raises(MeshTensorError) as error:
        cpu_blas.blas_wanted()
    assert "MESH_TENSOR_GEMM is 'mkl' in the environment" in str(error.value)
    assert "set it to one of auto, own, blas" in str(error.value)


def test_blas_where_torch_has_none(monkeypatch):
    monkeypatch.setenv("MESH_TENSOR_GEMM", "blas")
    monkeypatch.setattr(cpu_blas, "_functions", lambda: None)
    with pytest.raises(MeshTensorError) as error:
        cpu_blas.blas_wanted()
    assert "MESH_TENSOR_GEMM=blas is in the environment, but there is no BLAS to use" in str(error.value)
    assert "exports no sgemm_ beside MKL_Set_Num_Threads_Local" in str(error.value)
    assert "set MESH_TENSOR_GEMM=own, or use a build of torch with MKL" in str(error.value)
