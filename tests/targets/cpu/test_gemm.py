"""Products of blocks on a CPU: every transpose, dtype and stride, by the own micro-kernel and by BLAS."""

import ctypes
import itertools
import threading

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.targets.cpu import blas as cpu_blas
from mesh_tensor.targets.cpu import build as cpu_build
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

WHO = ["own", "blas"] if cpu_blas._functions() else ["own"]
DTYPES = [("float32", "float32"), ("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")]
TRANSPOSES = list(itertools.product([False, True], repeat=2))


def of_slices(m, n, k, dtype, accum_dtype, trans_A, trans_B, clear):
    """The product of parts of blocks that are larger on every side, into part of another."""
    part_A, part_B = ((k, m) if trans_A else (m, k)), ((n, k) if trans_B else (k, n))
    shape_A, shape_B, shape_C = (tuple(size + 5 for size in shape) for shape in (part_A, part_B, (m, n)))

    @T.prim_func
    def slices_kernel(
        A: T.Tensor(shape_A, dtype),
        B: T.Tensor(shape_B, dtype),
        C: T.Tensor(shape_C, accum_dtype),
    ):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared(shape_A, dtype)
            b = T.alloc_shared(shape_B, dtype)
            c = T.alloc_fragment(shape_C, accum_dtype)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(C, c)
            T.gemm(
                a[2 : 2 + part_A[0], 3 : 3 + part_A[1]],
                b[1 : 1 + part_B[0], 4 : 4 + part_B[1]],
                c[3 : 3 + m, 2 : 2 + n],
                trans_A,
                trans_B,
                clear_accum=clear,
            )
            T.copy(c, C)

    return slices_kernel


def whole(m, n, k, trans_A, trans_B):
    """The product of whole blocks, which begin where BLAS takes them."""
    shape_A, shape_B = ((k, m) if trans_A else (m, k)), ((n, k) if trans_B else (k, n))

    @T.prim_func
    def whole_kernel(A: T.Tensor(shape_A), B: T.Tensor(shape_B), C: T.Tensor((m, n))):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared(shape_A, "float32")
            b = T.alloc_shared(shape_B, "float32")
            c = T.alloc_fragment((m, n), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.copy(C, c)
            T.gemm(a, b, c, trans_A, trans_B)
            T.copy(c, C)

    return whole_kernel


def expected(A, B, C, trans_A, trans_B):
    return (A.T if trans_A else A).double() @ (B.T if trans_B else B).double() + C.double()


@pytest.fixture(params=WHO)
def who(request, monkeypatch):
    monkeypatch.setenv(cpu_blas.VARIABLE, request.param)
    return request.param


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize(("trans_A", "trans_B"), TRANSPOSES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), DTYPES)
def test_parts_of_blocks(dtype, accum_dtype, trans_A, trans_B, clear):
    m, n, k = 19, 37, 23
    kernel = of_slices(m, n, k, dtype, accum_dtype, trans_A, trans_B, clear)
    tensors = []
    for param in kernel.params:
        buffer = kernel.buffer_map[param]
        shape = [int(size) for size in buffer.shape]
        tensors.append(torch.randn(shape, dtype=torch.float64).to(getattr(torch, str(buffer.dtype))))
    A, B, C = tensors
    before = C.clone()
    compile_for_cpu(kernel)(A, B, C)
    part_A = A[2 : 2 + (k if trans_A else m), 3 : 3 + (m if trans_A else k)]
    part_B = B[1 : 1 + (n if trans_B else k), 4 : 4 + (k if trans_B else n)]
    inside = before[3 : 3 + m, 2 : 2 + n]
    start = torch.zeros_like(inside) if clear else inside.clone()
    inside.copy_(expected(part_A, part_B, start, trans_A, trans_B))
    tolerance = 1e-12 if dtype == "float64" else 2e-5
    torch.testing.assert_close(C, before, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 33, 7), (45, 1, 64), (64, 64, 64), (130, 67, 300)])
@pytest.mark.parametrize(("trans_A", "trans_B"), TRANSPOSES)
def test_whole_blocks(who, size, trans_A, trans_B):
    m, n, k = size
    A, B = torch.randn((k, m) if trans_A else (m, k)), torch.randn((n, k) if trans_B else (k, n))
    C = torch.randn(m, n)
    wanted = expected(A, B, C, trans_A, trans_B)
    compile_for_cpu(whole(m, n, k, trans_A, trans_B))(A, B, C)
    torch.testing.assert_close(C.double(), wanted, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("rows", "trans_B"), [((64, 8), False), ((64, 12), False), ((64, 8), True)])
