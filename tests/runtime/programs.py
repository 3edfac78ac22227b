"""Hand-made Programs: local kernels and steps written out, so that the runtime is tested without the lowering."""

from __future__ import annotations

import tilelang.language as T
from tvm import tirx

from mesh_tensor import Mesh, Sharding
from mesh_tensor.program import AllocStep, CollectiveStep, FreeStep, KernelStep, Parameter, Program, Value


def matmul_kernel(m: int, n: int, k: int, block: int = 16, dtype: str = "float32") -> tirx.PrimFunc:
    """C = A @ B on one device."""

    @T.prim_func
    def matmul(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, block), T.ceildiv(m, block), threads=128) as (bx, by):
            a = T.alloc_shared((block, block), dtype)
            b = T.alloc_shared((block, block), dtype)
            c = T.alloc_fragment((block, block), dtype)
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(k, block), num_stages=2):
                T.copy(A[by * block, ko * block], a)
                T.copy(B[ko * block, bx * block], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * block, bx * block])

    return matmul


def add_one_kernel(size: int) -> tirx.PrimFunc:
    """B = A + 1 on one device."""

    @T.prim_func
    def add_one(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32")):
        with T.Kernel(T.ceildiv(size, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < size:
                    B[bx * 128 + i] = A[bx * 128 + i] + 1.0

    return add_one


def value(name: str, shape: tuple[int, ...], mesh: Mesh, sharding: dict, partial=None, storage="", dtype="float32"):
    """A Value; it has a storage of its own unless told."""
    layout = Sharding.make(mesh, len(shape), sharding, partial=partial)
    return Value(name, shape, dtype, layout, storage or name)


def matmul_k_split(m: int, n: int, k: int, devices: int = 2) -> Program:
    """C = A @ B with k split over x: every device sums its share, and C is all-reduced in place. k divides evenly."""
    mesh = Mesh({"x": devices})
    values = [
        value("A", (m, k), mesh, {"x": 1}),
        value("B", (k, n), mesh, {"x": 0}),
        value("C_part", (m, n), mesh, {}, {"x": "sum"}, "C"),
        value("C", (m, n), mesh, {}),
    ]
    func = matmul_kernel(m, n, k // devices)
    steps = (
        AllocStep("C_part"),
        KernelStep("kernel_0", func, ("A", "B", "C_part"), (), ("C_part",), 0),
        CollectiveStep("all_reduce", "C_part", "C", ("x",), "sum", None, None, m * n * 4, "k is split"),
    )
    parameters = (Parameter("A", "A", None), Parameter("B", "B", None), Parameter("C", None, "C"))
    return Program("matmul", mesh, parameters, {v.name: v for v in values}, steps)
