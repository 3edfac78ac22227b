"""Products that an author pins to an instruction, and copies that run on their own: whoever reads what they make waits
for it, and so does a kernel that ends in their middle."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.other_machines import machine

from .support import lowered, outline, run, text

M, N, K, BLOCK = 24, 32, 48, 8


def matmul(style="wgmma", at_once=False):
    """`relu(A @ B)`, whose products are waited for where the sum is used: in a statement that stands around its use."""
    multiply, asked = (T.gemm, {"wg_wait": -1}) if at_once else (T.wgmma_gemm, {})

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), n: T.int32, C: T.Tensor((M, N), "float32")
    ):
        with T.Kernel(N // BLOCK, M // BLOCK, threads=128) as (bx, by):
            a, b = T.alloc_shared((BLOCK, BLOCK), "float32"), T.alloc_shared((BLOCK, BLOCK), "float32")
            total = T.alloc_fragment((BLOCK, BLOCK), "float32")
            for k in T.serial(K // BLOCK):
                if at_once:
                    T.copy(A[by * BLOCK, k * BLOCK], a)
                else:
                    T.async_copy(A[by * BLOCK, k * BLOCK], a)
                    T.ptx_wait_group(0)
                T.copy(B[k * BLOCK, bx * BLOCK], b)
                multiply(a, b, total, clear_accum=k == (1 if style == "second" else 0), annotations=asked)
            if n > 0:
                T.wait_wgmma(0)
                for i, j in T.Parallel(BLOCK, BLOCK):
                    C[by * BLOCK + i, bx * BLOCK + j] = T.max(total[i, j], 0)

    return kernel


def matmul_reference(a, b, n):
    return (a @ b).relu()


def inputs():
    return [torch.randn(M, K), torch.randn(K, N), 1]


@pytest.mark.parametrize(("mesh", "layouts"), [({"x": 2}, {"A": {"x": 0}}), ({"x": 3}, {"A": {"x": 1}})])
def test_products_are_split(mesh, layouts):
    given = inputs()
    with machine(1):
        found = run(matmul(), mesh, layouts, *given)
    torch.testing.assert_close(found, matmul_reference(*given), rtol=1e-5, atol=1e-5)


def test_a_sum_that_devices_complete_is_waited_for():
    with machine(1):
        result = lowered(matmul(), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}}, strict=True)
    assert [step.split("(")[0] for step in outline(result)] == ["kernel", "all_reduce", "kernel"]
    first = text(result.steps[0].func)
    assert "T.gemm" in first
    assert not [name for name in ("wgmma", "async_copy") if name in first]
    with machine(1):
        (rows,) = lowered(matmul(), {"x": 3}, {"A": {"x": 0}, "C": {"x": 0}}, strict=True).steps
    assert [name for name in ("T.wgmma_gemm", "T.async_copy") if name in text(rows.func)] == [
        "T.wgmma_gemm",
        "T.async_copy",
    ]


def test_a_product_that_is_deferred_in_another_way_is_waited_for():
    layouts = {"A": {"x": 1}, "B": {"x": 0}}
    with machine(1):
        first = text(lowered(matmul(at_once=True), {"x": 2}, layouts, strict=True).steps[0].func)
    assert "wg_wait" in text(matmul(at_once=True))
    assert "wg_wait" not in first


def test_sums_that_start_later_are_of_what_comes_then():
    """The first block of K does not count; nor does what the sum was before."""
    a, b, n = inputs()
    expected = (a[:, BLOCK:] @ b[BLOCK:]).relu()
    with machine(1):
        for layouts in ({"A": {"x": 0}}, {"A": {"x": 1}}, {"B": {"x": 1}}):
            annotated = mt.annotate(matmul("second", at_once=True), mt.Mesh({"x": 2}), layouts)
            found = mt.compile(annotated, target="interpret")(a, b, n)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
