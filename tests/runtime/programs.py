"""Hand-made Programs: local kernels and steps written out, so that the runtime is tested without the lowering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tilelang.language as T
from tvm import tirx

from mesh_tensor import Mesh, Sharding
from mesh_tensor.api.compile import MeshKernel
from mesh_tensor.program.program import Parameter, Program, ProgramValue
from mesh_tensor.program.steps import AllocStep, CollectiveStep, KernelStep, Step


def value(
    name: str,
    shape: tuple[int, ...],
    mesh: Mesh,
    sharding: Mapping[str, int],
    partial: Mapping[str, str] | None = None,
    storage: str = "",
    dtype: str = "float32",
) -> ProgramValue:
    """A ProgramValue; it has a storage of its own unless told."""
    layout = Sharding.make(mesh, len(shape), sharding, partial=partial)
    return ProgramValue(name, shape, dtype, layout, storage or name)


def program(mesh: Mesh, values: Sequence[ProgramValue], steps: Sequence[Step], parameters: Sequence[str]) -> Program:
    """A Program; a parameter is `A` (input), `>B` (output), or `C>D` (input and output values of parameter C)."""
    described = []
    for text in parameters:
        source, arrow, target = text.partition(">")
        described.append(Parameter(source or target, source or None, target if arrow else None))
    return Program("test", mesh, tuple(described), {v.name: v for v in values}, tuple(steps))


def kernel_of(func: tirx.PrimFunc, made: Program, target: str = "interpret", **options) -> MeshKernel:
    """A MeshKernel for `func` whose Program is `made`."""
    return kernel_by(func, lambda func, symbols: made, target, **options)


def kernel_by(
    func: tirx.PrimFunc, build: Callable[[tirx.PrimFunc, Sequence[tirx.Var]], Program], target: str, **options
) -> MeshKernel:
    """A MeshKernel for `func` whose Programs `build` makes."""
    known = {"out_idx": None, "strict": False, "poison": False, "overlap": "auto", **options}
    return MeshKernel(func, Builds(build), target=target, **known)


@dataclass(frozen=True)
class Builds:
    """Makes Programs by hand, size by size."""

    build: Callable[[tirx.PrimFunc, Sequence[tirx.Var]], Program]

    def __call__(self, func: tirx.PrimFunc, symbols: Sequence[tirx.Var] = (), split: object = None) -> Built:
        return Built(self.build(func, symbols))

    def splits(self, func: tirx.PrimFunc) -> None:
        return None


@dataclass(frozen=True)
class Built:
    """A Program that is as it is, whatever the sizes."""

    program: Program

    def sized(self, sizes: Sequence[int], decided: object = None) -> Program:
        return self.program


def collective(kind: str, src: str, dst: str, axes: str, op=None, src_dim=None, dst_dim=None) -> CollectiveStep:
    """A CollectiveStep over the axes named by the letters of `axes`."""
    return CollectiveStep(kind, src, dst, tuple(axes), op, src_dim, dst_dim, 0, "")


def matmul_kernel(m: int, n: int, k: int, block: int = 16, dtype: str = "float32") -> tirx.PrimFunc:
    """C = A @ B."""

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
    """B = A + 1."""

    @T.prim_func
    def add_one(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32")):
        with T.Kernel(T.ceildiv(size, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < size:
                    B[bx * 128 + i] = A[bx * 128 + i] + 1.0

    return add_one


def accumulate_kernel(size: int) -> tirx.PrimFunc:
    """B += A."""

    @T.prim_func
    def accumulate(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32")):
        with T.Kernel(1, threads=128):
            for i in T.serial(size):
                B[i] = B[i] + A[i]

    return accumulate


def axpy_kernel(size: int) -> tirx.PrimFunc:
    """B = alpha * A + n."""

    @T.prim_func
    def axpy(A: T.Tensor((size,), "float32"), alpha: T.float32, B: T.Tensor((size,), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            for i in T.serial(size):
                B[i] = alpha * A[i] + T.cast(n, "float32")

    return axpy


def local_axpy_kernel(size: int) -> tirx.PrimFunc:
    """B = alpha * A + n + 100 * x + 10 * y: tensors first, then scalars, then the device's coordinates."""

    @T.prim_func
    def local_axpy(
        A: T.Tensor((size,), "float32"),
        B: T.Tensor((size,), "float32"),
        alpha: T.float32,
        n: T.int32,
        x: T.int32,
        y: T.int32,
    ):
        with T.Kernel(1, threads=128):
            for i in T.serial(size):
                B[i] = alpha * A[i] + T.cast(n + 100 * x + 10 * y, "float32")

    return local_axpy


def add_one_split(size: int, devices: int, sharding: Mapping[str, int] | None = None) -> MeshKernel:
    """B = A + 1, both split (or laid out as told) over x."""
    return kernel_of(add_one_kernel(size), add_one_program(size, devices, sharding))


def add_one_program(size: int, devices: int, sharding: Mapping[str, int] | None = None) -> Program:
    """The steps of `add_one_split`."""
    mesh = Mesh({"x": devices})
    layout = {"x": 0} if sharding is None else sharding
    values = [value("A", (size,), mesh, layout), value("B", (size,), mesh, layout)]
    func = add_one_kernel(values[0].tile_shape[0])
    steps = [AllocStep("B"), KernelStep("kernel_0", func, ("A", "B"), (), ("B",), 0)]
    return program(mesh, values, steps, ["A", ">B"])


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
    steps = [
        AllocStep("C"),
        KernelStep("kernel_0", func, ("A", "B", "C_part"), (), ("C_part",), 0),
        collective("all_reduce", "C_part", "C", "x", "sum"),
    ]
    return program(mesh, values, steps, ["A", "B", ">C"])
