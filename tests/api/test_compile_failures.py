"""What compile and a MeshKernel's call refuse, what they say, and that nothing is changed."""

import pytest
import tilelang.language as T
import torch

from mesh_tensor import Mesh, MeshTensorError
from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.api.compile import compile
from mesh_tensor.runtime.virtual.mesh_tensor import distribute
from tests.refusals import refusal
from tests.runtime.programs import (
    add_one_kernel,
    add_one_program,
    axpy_kernel,
    kernel_by,
    kernel_of,
    local_axpy_kernel,
    matmul_k_split,
    matmul_kernel,
)


@pytest.fixture
def matmul():
    return kernel_of(matmul_kernel(16, 24, 32), matmul_k_split(16, 24, 32))


@pytest.fixture
def add_one():
    return kernel_of(add_one_kernel(8), add_one_program(8, 2))


def test_unsupported_target():
    text = refusal(compile, add_one_kernel(8), target="rocm")
    assert "unsupported target 'rocm'" in text
    assert "'auto', 'c', 'cuda', 'interpret'" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    text = refusal(compile, add_one_kernel(8), target="cuda")
    assert "needs a GPU" in text
    assert "target='c'" in text


def test_poison_is_for_the_interpreter():
    assert "use target='interpret'" in refusal(compile, add_one_kernel(8), target="c", poison=True)


def test_not_a_prim_func():
    text = refusal(compile, lambda: None)
    assert "'<lambda>' is no kernel (PrimFunc), but a function that makes one" in text
    assert "call it with sizes" in text


@pytest.mark.parametrize(
    ("out_idx", "fact"),
    [
        (2, "out_idx has 2, but there are 2 parameters"),
        (-3, "out_idx has -3, but there are 2 parameters"),
        (0, "out_idx has 0, but the kernel does not write parameter 'A'"),
        ([1, -1], "out_idx has parameter 'B' twice"),
        (["X"], "out_idx has 'X', which is no parameter"),
    ],
)
def test_out_idx(out_idx, fact):
    text = refusal(kernel_of, add_one_kernel(8), add_one_program(8, 2), out_idx=out_idx)
    assert fact in text
    assert "kernel 'add_one'" in text
    assert "(1: B)" in text


def test_wrong_number(matmul):
    text = refusal(matmul, torch.zeros(16, 32))
    assert "1 arguments, but expected 2 (A, B) or 3 (A, B, C)" in text
    assert "call of kernel 'matmul'" in text


def test_wrong_number_with_out_idx():
    kern = kernel_of(add_one_kernel(8), add_one_program(8, 2), out_idx=[1])
    assert "2 arguments, but expected 1 (A)" in refusal(kern, torch.zeros(8), torch.zeros(8))


def test_wrong_shape(matmul):
    text = refusal(matmul, torch.zeros(16, 31), torch.zeros(24))
    assert "parameter 'A': shape (16, 31), but expected (16, 32)" in text
    assert "parameter 'B': shape (24,), but expected (32, 24)" in text


def test_wrong_dtype(matmul):
    text = refusal(matmul, torch.zeros(16, 32), torch.zeros(32, 24, dtype=torch.float16))
    assert "parameter 'B': dtype float16, but expected float32" in text
    assert ".to(torch.float32)" in text
    assert "parameter 'A'" not in text


def test_wrong_device(matmul):
    text = refusal(matmul, torch.zeros(16, 32, device="meta"), torch.zeros(32, 24))
    assert "parameter 'A': on device meta, but expected cpu" in text
    assert ".to('cpu')" in text


def test_not_contiguous(matmul):
    text = refusal(matmul, torch.zeros(32, 16).t(), torch.zeros(32, 24))
    assert "parameter 'A': layout is not contiguous (strides (1, 16))" in text
    assert ".contiguous()" in text


def test_not_a_tensor(matmul):
    text = refusal(matmul, [[1.0]], None)
    assert "parameter 'A': a list, but expected a torch tensor or a MeshTensor" in text
    assert "parameter 'B': a NoneType" in text


