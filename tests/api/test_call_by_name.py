"""A kernel called with arguments by name, out_idx by name, and kernels that are pickled."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.matmul import matmul

MESH = mt.Mesh({"x": 2, "y": 2})
FUNC = mt.annotate(matmul(24, 20, 16, 8, 8, 8), MESH, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}})


@pytest.fixture(scope="module", params=["interpret", "c"])
def kernel(request):
    return mt.compile(FUNC, target=request.param)


@pytest.fixture
def tensors():
    return torch.randn(24, 16), torch.randn(16, 20)


@T.prim_func
def shifted(n: T.int32, self: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
    with T.Kernel(1):
        for i in T.Parallel(8):
            B[i] = self[i] + T.cast(n, "float32")


def refusal(call, *args, **named):
    with pytest.raises(mt.MeshTensorError) as caught:
        call(*args, **named)
    assert "where: " in str(caught.value)
    return str(caught.value)


def test_by_name(kernel, tensors):
    a, b = tensors
    expected = kernel(a, b)
    torch.testing.assert_close(expected, a @ b, rtol=1e-4, atol=1e-4)
    assert torch.equal(kernel(a, B=b), expected)
    assert torch.equal(kernel(A=a, B=b), expected)
    assert torch.equal(kernel(B=b, A=a), expected)
    out = torch.full((24, 20), torch.nan)
    assert kernel(a, C=out, B=b) is out
    assert torch.equal(out, expected)
    tiles = kernel(A=mt.distribute(a, MESH, {"x": 0, "y": 1}), B=b)
    assert torch.equal(tiles.full(), expected)


def test_scalars_and_names_that_python_uses():
    kernel = mt.compile(mt.annotate(shifted, {"x": 2}, {"self": {"x": 0}, "B": {"x": 0}}), target="interpret")
    a = torch.randn(8)
    assert torch.equal(kernel(self=a, n=3), a + 3)
    assert torch.equal(kernel(3, self=a), a + 3)


def test_symbolic_sizes():
    func = mt.annotate(matmul(T.dynamic("rows"), 20, 16, 8, 8, 8), MESH, {"A": {"x": 0}, "C": {"x": 0}})
    kernel = mt.compile(func, target="interpret")
    for rows in (5, 24):
        a, b = torch.randn(rows, 16), torch.randn(16, 20)
        torch.testing.assert_close(kernel(B=b, A=a), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("count", "names", "told"),
    [
        (1, "", "1 arguments, but expected 2 (A, B) or 3 (A, B, C)"),
        (1, "C", "no argument is given for 'B'"),
        (0, "A", "no argument is given for 'B'"),
        (1, "A", "'A' is given twice, by position and by name"),
        (2, "A", "'A' is given twice, by position and by name"),
        (1, "b", "there is no parameter 'b' (parameters: 'A', 'B', 'C'); did you mean 'B'?"),
        (2, "bias", "there is no parameter 'bias' (parameters: 'A', 'B', 'C')"),
        (4, "C", "'C' is given twice, by position and by name"),
    ],
)
def test_names_that_do_not_fit(kernel, tensors, count, names, told):
    some = [*tensors, torch.zeros(24, 20), torch.zeros(24, 20)]
    message = refusal(kernel, *some[:count], **dict.fromkeys(names.split(), some[0]))
    assert told in message
    assert "where: call of kernel 'matmul_kernel'" in message
    if names:
        assert "fix: call it as matmul_kernel(A, B) or matmul_kernel(A, B, C), by position or by name" in message


def test_what_is_updated_has_to_be_passed():
    @T.prim_func
    def counted(X: T.Tensor((8,), "int32"), H: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(8):
                T.atomic_add(H[X[i]], 1)

    kernel = mt.compile(mt.annotate(counted, {"x": 2}, {"X": {"x": 0}}), target="interpret")
    message = refusal(kernel, torch.zeros(8, dtype=torch.int32))
    assert "1 arguments, but expected 2 (X, H)" in message
    assert "why: it goes on from what 'H' held before" in message


def test_what_the_kernel_makes_is_not_given(tensors):
    kernel = mt.compile(FUNC, target="interpret", out_idx=-1)
    a, b = tensors
    torch.testing.assert_close(kernel(B=b, A=a), a @ b, rtol=1e-4, atol=1e-4)
    assert "'C' is made by the kernel and returned" in refusal(kernel, a, b, C=torch.zeros(24, 20))


def test_what_is_passed_by_name_is_checked(kernel, tensors):
    a, b = tensors
    assert "parameter 'B': shape (20, 16), but expected (16, 20)" in refusal(kernel, a, B=b.t().contiguous())


@pytest.mark.parametrize("out_idx", ["C", ["C"], 2, (-1,), np.int64(2)], ids=repr)
def test_outputs_by_position_or_by_name(tensors, out_idx):
    kernel = mt.compile(FUNC, target="interpret", out_idx=out_idx)
    a, b = tensors
    torch.testing.assert_close(kernel(a, b), a @ b, rtol=1e-4, atol=1e-4)
    assert "3 arguments, but expected 2 (A, B)" in refusal(kernel, a, b, a)


@pytest.mark.parametrize(
    ("out_idx", "told"),
    [
        ("c", "out_idx has 'c', which is no parameter; did you mean 'C'?"),
        ("D", "out_idx has 'D', which is no parameter\n"),
        ("A", "out_idx has 'A', but the kernel does not write parameter 'A'"),
        (["C", 2], "out_idx has parameter 'C' twice"),
        (3, "out_idx has 3, but there are 3 parameters"),
        (1.5, "out_idx has 1.5, but there are 3 parameters"),
        (True, "out_idx has True, but there are 3 parameters"),
    ],
)
def test_outputs_that_are_none(out_idx, told):
    message = refusal(mt.compile, FUNC, target="interpret", out_idx=out_idx)
    assert told in message
    assert "fix: use the positions, or the names, of what it writes (2: C)" in message


def test_a_result_for_which_there_is_no_contiguous_memory(kernel, tensors):
    """A copy, as for an input, would take the result with it."""
    message = refusal(kernel, *tensors, torch.zeros(20, 24).t())
    assert "parameter 'C': layout is not contiguous (strides (1, 24))" in message
    assert "fix: allocate what the kernel writes into contiguous, as torch.empty does" in message
    assert ".contiguous()" not in message
    message = refusal(kernel, tensors[0].t().contiguous().t(), tensors[1])
    assert "parameter 'A': layout is not contiguous" in message
    assert "fix: pass a copy: .contiguous()" in message


@pytest.mark.parametrize("options", [{}, {"out_idx": "C", "strict": True}, {"target": "interpret", "poison": True}])
def test_a_kernel_is_pickled(tensors, options):
    kernel = mt.compile(FUNC, **{"target": "c", **options})
    again = pickle.loads(pickle.dumps(kernel))
    assert repr(again) == repr(kernel)
    assert again.explain() == kernel.explain()
    assert torch.equal(again(*tensors), kernel(*tensors))


def test_a_kernel_over_tiles_of_symbolic_sizes_is_pickled():
    func = mt.annotate(matmul(T.dynamic("rows"), 20, 16, 8, 8, 8), MESH, {"A": {"x": 0}, "C": {"x": 0}})
    again = pickle.loads(pickle.dumps(mt.compile(func, target="interpret", view="global")))
    a, b = torch.randn(7, 16), torch.randn(16, 20)
    torch.testing.assert_close(again(a, b), a @ b, rtol=1e-4, atol=1e-4)


def test_a_pickled_kernel_runs_in_another_process(tensors, tmp_path):
    kernel = mt.compile(FUNC, target="interpret")
    (tmp_path / "kernel.pickle").write_bytes(pickle.dumps((kernel, tensors, kernel(*tensors))))
    code = (
        "import pickle, sys, torch\n"
        "kernel, tensors, expected = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert torch.equal(kernel(*tensors), expected)\n"
        "print('same')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "kernel.pickle")], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.endswith("same\n"), done.stderr