def test_what_no_product_has_is_left_out(rows, trans_B):
    """Of the micro-kernel: rows that fill no tile, and rows that are read as columns."""
    shape_B = (32, 32)

    @T.prim_func
    def heights_kernel(A: T.Tensor((sum(rows), 32)), B: T.Tensor(shape_B), C: T.Tensor((sum(rows), 32))):
        with T.Kernel(1, threads=128):
            b = T.alloc_shared(shape_B, "float32")
            T.copy(B, b)
            first, second = T.alloc_fragment((rows[0], 32), "float32"), T.alloc_fragment((rows[1], 32), "float32")
            T.gemm(A[0 : rows[0], 0:32], b, first, transpose_B=trans_B, clear_accum=True)
            T.gemm(A[rows[0] : sum(rows), 0:32], b, second, transpose_B=trans_B, clear_accum=True)
            T.copy(first, C[0, 0])
            T.copy(second, C[rows[0], 0])

    source = cpu_build.c_source(heights_kernel)
    assert ("#define MT_WHOLE_ROWS 1" in source) == (rows[1] % 8 == 0)
    assert ("#define MT_NO_TURNS" in source) == (not trans_B)
    a, b, c = torch.randn(sum(rows), 32), torch.randn(shape_B), torch.empty(sum(rows), 32)
    compile_for_cpu(heights_kernel)(a, b, c)
    torch.testing.assert_close(c, a @ (b.T if trans_B else b), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif("blas" not in WHO, reason="this build of torch exports no BLAS")
@pytest.mark.parametrize(("trans_A", "trans_B"), TRANSPOSES)
def test_blas_is_called_on_one_thread(monkeypatch, trans_A, trans_B):
    monkeypatch.setenv(cpu_blas.VARIABLE, "blas")
    m, n, k = 32, 48, 16
    kernel = compile_for_cpu(whole(m, n, k, trans_A, trans_B))
    calls = []
    sgemm, set_threads = cpu_blas._functions()
    forward = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(sgemm)
    keep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(set_threads)

    @ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)
    def counted(*args):
        calls.append(tuple(ctypes.string_at(letter, 1) for letter in args[:2]))
        forward(*args)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    def noted(threads):
        calls.append(threads)
        return keep(threads)

    setter = kernel._library.mesh_tensor_set_blas
    setter(ctypes.cast(counted, ctypes.c_void_p), ctypes.cast(noted, ctypes.c_void_p))
    A, B = torch.randn((k, m) if trans_A else (m, k)), torch.randn((n, k) if trans_B else (k, n))
    C = torch.randn(m, n)
    wanted = expected(A, B, C, trans_A, trans_B)
    kernel(A, B, C)
    setter(sgemm, set_threads)
    assert calls == [1, (b"T" if trans_B else b"N", b"T" if trans_A else b"N"), calls[-1]]
    torch.testing.assert_close(C.double(), wanted, rtol=1e-5, atol=2e-4)


def test_nan_and_infinity_reach_the_sums(who):
    A, B, C = torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(64, 64)
    A[3, 5], A[7, 1], B[1, 2] = torch.nan, torch.inf, 1.0
    wanted = expected(A, B, C, False, False).float()
    compile_for_cpu(whole(64, 64, 64, False, False))(A, B, C)
    torch.testing.assert_close(C, wanted, rtol=0, atol=0, equal_nan=True)


def test_every_call_and_thread_has_the_same_bits(who):
    A, B = torch.randn(128, 256), torch.randn(256, 96)
    kernel = compile_for_cpu(whole(128, 96, 256, False, False))
    results = [torch.zeros(128, 96) for _ in range(12)]
    threads = [
        threading.Thread(target=lambda part=part: [kernel(A, B, C) for C in part])
        for part in (results[0:4], results[4:8], results[8:12])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], A @ B, rtol=1e-5, atol=2e-4)


def test_torch_keeps_its_threads(who):
    before = torch.get_num_threads()
    test_whole_blocks(who, (64, 64, 64), False, False)
    assert torch.get_num_threads() == before


def test_the_choice_is_in_the_code_and_in_the_cache(monkeypatch):
    func, found = whole(64, 64, 64, False, False), {}
    for choice in ["", "auto", *WHO]:
        monkeypatch.setenv(cpu_blas.VARIABLE, choice)
        found[choice] = cpu_build.kernel_key(func), "#define MT_BLAS" in cpu_build.c_source(func)
    assert found[""] == found["auto"] == found["own"]
    assert not found["own"][1]
    if "blas" in WHO:
        assert found["blas"][1]
        assert found["blas"][0] != found["own"][0]


def test_explain_says_who_multiplies(who):
    func = mt.annotate(whole(64, 64, 64, False, False), mt.Mesh({"x": 1}), {})
    line = next(line for line in mt.compile(func, target="c").explain().splitlines() if line.startswith("products:"))
    if who == "own":
        assert line.startswith("products: the own micro-kernel")
        assert line.endswith("(MESH_TENSOR_GEMM=own)")
    else:
        assert line.startswith("products: float32 by BLAS (sgemm_ of torch, on one thread; MESH_TENSOR_GEMM=blas)")
        assert "other dtypes by the own micro-kernel" in line
