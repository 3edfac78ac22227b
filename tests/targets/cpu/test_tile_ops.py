"""Compiled tile operations against torch, ragged blocks included."""

import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.kernel import compile_for_cpu


def torch_dtype(name):
    return getattr(torch, name)


def random(shape, dtype):
    if dtype == "bool":
        return torch.rand(shape) < 0.5
    if "int" in dtype:
        return torch.randint(0 if dtype == "uint8" else -100, 100, shape).to(torch_dtype(dtype))
    return torch.randn(shape).to(torch_dtype(dtype))


def matmul(M, N, K, dtype, accum_dtype, trans_A=False, trans_B=False, clear_accum=False, block=(24, 40, 16)):
    """One `T.gemm` per block of K, or with `clear_accum` the last block's product only."""
    bM, bN, bK = block
    shape_A, shape_B = ((K, M) if trans_A else (M, K)), ((N, K) if trans_B else (K, N))
    block_A, block_B = ((bK, bM) if trans_A else (bM, bK)), ((bN, bK) if trans_B else (bK, bN))

    @T.prim_func
    def matmul_kernel(A: T.Tensor(shape_A, dtype), B: T.Tensor(shape_B, dtype), C: T.Tensor((M, N), accum_dtype)):
        with T.Kernel(T.ceildiv(N, bN), T.ceildiv(M, bM), threads=128) as (bx, by):
            A_shared = T.alloc_shared(block_A, dtype)
            B_shared = T.alloc_shared(block_B, dtype)
            acc = T.alloc_fragment((bM, bN), accum_dtype)
            T.copy(C[by * bM, bx * bN], acc)
            for ko in T.Pipelined(T.ceildiv(K, bK), num_stages=2):
                if trans_A:
                    T.copy(A[ko * bK, by * bM], A_shared)
                else:
                    T.copy(A[by * bM, ko * bK], A_shared)
                if trans_B:
                    T.copy(B[bx * bN, ko * bK], B_shared)
                else:
                    T.copy(B[ko * bK, bx * bN], B_shared)
                T.gemm(A_shared, B_shared, acc, trans_A, trans_B, clear_accum=clear_accum)
            T.copy(acc, C[by * bM, bx * bN])

    return matmul_kernel


GEMMS = [
    ("float32", "float32"),
    ("float64", "float64"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("int8", "int32"),
    ("uint8", "int32"),
    ("int32", "int32"),
]


TRANSPOSES = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("dtype", "accum_dtype", "trans_A", "trans_B"),
    [(*GEMMS[0], *transposes) for transposes in TRANSPOSES] + [(*dtypes, False, True) for dtypes in GEMMS[1:]],
)
def test_gemm_of_ragged_blocks(dtype, accum_dtype, trans_A, trans_B):
    M, N, K = 61, 83, 45
    A = random((K, M) if trans_A else (M, K), dtype)
    B = random((N, K) if trans_B else (K, N), dtype)
    C = random((M, N), accum_dtype)
    exact = "int" in accum_dtype
    wide = torch.int64 if exact else torch.float64
    left, right = (A.T if trans_A else A).to(wide), (B.T if trans_B else B).to(wide)
    expected = left @ right + C.to(wide)
    compile_for_cpu(matmul(M, N, K, dtype, accum_dtype, trans_A, trans_B))(A, B, C)
    if exact:
        assert torch.equal(C.to(wide), expected)
    else:
        tolerance = {"float16": 2e-2, "bfloat16": 2e-1, "float64": 1e-12}.get(accum_dtype, 2e-5)
        torch.testing.assert_close(C.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block", [(1, 1, 1), (7, 3, 5), (64, 64, 32), (128, 256, 64), (16, 33, 300)])
def test_gemm_of_any_block(block):
    M, N, K = 130, 67, 71
    A, B, C = random((M, K), "float32"), random((K, N), "float32"), torch.zeros(M, N)
    compile_for_cpu(matmul(M, N, K, "float32", "float32", block=block))(A, B, C)
    torch.testing.assert_close(C, A @ B, rtol=1e-5, atol=1e-4)


def test_gemm_that_clears_its_accumulator():
    A, B, C = random((24, 48), "float32"), random((48, 40), "float32"), torch.full((24, 40), torch.nan)
    compile_for_cpu(matmul(24, 40, 48, "float32", "float32", clear_accum=True))(A, B, C)
    torch.testing.assert_close(C, A[:, 32:] @ B[32:], rtol=1e-5, atol=1e-5)


def reductions(shape, dim, dtype, out_dtype, ops, clear):
    """`Y[r] = reduce(X)` with every op, from a fragment."""
    out_shape = tuple(size for d, size in enumerate(shape) if d != dim)
    reducers = [getattr(T, f"reduce_{op}") for op in ops]
    has_clear = {op: op not in ("abssum",) for op in ops}

    @T.prim_func
    def reduce_kernel(X: T.Tensor(shape, dtype), Y: T.Tensor((len(ops), *out_shape), out_dtype)):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment(shape, out_dtype)
            y = T.alloc_fragment(out_shape, out_dtype)
            T.copy(X, x)
            for r, reducer in enumerate(reducers):
                T.fill(y, 1)
                if has_clear[ops[r]]:
                    reducer(x, y, dim=dim, clear=clear)
                else:
                    reducer(x, y, dim=dim)
                T.copy(y, Y[r : r + 1, 0 : out_shape[0], 0 : out_shape[1]])

    return reduce_kernel


REDUCTIONS = {
    "sum": lambda x, d: x.sum(d),
    "max": lambda x, d: x.amax(d),
    "min": lambda x, d: x.amin(d),
    "abssum": lambda x, d: x.abs().sum(d),
    "absmax": lambda x, d: x.abs().amax(d),
}


def bitwise(function):
    def reduce(x, d):
        rows = x.unbind(d)
        result = rows[0]
        for row in rows[1:]:
            result = function(result, row)
        return result

    return reduce


BITWISE = {
    "bitand": bitwise(torch.bitwise_and),
    "bitor": bitwise(torch.bitwise_or),
    "bitxor": bitwise(torch.bitwise_xor),
}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8"])
def test_reductions(dtype, dim):
    table = REDUCTIONS | (BITWISE if "int" in dtype else {})
    x = random((6, 9, 33), dtype)
    shape = [s for d, s in enumerate(x.shape) if d != dim]
    y = torch.empty((len(table), *shape), dtype=x.dtype)
    compile_for_cpu(reductions(tuple(x.shape), dim, dtype, dtype, list(table), True))(x, y)
    for actual, (name, reference) in zip(y, table.items(), strict=True):
        expected = reference(x.double() if x.is_floating_point() else x.long(), dim).to(x.dtype)
        tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-13}.get(dtype, 0)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}")


