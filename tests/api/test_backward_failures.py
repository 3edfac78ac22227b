"""Backward kernels that are none, and calls that autograd can't record: refused by name."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.embedding import embedding
from kernels.flash_attention_training import attention_backward, attention_with_lse
from kernels.matmul import matmul, matmul_backward
from tests.api.test_module_gradient import EXP
from tests.refusals import refusal
from tests.runtime.programs import accumulate_kernel

LAYOUTS = {"A": {"x": 0}, "B": {}, "C": {"x": 0}}
D_A, D_B = matmul_backward(5, 6, 7, 4, 4, 4)


def compiled(*backward):
    return mt.compile(mt.annotate(matmul(5, 6, 7, 4, 4, 4), {"x": 2}, LAYOUTS), target="interpret", backward=backward)


def test_parameters_that_belong_to_nothing():
    @T.prim_func
    def strange(
        X: T.Tensor((5, 7), "float32"),
        d_A: T.Tensor((5, 7), "float32"),
        d_B: T.Tensor((7, 6), "float32"),
        C: T.Tensor((5, 6), "float32"),
        d_C: T.Tensor((5, 6), "float32"),
    ):
        with T.Kernel(5) as i:
            for j in T.Parallel(6):
                C[i, j] = X[i, j] + d_A[i, j] + d_B[i, j]
                d_C[i, j] = 0

    text = refusal(lambda: compiled(strange))
    assert "strange: 'X' is named after no parameter of the forward kernel (A, B, C)" in text
    assert "strange: 'd_A' is read, but the forward kernel doesn't write 'A'" in text
    assert "strange: 'd_B' is read, but the forward kernel doesn't write 'B'" in text
    assert "strange: 'C' is written, but is no gradient" in text
    assert "strange: 'd_C' is written, but the forward kernel doesn't read 'C'" in text
    assert "where: backward kernels ('strange') of kernel 'matmul_kernel'" in text
    assert "fix: x, y: the forward kernel's parameters" in text


def test_other_shapes_and_dtypes():
    text = refusal(lambda: compiled(*matmul_backward(5, 8, 7, 4, 4, 4, dtype="float64", accum_dtype="float64")))
    assert "matmul_d_A_kernel: 'B' is a tensor of float64, but the forward kernel's 'B' is a tensor of float32" in text
    text = refusal(lambda: compiled(*matmul_backward(5, 8, 7, 4, 4, 4)))
    assert "matmul_d_A_kernel: 'd_C' has shape (5, 8), but the forward kernel's 'C' has (5, 6)" in text


def test_one_gradient_twice():
    assert "'d_A' is written by 2 of them" in refusal(lambda: compiled(D_A, D_A))


def test_gradient_of_whole_numbers():
    @T.prim_func
    def back(d_out: T.Tensor((5, 6), "float32"), d_ids: T.Tensor((5,), "int32")):
        with T.Kernel(5) as i:
            d_ids[i] = T.cast(d_out[i, 0], "int32")

    func = mt.annotate(embedding(5, 4, 6, 2, 4), {"x": 2}, {"ids": {}, "table": {}, "out": {}})
    text = refusal(lambda: mt.compile(func, target="interpret", backward=back))
    assert "back: 'd_ids' is the gradient of int32 numbers" in text


def test_what_is_updated_in_place():
    @T.prim_func
    def back(d_B: T.Tensor((8,), "float32"), d_A: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            for j in T.Parallel(8):
                d_A[j] = d_B[j]

    func = mt.annotate(accumulate_kernel(8), {"x": 2}, {"A": {}, "B": {}})
    text = refusal(lambda: mt.compile(func, target="interpret", backward=back))
    assert "'B' is updated in place by the forward kernel, which autograd can't record" in text


def test_what_is_no_kernel():
    assert "matmul_backward(M=..., N=..., K=" in refusal(lambda: compiled(matmul_backward))


def test_gradient_that_no_kernel_computes():
    kernel = compiled(D_A)
    a, b = (torch.randn(shape, requires_grad=True) for shape in [(5, 7), (7, 6)])
    text = refusal(lambda: kernel(a, b))
    assert "parameter 'B' requires a gradient, and none of them writes d_B" in text
    assert "where: call of kernel 'matmul_kernel', backward kernels ('matmul_d_A_kernel')" in text
    kernel(a, b.detach()).sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(5, 6) @ b.detach().T)


@pytest.mark.parametrize("compiled_by", [None, "aot_eager"])
def test_an_operation_with_a_gradient_that_no_kernel_computes(compiled_by):
    op = mt.as_custom_op(compiled(D_A), f"half_learned_{compiled_by}")
    call = op if compiled_by is None else torch.compile(lambda *x: op(*x) * 1, fullgraph=True, backend=compiled_by)
    a, b = (torch.randn(shape, requires_grad=True) for shape in [(5, 7), (7, 6)])
    with pytest.raises(Exception, match="'B' requires a gradient, and none of them writes d_B"):  # torch may wrap it
        call(a, b).sum().backward()
    call(a, b.detach()).sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(5, 6) @ b.detach().T)


def test_results_written_into_what_is_given():
    a, b = (torch.randn(shape, requires_grad=True) for shape in [(5, 7), (7, 6)])
    text = refusal(lambda: compiled(D_A, D_B)(a, b, torch.empty(5, 6)))
    assert "parameter 'C' is written into: autograd records results that are made" in text
    assert "pass what the kernel reads only" in text


def test_gradients_of_gradients():
    a, b = (torch.randn(shape, requires_grad=True) for shape in [(5, 7), (7, 6)])
    loss = compiled(D_A, D_B)(a, b).square().sum()
    text = refusal(lambda: torch.autograd.grad(loss, a, create_graph=True))
    assert "requires a gradient, which would be lost" in text
    assert "kernel 'matmul_d_A_kernel'" in text


def test_batches_of_gradients():
    a, b = (torch.randn(shape, requires_grad=True) for shape in [(5, 7), (7, 6)])
    made, grads = compiled(D_A, D_B)(a, b), torch.randn(3, 5, 6)
    text = refusal(lambda: torch.autograd.grad(made, a, grads, is_grads_batched=True))
    assert "'d_C': a tensor inside of torch.func.vmap, grad or jvp, or a batch of gradients" in text
    run = mt.distribute_module(EXP, {"x": 2}, {})
    x = torch.randn(4, 4, requires_grad=True)
    text = refusal(lambda: torch.autograd.grad(run(x), x, torch.randn(3, 4, 4), is_grads_batched=True))
    assert "a batch of gradients" in text
    assert "where: call of the backward of module function 'main'" in text


def test_a_result_whose_gradient_no_kernel_reads():
    """Gradients that lack a part would be wrong without a word."""
    sizes, options = (1, 2, 4, 4, 4), {"block_M": 4, "block_N": 4, "dtype": "float32"}
    func = mt.annotate(attention_with_lse(*sizes, **options), {"x": 2}, {n: {} for n in ("Q", "K", "V", "Out", "Lse")})
    kernel = mt.compile(func, target="interpret", backward=attention_backward(*sizes, **options))
    q, k, v = (torch.randn(1, 2, 4, 4, requires_grad=True) for _ in range(3))
    out, lse = kernel(q, k, v)
    text = refusal(lambda: (out.sum() + lse.sum()).backward())
    assert "the loss depends on 'Lse', and none of them reads d_Lse" in text
    out, lse = kernel(q, k, v)
    (out.sum() + lse.detach().sum()).backward()
    assert q.grad is not None


def test_whole_numbers_among_the_results():
    @T.prim_func
    def func(X: T.Tensor((4, 6), "float32"), Y: T.Tensor((4, 6), "float32"), n: T.Tensor((4,), "int32")):
        with T.Kernel(4) as i:
            n[i] = i
            for j in T.Parallel(6):
                Y[i, j] = X[i, j] * 2

    @T.prim_func
    def back(d_Y: T.Tensor((4, 6), "float32"), d_X: T.Tensor((4, 6), "float32")):
        with T.Kernel(4) as i:
            for j in T.Parallel(6):
                d_X[i, j] = d_Y[i, j] * 2

    annotated = mt.annotate(func, {"x": 2}, {"X": {"x": 0}, "Y": {"x": 0}, "n": {"x": 0}})
    x = torch.randn(4, 6, requires_grad=True)
    y, n = mt.compile(annotated, target="interpret", backward=back)(x)
    (y * n[:, None]).sum().backward()
    torch.testing.assert_close(x.grad, 2.0 * torch.arange(4)[:, None].expand(4, 6))


def test_an_operation_with_a_result_whose_gradient_no_kernel_reads():
    sizes, options = (1, 2, 4, 4, 4), {"block_M": 4, "block_N": 4, "dtype": "float32"}
    func = mt.annotate(attention_with_lse(*sizes, **options), {"x": 2}, {n: {} for n in ("Q", "K", "V", "Out", "Lse")})
    kernel = mt.compile(func, target="interpret", backward=attention_backward(*sizes, **options))
    op = mt.as_custom_op(kernel, "attention_that_learns")
    q, k, v = (torch.randn(1, 2, 4, 4, requires_grad=True) for _ in range(3))
    text = refusal(lambda: op(q, k, v)[1].sum().backward())
    assert "the loss depends on 'Lse', and none of them reads d_Lse" in text
    torch.compile(lambda *given: op(*given)[0].sum(), fullgraph=True, backend="aot_eager")(q, k, v).backward()
    found, q.grad = q.grad, None
    kernel(q, k, v)[0].sum().backward()
    torch.testing.assert_close(found, q.grad)
