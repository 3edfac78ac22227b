"""Which products read a parameter in place, which keep their blocks, and that results are those of the blocks."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

from kernels.matmul import batched_matmul, matmul
from mesh_tensor.targets.cpu import build as cpu_build
from mesh_tensor.targets.cpu import products, retarget
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

M, N, K, BLOCK = 48, 64, 96, 16
BLOCKS = {"block_M": BLOCK, "block_N": BLOCK, "block_K": BLOCK}


def of(statement, *, once=False, wide="float32", own=False):
    """A matmul whose loop over k does `statement` after the copies; A's block has the dtype `wide`. With `once`, there
    is one step, and its copies come before the loop; with `own`, the statement fills A's block itself."""

    @T.prim_func
    def of_kernel(A: T.Tensor((M, K)), B: T.Tensor((K, N)), C: T.Tensor((M, N))):
        with T.Kernel(N // BLOCK, M // BLOCK, threads=128) as (bx, by):
            a = T.alloc_shared((BLOCK, K if once else BLOCK), wide)
            b = T.alloc_shared((K if once else BLOCK, BLOCK), "float32")
            c = T.alloc_fragment((BLOCK, BLOCK), "float32")
            T.clear(c)
            if once:
                T.copy(A[by * BLOCK, 0], a)
                T.copy(B[0, bx * BLOCK], b)
                for ko in T.serial(2):
                    T.gemm(a[0:BLOCK, ko * 48 : ko * 48 + 48], b[ko * 48 : ko * 48 + 48, 0:BLOCK], c)
            else:
                for ko in T.serial(K // BLOCK):
                    if not own:
                        T.copy(A[by * BLOCK, ko * BLOCK], a)
                    T.copy(B[ko * BLOCK, bx * BLOCK], b)
                    statement(A, a, b, c, by, ko)
            T.copy(c, C[by * BLOCK, bx * BLOCK])

    return of_kernel


@T.macro
def product(A, a, b, c, by, ko):
    T.gemm(a, b, c)


@T.macro
def halves(A, a, b, c, by, ko):
    T.gemm(a[0:BLOCK, 0:8], b[0:8, 0:BLOCK], c)
    T.gemm(a[0:BLOCK, 8:BLOCK], b[8:BLOCK, 0:BLOCK], c)


@T.macro
def block_changes(A, a, b, c, by, ko):
    for i, j in T.Parallel(BLOCK, BLOCK):
        a[i, j] = a[i, j] * 2
    T.gemm(a, b, c)


@T.macro
def parameter_changes(A, a, b, c, by, ko):
    for i, j in T.Parallel(BLOCK, BLOCK):
        A[by * BLOCK + i, ko * BLOCK + j] = 0
    T.gemm(a, b, c)


@T.macro
def both_factors(A, a, b, c, by, ko):
    T.gemm(a, b, c)
    T.gemm(a, a, c, transpose_A=True)


@T.macro
def copied_by_loops(A, a, b, c, by, ko):
    for i, j in T.Parallel(BLOCK, BLOCK):
        a[i, j] = A[by * BLOCK + i, ko * BLOCK + j]
    T.gemm(a, b, c)


@T.macro
def rows_reversed(A, a, b, c, by, ko):
    for i, j in T.Parallel(BLOCK, BLOCK):
        a[i, j] = A[by * BLOCK + BLOCK - 1 - i, ko * BLOCK + j]
    T.gemm(a, b, c)


@T.macro
def block_transposed(A, a, b, c, by, ko):
    for i, j in T.Parallel(BLOCK, BLOCK):
        a[i, j] = A[by * BLOCK + j, ko * BLOCK + i]
    T.gemm(a, b, c)


@T.macro
def one_row_for_all(A, a, b, c, by, ko):
    for i, j in T.Parallel(BLOCK, BLOCK):
        a[i, j] = A[by * BLOCK, ko * BLOCK + j]
    T.gemm(a, b, c)


def in_blocks(x):
    """As (row of blocks, row, column of blocks, column)."""
    return x.reshape(M // BLOCK, BLOCK, K // BLOCK, BLOCK)


def blocks(func):
    """The names of the buffers that a kernel has left on a CPU."""
    found = []
    tirx.stmt_functor.post_order_visit(retarget.retarget_for_cpu(func).body, found.append)
    return {node.buffer.name for node in found if isinstance(node, tirx.AllocBuffer)}


@pytest.fixture
def run(monkeypatch):
    """What the compiled kernel leaves in its last parameter: with blocks, and with products in place."""

    def run(func, *inputs):
        out = torch.full([int(size) for size in func.buffer_map[func.params[-1]].shape], torch.nan)
        stamp = cpu_build._build_stamp()
        with monkeypatch.context() as patch:
            patch.setattr(retarget, "lean_products", lambda body, _: products.lean_products(body, frozenset()))
            patch.setattr(cpu_build, "_build_stamp", lambda: f"{stamp} with blocks")
            with_blocks = compile_for_cpu(func)
        results = []
        for kernel in (with_blocks, compile_for_cpu(func)):
            results.append(out.to(getattr(torch, func.buffer_map[func.params[-1]].dtype)))
            kernel(*[x.clone() for x in inputs], results[-1])
        return results

    return run


def operands(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


CASES = {
    "product": (of(product), {"c"}, lambda a, b: a @ b),
    "halves of blocks": (of(halves), {"c"}, lambda a, b: a @ b),
    "another dtype": (of(product, wide="float64"), {"a", "c"}, lambda a, b: a @ b),
    "a block that changes": (of(block_changes), {"a", "c"}, lambda a, b: 2 * a @ b),
    "copied by loops": (of(copied_by_loops, own=True), {"c"}, lambda a, b: a @ b),
    "rows reversed": (of(rows_reversed, own=True), {"a", "c"}, lambda a, b: in_blocks(a).flip(1).reshape(M, K) @ b),
    "a block transposed": (
        of(block_transposed, own=True),
        {"a", "c"},
        lambda a, b: in_blocks(a).transpose(1, 3).reshape(M, K) @ b,
    ),
    "one row for all": (
        of(one_row_for_all, own=True),
        {"a", "c"},
        lambda a, b: in_blocks(a)[:, :1].expand(-1, BLOCK, -1, -1).reshape(M, K) @ b,
    ),
    "copies before a loop": (of(product, once=True), {"a", "b", "c"}, lambda a, b: a @ b),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_go_where_they_are_only_copies(run, name):
    func, left, reference = CASES[name]
    assert blocks(func) == left
    a, b = operands((M, K), (K, N))
    before, placed = run(func, a, b)
    torch.testing.assert_close(placed, reference(a.double(), b.double()).float())
    assert torch.equal(before, placed)


def test_a_parameter_that_the_kernel_writes_is_copied(run):
    """Only the first column of programs finds A as it was. B may be the same memory."""
    func = of(parameter_changes)
    assert blocks(func) == {"a", "b", "c"}
    a, b = operands((M, K), (K, N))
    _, placed = run(func, a, b)
    torch.testing.assert_close(placed[:, :BLOCK], a @ b[:, :BLOCK])


def test_a_block_whose_uses_are_not_all_in_place_stays():
    assert blocks(of(both_factors)) == {"a", "c"}


@pytest.mark.parametrize(
    ("transposed", "left"), [({"trans_A": True}, {"A_shared"}), ({"trans_B": True}, set())], ids=["A", "B"]
)
def test_only_what_is_packed_is_read_transposed_where_it_is(run, transposed, left):
    func = matmul(M, N, K, **BLOCKS, **transposed)
    assert blocks(func) == {*left, "C_local"}
    a, b = operands((K, M) if left else (M, K), (K, N) if left else (N, K))
    before, placed = run(func, a, b)
    torch.testing.assert_close(placed, a.T @ b if left else a @ b.T)
    assert torch.equal(before, placed)


@pytest.mark.parametrize(("depth", "left"), [(1024, {"A_shared"}), (1040, set()), (2048, {"A_shared"})])
def test_rows_that_want_the_same_places_of_a_cache_are_copied(run, depth, left):
    """Of the factor that isn't packed."""
    func = matmul(M, 1024, depth, **BLOCKS)
    assert blocks(func) == {*left, "C_local"}
    a, b = (x.mul(4).round() for x in operands((M, depth), (depth, 1024)))  # whole numbers: sums are exact
    before, placed = run(func, a, b)
    assert torch.equal(placed, a @ b)
    assert torch.equal(before, placed)


@pytest.mark.parametrize(
    ("sizes", "left"),
    [((50, N, K), {"A_shared"}), ((M, 70, K), {"B_shared"}), ((M, N, 100), {"A_shared", "B_shared"})],
    ids=["rows", "columns", "depth"],
)
def test_blocks_that_reach_past_the_end_stay(run, sizes, left):
    m, n, k = sizes
    func = matmul(m, n, k, **BLOCKS)
    assert blocks(func) == {*left, "C_local"}
    a, b = operands((m, k), (k, n))
    before, placed = run(func, a, b)
    torch.testing.assert_close(placed, a @ b)
    assert torch.equal(before, placed)


def test_leading_dims_are_left_where_they_are(run):
    func = batched_matmul(3, M, N, K, **BLOCKS)
    assert blocks(func) == {"C_local"}
    a, b = operands((3, M, K), (3, K, N))
    before, placed = run(func, a, b)
    torch.testing.assert_close(placed, a @ b)
    assert torch.equal(before, placed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_give_the_same_bits(run, dtype):
    func = matmul(M, N, K, **BLOCKS, dtype=dtype, accum_dtype="float32")
    assert blocks(func) == {"C_local"}
    before, placed = run(func, *operands((M, K), (K, N), dtype=getattr(torch, dtype)))
    assert torch.equal(before, placed)


def test_a_symbolic_number_of_rows():
    """Blocks of rows may reach past the end; those of B don't."""
    func = matmul(T.dynamic("m"), N, K, **BLOCKS)
    assert blocks(func) == {"A_shared", "C_local"}


def test_compiled_code_has_no_copies_of_blocks():
    source = cpu_build.c_source(matmul(M, N, K, **BLOCKS))
    assert "A_shared" not in source
    assert "C_local" in source


def test_blas_keeps_its_blocks(monkeypatch):
    monkeypatch.setattr(products, "blas_wanted", lambda: True)
    assert "A_shared" in cpu_build.c_source(matmul(M, N, K, **BLOCKS))
