"""What kernels compute, counted."""

from dataclasses import replace

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.base.machine import Machine, Memory, Roofline
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.rules.kernel.cost import count_flops, flops_function, loaded_bytes, unknown_extents
from mesh_tensor.rules.kernel.reader import read_kernel


def test_loops_count_as_often_as_they_certainly_run():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), N: T.Tensor((1,), "int32"), C: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            last = T.alloc_var("int32", init=0)
            last = N[0] + 1
            for i in T.serial(8):
                C[i] = A[i] * 2.0
            for i in T.serial(N[0]):
                C[i] = A[i] * 3.0 + 1.0
            for i in T.serial(N[0] + 2, last):
                C[i] = A[i] + 1.0

    assert count_flops(kernel) == 8 + 2 + 1


def test_sizes_are_symbols():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n,)), N: T.Tensor((1,), "int32"), C: T.Tensor((n,))):
        with T.Kernel(T.ceildiv(n, 4), threads=32) as bx:
            for i in T.Parallel(4):
                C[bx * 4 + i] = A[bx * 4 + i] * 2.0
            for i in T.serial(N[0] * n):
                C[i] = A[i] * 3.0

    assert flops_function(kernel, [n])([10]) == 12 + 3


def below_diagonal(blocks, block=4):
    """Every row of blocks of S, up to the diagonal, times V."""
    rows = blocks * block

    @T.prim_func
    def kernel(S: T.Tensor((rows, rows)), V: T.Tensor((rows, block)), C: T.Tensor((rows, block))):
        with T.Kernel(blocks, threads=32) as bx:
            s = T.alloc_shared((block, block), "float32")
            v = T.alloc_shared((block, block), "float32")
            c = T.alloc_fragment((block, block), "float32")
            last = T.min(blocks, bx + 1)
            T.clear(c)
            for ko in T.serial(last):
                T.copy(S[bx * block, ko * block], s)
                T.copy(V[ko * block, 0], v)
                T.gemm(s, v, c)
            T.copy(c, C[bx * block, 0])

    return kernel


@pytest.mark.parametrize("blocks", [1, 2, 7, 256])
def test_blocks_below_a_diagonal_are_counted_row_by_row(blocks):
    kernel, products = below_diagonal(blocks), blocks * (blocks + 1) // 2
    assert count_flops(kernel) == products * 2 * 4**3
    assert loaded_bytes(kernel) == products * 2 * 4**2 * 4
    assert not unknown_extents(read_kernel(kernel))


def test_of_many_rows_some_are_counted():
    assert count_flops(below_diagonal(9000)) == pytest.approx(9000 * 9001 // 2 * 2 * 4**3, rel=1e-3)


@pytest.mark.parametrize(("devices", "products"), [(1, 36), (2, 5 + 6 + 7 + 8), (4, 7 + 8)])
def test_the_device_with_most_blocks_counts(devices, products):
    func = mt.annotate(below_diagonal(8), {"x": devices}, {"S": {"x": 0}, "C": {"x": 0}})
    program = lower_to_program(func)
    (step,) = program.kernels
    assert step.flops == products * 2 * 4**3
    tiles = tuple(program.values[name].tile_shape for name in step.args)
    assert loaded_bytes(step.func, tiles, step.sizes, (devices,) * len(step.axes)) == products * 2 * 4**2 * 4


@pytest.mark.parametrize("layouts", [{}, {"A": {"x": 0}, "C": {"x": 0}}, {"B": {"x": 1}, "C": {"x": 1}}])
def test_kernels_of_open_sizes_are_simulated_as_those_of_known_ones(layouts):
    """That loads its blocks again is known of both."""
    levels = Memory(1000, 1e11), Memory(1 << 40, 1e10)
    machine = Machine("levels", {"float32": 1e12}, levels, classes={"kernel": Roofline(again=0.1)})
    made = []
    for rows in (128, T.dynamic("rows")):
        func = mt.annotate(matmul(rows, 64, 64, 16, 16, 16), {"x": 2}, layouts)
        kernel = mt.compile(func, target="interpret", machine=machine)
        kernel(torch.zeros(128, 64), torch.zeros(64, 64), torch.zeros(128, 64))
        made.append(mt.simulate(kernel, machine).time)
    assert made[0] == pytest.approx(made[1])
    assert made[0] > mt.simulate(kernel, replace(machine, classes={})).time


def test_devices_of_many_axes_are_counted():
    axes = {f"a{number}": 2 for number in range(7)}
    func = mt.annotate(below_diagonal(128), axes, {"S": dict.fromkeys(axes, 0), "C": dict.fromkeys(axes, 0)})
    (step,) = lower_to_program(func).kernels
    assert step.flops == 128 * 2 * 4**3


def test_loops_that_a_branch_keeps_from_a_division_by_zero():
    @T.prim_func
    def kernel(A: T.Tensor((16, 16)), C: T.Tensor((16, 16))):
        with T.Kernel(16, threads=32) as bx:
            if bx > 0:
                for j in T.serial(16 // bx):
                    C[bx, j] = A[bx, j] * 2.0

    assert count_flops(kernel) == sum(16 // row for row in range(1, 16))


def test_what_only_data_says_is_named():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), N: T.Tensor((1,), "int32"), C: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(N[0]):
                C[i] = A[i] * 3.0

    assert unknown_extents(read_kernel(kernel)) == ["N[0]"]


def test_what_follows_from_what_only_data_says_is_named():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), N: T.Tensor((1,), "int32"), C: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(N[0], N[0] + 2):
                for j in T.serial(i):
                    C[j] = A[j] * 3.0

    assert count_flops(kernel) == 2
    assert unknown_extents(read_kernel(kernel)) == ["i"]
