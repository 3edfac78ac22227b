"""Clause 9: reads outside a tile and its neighbourhood make the dim needed whole: gathered, said so, and refused where
strict. What is near by is in test_contract_halo.py."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt

from .support import assert_right, lowered, outline


def indexed(index, size_a=32, extra=0):
    """B[m] = A[index(m)]."""

    @T.prim_func
    def kernel(A: T.Tensor((size_a,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[index(bx * 8 + i)]

    return kernel


def gather():
    """B[m, n] = A[ids[m], n]."""

    @T.prim_func
    def kernel(ids: T.Tensor((12,), "int32"), A: T.Tensor((20, 8), "float32"), B: T.Tensor((12, 8), "float32")):
        with T.Kernel(3, threads=32) as bx:
            for i, j in T.Parallel(4, 8):
                B[bx * 4 + i, j] = A[ids[bx * 4 + i], j]

    return kernel


BOTH = {"A": {"x": 0}, "B": {"x": 0}}
KERNELS = {
    "flip": (indexed(lambda m: 31 - m), BOTH, lambda a: a.flip(0)),
    "butterfly": (indexed(lambda m: m ^ 16), BOTH, lambda a: a.view(2, 16).flip(0).reshape(32)),
    "columns": (indexed(lambda m: m % 4 * 8 + m // 4), BOTH, lambda a: a.view(4, 8).T.reshape(32)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_dim_is_gathered_and_the_output_stays_split(name):
    func, layouts, _ = KERNELS[name]
    result = lowered(func, {"x": 2}, layouts)
    assert outline(result) == ["all_gather(A, dim 0, x)", "kernel(A.1, B)"]
    assert set(result.whole) == {("A", 0)}
    (gathered,) = (step for step in result.steps if hasattr(step, "move"))
    assert gathered.reason.startswith("dim 0 is needed whole: ")


def test_only_the_dim_that_is_indexed_by_data_is_gathered():
    layouts = {"A": {"x": 0, "y": 1}, "B": {"x": 0, "y": 1}, "ids": {"x": 0}}
    result = lowered(gather(), {"x": 2, "y": 2}, layouts)
    assert outline(result) == ["all_gather(A, dim 0, x)", "kernel(ids, A.1, B)"]
    assert str(result.tensors["A.1"].sharding) == "R, S[1]"


@pytest.mark.parametrize("name", KERNELS)
def test_explain_says_so_with_its_bytes(name):
    func, layouts, _ = KERNELS[name]
    kernel = mt.compile(mt.annotate(func, {"x": 2}, layouts), target="interpret")
    (step,) = (step for step in kernel.program.steps if hasattr(step, "kind"))
    size = kernel.program.values["A"].shape[0]
    assert step.bytes == size // 2 * 4
    told = kernel.explain()
    assert "all_gather" in told
    assert "needed whole" in told


@pytest.mark.parametrize("name", KERNELS)
def test_strict_refuses(name):
    func, layouts, _ = KERNELS[name]
    with pytest.raises(mt.MeshTensorError) as error:
        lowered(func, {"x": 2}, layouts, strict=True)
    assert "buffer 'A' dim 0 on axis 'x' needs replication" in str(error.value)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("name", KERNELS)
def test_numbers(name, devices):
    func, layouts, reference = KERNELS[name]
    size = next(iter(func.buffer_map.values())).shape[0]
    assert_right(func, {"x": devices}, layouts, [torch.randn(int(size))], reference)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("layouts", [{"A": 0, "B": 0, "ids": 0}, {"A": 1, "B": 1}, {"A": 0, "B": 1}], ids=str)
def test_gather_numbers(mesh, layouts):
    asked = {name: dict.fromkeys(mesh, dim) for name, dim in layouts.items()}
    inputs = [torch.randint(0, 20, (12,), dtype=torch.int32), torch.randn(20, 8)]
    assert_right(gather(), mesh, asked, inputs, lambda ids, a: a[ids.long()])
