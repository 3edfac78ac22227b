"""The shape of re-targeted kernels: what is gone, what guards are there, and that none is where none is needed."""

import pytest
import tilelang.language as T
from tvm import tirx

from mesh_tensor.targets.cpu import products
from mesh_tensor.targets.cpu.legalize import legalize_for_c
from mesh_tensor.targets.cpu.retarget import retarget_for_cpu


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Products read blocks, as BLAS has them: what is looked at here is how these are copied."""
    monkeypatch.setattr(products, "blas_wanted", lambda: True)


def matmul(M, N, K, dtype="float32", block=(32, 32, 16)):
    bM, bN, bK = block

    @T.prim_func
    def matmul_kernel(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, bN), T.ceildiv(M, bM), threads=128) as (bx, by):
            T.use_swizzle(4)
            A_shared = T.alloc_shared((bM, bK), dtype)
            B_shared = T.alloc_shared((bK, bN), dtype)
            acc = T.alloc_fragment((bM, bN), "float32")
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(K, bK), num_stages=2):
                T.copy(A[by * bM, ko * bK], A_shared)
                T.copy(B[ko * bK, bx * bN], B_shared)
                T.gemm(A_shared, B_shared, acc)
            for i, j in T.Parallel(bM, bN):
                acc[i, j] = T.max(acc[i, j], 0)
            T.copy(acc, C[by * bM, bx * bN])

    return matmul_kernel


def direct(M, N, margin, checked):
    """Element-wise code on parameters, read at a distance."""

    @T.prim_func
    def direct_kernel(X: T.Tensor((M, N)), Y: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(N, 32), T.ceildiv(M, 16), threads=128) as (bx, by):
            for i, j in T.Parallel(16, 32):
                if checked:
                    if by * 16 + i < M and bx * 32 + j < N - margin:
                        Y[by * 16 + i, bx * 32 + j] = X[by * 16 + i, bx * 32 + j + margin]
                else:
                    Y[by * 16 + i, bx * 32 + j] = X[by * 16 + i, bx * 32 + j + margin]

    return direct_kernel


def nodes(func, kinds):
    """All nodes of some kinds in a function."""
    found = []
    tirx.stmt_functor.post_order_visit(func.body, lambda n: found.append(n) if isinstance(n, kinds) else None)
    return found


def calls(func):
    return {node.op.name for node in nodes(func, tirx.Call)}


@pytest.mark.parametrize("M", [64, 50, "dynamic"])
def test_only_serial_loops_and_plain_statements_are_left(M):
    func = retarget_for_cpu(matmul(T.dynamic("m") if M == "dynamic" else M, 64, 48))
    assert not nodes(func, (tirx.SBlock, tirx.SBlockRealize, tirx.AttrStmt))
    assert {loop.kind for loop in nodes(func, tirx.For)} == {tirx.ForKind.SERIAL}
    assert all(loop.thread_binding is None and not loop.annotations for loop in nodes(func, tirx.For))
    assert calls(func) == {"tirx.call_extern", "tirx.address_of"}
    assert len(nodes(func, tirx.AllocBuffer)) == 3


def test_the_parameters_stay_as_they_are():
    before = matmul(64, 64, 48)
    after = retarget_for_cpu(before)
    assert [p.name for p in after.params] == [p.name for p in before.params]
    assert [after.buffer_map[p].name for p in after.params] == ["A", "B", "C"]
    assert after.attrs["global_symbol"] == "matmul_kernel"


def test_blocks_that_divide_the_tensors_have_no_guards():
    func = retarget_for_cpu(matmul(64, 64, 48))
    assert not nodes(func, (tirx.IfThenElse, tirx.Select))
    assert not nodes(func, tirx.Min)


def test_ragged_blocks_are_clipped_where_they_are_ragged():
    func = retarget_for_cpu(matmul(50, 64, 48))
    branches = nodes(func, tirx.IfThenElse)
    assert len(branches) == 1, "one choice, for the copy of A: the whole block, or element by element"
    names = {load.buffer.name for load in nodes(func, tirx.Select) for load in [load.true_value]}
    assert names == {"A"}
    bounds = {str(node) for node in nodes(func, tirx.Min)}
    assert bounds == {"T.min(32, 50 - by * 32)"}


@pytest.mark.parametrize("checked", [False, True])
def test_accesses_that_a_condition_makes_safe_have_no_guard_of_their_own(checked):
    func = retarget_for_cpu(direct(40, 100, 3, checked))
    assert bool(nodes(func, tirx.Select)) is not checked
    assert len(nodes(func, tirx.IfThenElse)) == 1


def test_what_the_c_code_generator_gets():
    kernel = legalize_for_c(retarget_for_cpu(matmul(64, 64, 48, "bfloat16", block=(64, 64, 16))), "body")
    assert kernel.gemms == ("mt_gemm_bfloat16_bfloat16_float32",)
    assert [(w.dtype, w.size) for w in kernel.workspaces] == [("uint16", 1024), ("uint16", 1024), ("float32", 4096)]
    loads = nodes(kernel.func, (tirx.BufferLoad, tirx.BufferStore))
    assert all(len(access.indices) == 1 and access.indices[0].dtype == "int64" for access in loads)
    assert "bfloat16" not in {node.dtype for node in nodes(kernel.func, tirx.PrimExpr)}


def test_small_blocks_stay_on_the_stack():
    kernel = legalize_for_c(retarget_for_cpu(matmul(64, 64, 48, block=(8, 8, 8))), "body")
    assert kernel.workspaces == ()
    assert len(nodes(kernel.func, tirx.AllocBuffer)) == 3


def test_the_function_that_comes_in_is_left_alone():
    func = matmul(50, 64, 48)
    before = func.script()
    retarget_for_cpu(func)
    assert func.script() == before
