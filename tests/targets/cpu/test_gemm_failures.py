"""What is refused of the choice who multiplies blocks."""

from mesh_tensor.targets.cpu import blas as cpu_blas
from tests.refusals import refusal


def test_an_unknown_choice(monkeypatch):
    monkeypatch.setenv("MESH_TENSOR_GEMM", "mkl")
    message = refusal(cpu_blas.blas_wanted)
    assert "MESH_TENSOR_GEMM is 'mkl' in the environment" in message
    assert "set it to one of auto, own, blas" in message


def test_blas_where_torch_has_none(monkeypatch):
    monkeypatch.setenv("MESH_TENSOR_GEMM", "blas")
    monkeypatch.setattr(cpu_blas, "_functions", lambda: None)
    message = refusal(cpu_blas.blas_wanted)
    assert "MESH_TENSOR_GEMM=blas is in the environment, but there is no BLAS to use" in message
    assert "exports no sgemm_ beside MKL_Set_Num_Threads_Local" in message
    assert "set MESH_TENSOR_GEMM=own, or use a build of torch with MKL" in message
