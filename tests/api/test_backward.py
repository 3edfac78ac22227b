"""Kernels with backward kernels under torch.autograd: which of them run, and with what."""

import pickle

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.matmul import matmul, matmul_backward

MESH = {"x": 2}
LAYOUTS = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}


def product(**options):
    return mt.compile(
        mt.annotate(matmul(5, 6, 7, 4, 4, 4), MESH, LAYOUTS),
        target="interpret",
        backward=matmul_backward(5, 6, 7, 4, 4, 4),
        **options,
    )


def layouts_of(program):
    return {p.name: str(program.values[p.output or p.input].sharding) for p in program.parameters}


def drawn(*shape):
    return torch.randn(shape, requires_grad=True)


def test_backward_kernels_lie_as_the_forward_kernel():
    parts = product().gradients.kernels
    layouts = [layouts_of(kernel.program) for kernel in parts]
    assert layouts == [{"B": "S[0]", "d_C": "R", "d_A": "S[1]"}, {"A": "S[1]", "d_C": "R", "d_B": "S[0]"}]
    assert not [step for kernel in parts for step in kernel.program.collectives]


def test_annotations_of_their_own_hold():
    d_A, d_B = matmul_backward(5, 6, 7, 4, 4, 4)
    d_A = mt.annotate(d_A, MESH, {"B": {"x": 0}, "d_C": {}, "d_A": {}})
    kernel = mt.compile(mt.annotate(matmul(5, 6, 7, 4, 4, 4), MESH, LAYOUTS), "interpret", backward=[d_A, d_B])
    assert [step.kind for step in kernel.gradients.kernels[0].program.collectives] == ["all_gather"]
    a, b = drawn(5, 7), drawn(7, 6)
    kernel(a, b).sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(5, 6) @ b.T)


def test_only_what_is_required_is_computed():
    kernel = product()
    a, b = torch.randn(5, 7), drawn(7, 6)
    kernel(a, b).sum().backward()
    d_A, d_B = kernel.gradients.kernels
    assert (d_A.peak_bytes, a.grad) == (0, None)
    assert d_B.peak_bytes > 0
    torch.testing.assert_close(b.grad, a.T @ torch.ones(5, 6))


def test_by_name_and_in_a_larger_graph():
    kernel, a, b = product(), drawn(5, 7), drawn(7, 6)
    loss = kernel(B=b * 2, A=a.sin()).relu().square().sum()
    loss.backward()
    found = a.grad, b.grad
    a.grad = b.grad = None
    (a.sin() @ (b * 2)).relu().square().sum().backward()
    torch.testing.assert_close(found, (a.grad, b.grad))


def test_nothing_is_recorded_where_no_gradient_is_wanted():
    kernel, a, b = product(), drawn(5, 7), drawn(7, 6)
    with torch.no_grad():
        assert not kernel(a, b).requires_grad
    assert not kernel(a.detach(), b.detach()).requires_grad
    made = kernel(mt.distribute(a.detach(), MESH, {}), b.detach())
    assert isinstance(made, mt.MeshTensor)


def test_results_that_nothing_uses_have_gradient_zero():
    def two(M, N):
        @T.prim_func
        def two_kernel(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32"), Z: T.Tensor((M, N), "float32")):
            with T.Kernel(M) as i:
                for j in T.Parallel(N):
                    Y[i, j] = X[i, j] * 2
                    Z[i, j] = X[i, j] * 3

        return two_kernel

    def back(M, N):
        @T.prim_func
        def back_kernel(
            d_Y: T.Tensor((M, N), "float32"), d_Z: T.Tensor((M, N), "float32"), d_X: T.Tensor((M, N), "float32")
        ):
            with T.Kernel(M) as i:
                for j in T.Parallel(N):
                    d_X[i, j] = d_Y[i, j] * 2 + d_Z[i, j] * 3

        return back_kernel

    func = mt.annotate(two(4, 6), MESH, {"X": {"x": 0}, "Y": {"x": 0}, "Z": {"x": 1}})
    kernel, x = mt.compile(func, target="interpret", backward=back(4, 6)), drawn(4, 6)
    kernel(x)[1].sum().backward()
    assert x.grad.eq(3).all()


def test_sizes_that_a_call_brings():
    rows = T.dynamic("rows")
    func = mt.annotate(matmul(rows, 6, 7, 4, 4, 4), MESH, {"A": {"x": 0}, "B": {}, "C": {"x": 0}})
    kernel = mt.compile(func, target="interpret", backward=matmul_backward(T.dynamic("rows"), 6, 7, 4, 4, 4))
    for size in (3, 8):
        a, b = drawn(size, 7), drawn(7, 6)
        kernel(a, b).sum().backward()
        torch.testing.assert_close(b.grad, a.detach().T @ torch.ones(size, 6))


def test_pickled():
    kernel, a, b = pickle.loads(pickle.dumps(product())), drawn(5, 7), drawn(7, 6)
    kernel(a, b).sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(5, 6) @ b.detach().T)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_operation_of_torchs(backend):
    op = mt.as_custom_op(product(), f"learned_{backend}")
    a, b = drawn(5, 7), drawn(7, 6)
    model = torch.compile(lambda x, w: op(x.sin(), w).relu().sum(), fullgraph=True, backend=backend)
    model(a, b).backward()
    found = a.grad, b.grad
    a.grad = b.grad = None
    (a.sin() @ b).relu().sum().backward()
    torch.testing.assert_close(found, (a.grad, b.grad))
