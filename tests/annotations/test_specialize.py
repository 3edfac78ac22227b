"""Kernels with symbolic dims become kernels without."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.annotations.annotate import annotate, evaluate, read_annotations, specialize, symbols
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.targets.interpreter import interpret


def scale_kernel():
    rows = T.dynamic("rows")

    @T.prim_func
    def scale(A: T.Tensor((rows, 8), "float32"), B: T.Tensor((2 * rows, 8), "float32"), alpha: T.float32):
        with T.Kernel(T.ceildiv(rows, 4), threads=128) as bx:
            for i, j in T.Parallel(4, 8):
                if bx * 4 + i < rows:
                    B[bx * 4 + i, j] = A[bx * 4 + i, j] * alpha
                    B[bx * 4 + i + rows, j] = A[bx * 4 + i, j]

    return scale


def test_symbols_in_order():
    assert [var.name for var in symbols(scale_kernel())] == ["rows"]


def test_a_specialized_kernel_runs():
    func = scale_kernel()
    (rows,) = symbols(func)
    made = specialize(func, {rows: 5})
    assert not symbols(made)
    shapes = [tuple(int(size) for size in made.buffer_map[param].shape) for param in made.params[:2]]
    assert shapes == [(5, 8), (10, 8)]
    a, b = torch.randn(5, 8), torch.zeros(10, 8)
    interpret(made, [a.numpy(), b.numpy(), 2.0])
    torch.testing.assert_close(b, torch.cat([2 * a, a]))
    assert [var.name for var in symbols(func)] == ["rows"]


def test_annotations_are_kept_and_specialized():
    func = annotate(scale_kernel(), Mesh({"x": 2}), {"A": {"x": 0}, "B": {"x": 1}})
    (rows,) = symbols(func)
    mesh, annotations = read_annotations(specialize(func, {rows: 6}))
    assert mesh == Mesh({"x": 2})
    assert {name: str(a.sharding) for name, a in annotations.items()} == {"A": "S[0]", "B": "S[1]"}


def test_block_shapes_are_specialized():
    func = scale_kernel()
    (rows,) = symbols(func)
    block = {"block_shape": (rows, 8), "program_id": 0, "sharding": {"x": 1}}
    _, annotations = read_annotations(specialize(annotate(func, Mesh({"x": 2}), {"A": block}), {rows: 6}))
    assert [int(size) for size in annotations["A"].block_shape] == [6, 8]


def test_a_scalar_that_is_a_size_is_no_parameter_any_more():
    @T.prim_func
    def fill(handle: T.handle, n: T.int32):
        A = T.match_buffer(handle, (n,), "float32")
        with T.Kernel(1, threads=128):
            for i in T.serial(n):
                A[i] = T.cast(n, "float32")

    (size,) = symbols(fill)
    made = specialize(fill, {size: 3})
    assert len(made.params) == 1
    a = torch.zeros(3)
    interpret(made, [a.numpy()])
    assert a.tolist() == [3.0] * 3


def test_evaluate():
    func = scale_kernel()
    (rows,) = symbols(func)
    double = func.buffer_map[func.params[1]].shape[0]
    assert evaluate(double, {rows: 7}) == 14
    assert evaluate(double, {}) is None
    assert evaluate(3, {}) == 3


def test_sizes_that_make_a_divisor_0_are_refused():
    """Heads in groups of 8 // groups: with more groups than heads there is no such group."""
    groups = T.dynamic("groups")

    @T.prim_func
    def main(X: T.Tensor((8,), "float32"), W: T.Tensor((groups,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(8, threads=32) as bx:
            Y[bx] = X[bx] * W[bx // (8 // groups)]

    kernel = mt.compile(mt.annotate(main, {"x": 2}, {"X": {"x": 0}}), target="interpret")
    x, w = torch.randn(8), torch.randn(4)
    torch.testing.assert_close(kernel(x, w), x * w.repeat_interleave(2))
    with pytest.raises(mt.MeshTensorError) as error:
        kernel(x, torch.randn(16))
    assert "the kernel divides by 8 // groups, which is 0 where groups = 16" in str(error.value)
    assert "call it with other sizes" in str(error.value)