def test_another_mesh(matmul):
    other = distribute(torch.zeros(16, 32), {"x": 4}, {"x": 1})
    text = refusal(matmul, other, torch.zeros(32, 24))
    assert 'parameter \'A\': a MeshTensor on Mesh({"x": 4}), but expected Mesh({"x": 2})' in text
    assert ".full()" in text


def test_another_layout_when_strict():
    kern = kernel_of(add_one_kernel(8), add_one_program(8, 2), strict=True)
    tiles = distribute(torch.zeros(8), kern.mesh, {})
    text = refusal(kern, tiles)
    assert "parameter 'A': lies as 'R', but expected 'S[0]'" in text
    assert "distribute or .redistribute it so" in text


def test_outputs_are_checked_and_nothing_is_changed(add_one):
    out = torch.full((8,), 5.0)
    assert "parameter 'A': shape" in refusal(add_one, torch.zeros(9), out)
    assert "parameter 'B': dtype" in refusal(add_one, torch.zeros(8), out.double())
    assert out.tolist() == [5.0] * 8


def test_wrong_scalars():
    made = add_one_program(8, 2)
    kern = kernel_of(axpy_kernel(8), made)
    text = refusal(kern, torch.zeros(8), "fast", torch.zeros(8), 1.5)
    assert "parameter 'alpha': 'fast', but expected a number (float32)" in text
    assert "parameter 'n': 1.5, but expected a number (int32)" in text
    assert local_axpy_kernel(8) is not None


@pytest.mark.parametrize(
    ("alpha", "n", "told"),
    [
        (1.5, 2**31, "parameter 'n': 2147483648 is no int32, which holds -2147483648 to 2147483647"),
        (1.5, -(2**40), "parameter 'n': -1099511627776 is no int32"),
        (10**400, 1, "parameter 'alpha': 1000"),
    ],
)
def test_scalars_that_their_dtype_does_not_hold(alpha, n, told):
    """C would take the last bits of an integer."""
    text = refusal(kernel_of(axpy_kernel(8), add_one_program(8, 2)), torch.zeros(8), alpha, torch.zeros(8), n)
    assert told in text
    assert "pass a number that it can hold, or declare the parameter wider" in text


@pytest.fixture
def symbolic():
    rows = T.dynamic("rows")

    @T.prim_func
    def double(A: T.Tensor((rows, 4), "float32"), B: T.Tensor((2 * rows, 4), "float32")):
        with T.Kernel(1, threads=128):
            for i, j in T.grid(2 * rows, 4):
                B[i, j] = A[i // 2, j]

    def build(func, symbols):
        raise AssertionError("lowered in spite of wrong arguments")

    func = annotate(double, Mesh({"x": 2}), {"A": {"x": 1}, "B": {"x": 1}})
    return kernel_by(func, build, "interpret")


def test_symbolic_shapes(symbolic):
    assert "parameter 'A': shape (3, 5), but expected (rows, 4)" in refusal(symbolic, torch.zeros(3, 5))
    text = refusal(symbolic, torch.zeros(3, 4), torch.zeros(5, 4))
    assert "parameter 'B': shape (5, 4), but expected (6, 4) = (" in text


def test_no_program_before_the_first_call(symbolic):
    with pytest.raises(MeshTensorError, match=r"kernel 'double' has no program yet: it has symbolic dims \(rows\)"):
        _ = symbolic.program


def test_sizes_that_nothing_tells():
    rows = T.dynamic("rows")

    @T.prim_func
    def fill(A: T.Tensor((4,), "float32"), B: T.Tensor((rows,), "float32")):
        with T.Kernel(1, threads=128):
            for i in T.serial(rows):
                B[i] = A[0]

    func = annotate(fill, Mesh({"x": 2}), {"B": {"x": 0}})
    kern = kernel_by(func, lambda func, symbols: None, "interpret")
    text = refusal(kern, torch.zeros(4))
    assert "no argument says how large rows is" in text
    assert "outputs too" in text