def test_reductions_that_start_from_what_is_there():
    x, table = random((6, 9, 33), "float32"), ("sum", "max", "min")
    y = torch.empty(len(table), 6, 33)
    compile_for_cpu(reductions((6, 9, 33), 1, "float32", "float32", list(table), False))(x, y)
    expected = [x.sum(1) + 1, x.amax(1).clamp(min=1), x.amin(1).clamp(max=1)]
    torch.testing.assert_close(y, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_a_maximum_of_nothing_but_minus_infinity_and_nan():
    x = torch.full((6, 9, 33), -torch.inf)
    x[0, 3, 2] = torch.nan
    y = torch.empty(1, 6, 33)
    compile_for_cpu(reductions((6, 9, 33), 1, "float32", "float32", ["max"], True))(x, y)
    assert y[0, 0, 2].isnan()
    assert (y.nan_to_num(-torch.inf, neginf=-torch.inf) == -torch.inf).all()


def scans(shape, dim, reverse):
    @T.prim_func
    def scan_kernel(X: T.Tensor(shape), S: T.Tensor(shape), M: T.Tensor(shape)):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment(shape, "float32")
            y = T.alloc_fragment(shape, "float32")
            T.copy(X, x)
            T.copy(X, y)
            T.cumsum(x, dim=dim, reverse=reverse)
            T.cummax(y, dim=dim, reverse=reverse)
            T.copy(x, S)
            T.copy(y, M)

    return scan_kernel


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_scans(dim, reverse):
    x = random((12, 20), "float32")
    sums, maxima = torch.empty_like(x), torch.empty_like(x)
    compile_for_cpu(scans((12, 20), dim, reverse))(x, sums, maxima)
    turned = x.flip(dim) if reverse else x
    expected = turned.cumsum(dim), turned.cummax(dim).values
    expected = [e.flip(dim) if reverse else e for e in expected]
    torch.testing.assert_close([sums, maxima], expected, rtol=1e-5, atol=1e-5)


def transposed(M, N, dtype, block=(16, 24)):
    bM, bN = block

    @T.prim_func
    def transpose_kernel(X: T.Tensor((M, N), dtype), Y: T.Tensor((N, M), dtype)):
        with T.Kernel(T.ceildiv(N, bN), T.ceildiv(M, bM), threads=128) as (bx, by):
            x = T.alloc_shared((bM, bN), dtype)
            y = T.alloc_shared((bN, bM), dtype)
            T.copy(X[by * bM, bx * bN], x)
            T.transpose(x, y)
            T.copy(y, Y[bx * bN, by * bM])

    return transpose_kernel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_transpose(dtype):
    x = random((37, 50), dtype)
    y = torch.empty((50, 37), dtype=x.dtype)
    compile_for_cpu(transposed(37, 50, dtype))(x, y)
    assert torch.equal(y, x.T)


def atomics(N, dtype):
    """Every program of 4 adds into the same tile, and element by element."""

    @T.prim_func
    def atomic_kernel(
        X: T.Tensor((4, N), dtype),
        Sum: T.Tensor((N,), dtype),
        Max: T.Tensor((N,), dtype),
        Min: T.Tensor((N,), dtype),
        Elements: T.Tensor((3, N), dtype),
    ):
        with T.Kernel(4, threads=128) as bx:
            x = T.alloc_fragment((N + 3,), dtype)
            T.copy(X[bx, 0:N], x[0:N])
            T.atomic_add(Sum[0], x)
            T.atomic_max(Max[0], x)
            T.atomic_min(Min[0], x)
            for i in T.Parallel(N):
                T.atomic_add(Elements[0, i], x[i])
                T.atomic_max(Elements[1, i], x[i])
                T.atomic_min(Elements[2, i], x[i])

    return atomic_kernel


@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
def test_atomics(dtype):
    x = random((4, 50), dtype)
    starts = [random((50,), dtype) for _ in range(3)]
    expected = [
        (starts[0].double() + x.double().sum(0)).to(x.dtype),
        torch.maximum(starts[1], x.amax(0)),
        torch.minimum(starts[2], x.amin(0)),
    ]
    tiles, elements = [s.clone() for s in starts], torch.stack(starts)
    compile_for_cpu(atomics(50, dtype))(x, *tiles, elements)
    tolerance = 1e-2 if dtype == "float16" else 1e-5
    torch.testing.assert_close(tiles, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(elements, torch.stack(expected), rtol=tolerance, atol=tolerance)


def copies(M, N, shape, safe_value=None):
    """A block at (row, col), possibly across an edge, read and written back."""

    @T.prim_func
    def copy_kernel(X: T.Tensor((M, N)), Block: T.Tensor(shape), Y: T.Tensor((M, N)), row: T.int32, col: T.int32):
        with T.Kernel(1, threads=128):
            block = T.alloc_shared(shape, "float32")
            if safe_value is not None:
                T.annotate_safe_value({X: safe_value})
            T.copy(X[row, col], block)
            T.copy(block, Block)
            T.copy(block, Y[row, col])

    return copy_kernel


@pytest.mark.parametrize("safe_value", [None, -1.0])
@pytest.mark.parametrize(("row", "col"), [(0, 0), (5, 7), (-3, 2), (2, -4), (9, 30), (-20, 0)])
def test_copies_across_the_edges(row, col, safe_value):
    x, shape = random((10, 20), "float32"), (6, 8)
    block, y = torch.full(shape, torch.nan), torch.full((10, 20), 9.0)
    compile_for_cpu(copies(10, 20, shape, safe_value))(x, block, y, row, col)
    inside = torch.zeros(10, 20, dtype=torch.bool)
    expected = torch.full(shape, 0.0 if safe_value is None else safe_value)
    for i in range(6):
        for j in range(8):
            if 0 <= row + i < 10 and 0 <= col + j < 20:
                expected[i, j] = x[row + i, col + j]
                inside[row + i, col + j] = True
    assert torch.equal(block, expected)
    assert torch.equal(y, torch.where(inside, x, 9.0))


def slices(B, M, N):
    """Copies between buffers of different ranks, with single indices, part of a block and a change of dtype."""

    @T.prim_func
    def slice_kernel(X: T.Tensor((B, M, N), "float16"), Y: T.Tensor((M, B, N), "float32")):
        with T.Kernel(B, threads=128) as bx:
            block = T.alloc_shared((2, M, N), "float32")
            T.clear(block)
            T.copy(X[bx, 0:M, 0:N], block[1, 0:M, 0:N])
            T.copy(block[1, 0 : M // 2, 0:N], Y[0 : M // 2, bx, 0:N])
            T.fill(block[0, 0:M, 0:N], 2.5)
            T.copy(block[0, M // 2 : M, 0:N], Y[M // 2 : M, bx, 0:N])

    return slice_kernel


def test_copies_of_slices():
    x = random((3, 8, 5), "float16")
    y = torch.empty(8, 3, 5)
    compile_for_cpu(slices(3, 8, 5))(x, y)
    expected = x.float().transpose(0, 1).contiguous()
    expected[4:] = 2.5
    assert torch.equal(y, expected)


def views(N):
    @T.prim_func
    def view_kernel(X: T.Tensor((N, 4)), Y: T.Tensor((4 * N,)), Bits: T.Tensor((4 * N,), "int32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((N, 4), "float32")
            T.copy(X, x)
            flat = T.reshape(x, (4 * N,))
            bits = T.view(x, (4 * N,), "int32")
            T.copy(flat, Y)
            T.copy(bits, Bits)

    return view_kernel


@pytest.mark.parametrize("n", [3, 300])
def test_views_of_a_block(n):
    x = random((n, 4), "float32")
    y, bits = torch.empty(4 * n), torch.empty(4 * n, dtype=torch.int32)
    compile_for_cpu(views(n))(x, y, bits)
    assert torch.equal(y, x.flatten())
    assert torch.equal(bits, x.flatten().view(torch.int32))
