"""Kernels that were once wrong, found by random kernels: each written as small as it gets."""

import numpy as np
import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.targets.interpreter import interpret
from tests.other_machines import machine


def same_as_unsharded(func, mesh, shardings):
    """Run a kernel on small integers, whole and on a poisoned mesh: every tensor has to hold the same afterwards."""
    rng = np.random.default_rng(0)
    buffers = [func.buffer_map[param] for param in func.params]
    expected = [rng.integers(0, 4, [int(n) for n in b.shape]).astype(b.dtype) for b in buffers]
    actual = [torch.from_numpy(array.copy()) for array in expected]
    interpret(func, expected)
    mt.compile(mt.annotate(func, mt.Mesh(mesh), shardings), target="interpret", poison=True)(*actual)
    for buffer, have, want in zip(buffers, actual, expected, strict=True):
        np.testing.assert_array_equal(have.numpy(), want, err_msg=buffer.name)


@pytest.mark.parametrize("devices", [1, 2])
def test_reads_past_the_end_of_a_whole_dim(devices):
    """TileLang reads 0 there; the dim is not walked from its start, so it is needed whole."""

    @T.prim_func
    def kernel(A: T.Tensor((13,), "float32"), Y: T.Tensor((16,), "float32")):
        with T.Kernel(4, threads=128) as bx:
            for i in T.Parallel(4):
                Y[(3 - bx) * 4 + i] = A[(3 - bx) * 4 + i]

    same_as_unsharded(kernel, {"x": devices}, {"A": {"x": 0}, "Y": {"x": 0}})


def test_a_reduction_of_one_element_past_the_end():
    """Blocks of 1: no element loop of the reduction walks the dim, only the loop around it."""

    @T.prim_func
    def kernel(A: T.Tensor((7,), "float32"), Y: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=128) as _:
            one = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for k in T.serial(7):
                T.copy(A[k], one)
                T.reduce_sum(one, total, dim=0, clear=False)
            T.copy(total, Y[0])

    same_as_unsharded(kernel, {"x": 3}, {"A": {"x": 0}})


def test_an_accumulator_that_starts_anew_in_every_block():
    """Only the last block's sum is left, which is the same in all of them."""

    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((3, 3), "float32"), Y: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=128) as _:
            unused = T.alloc_shared((1,), "float32")
            tile = T.alloc_fragment((3, 3), "float32")
            total = T.alloc_fragment((3,), "float32")
            for k in T.serial(4):
                T.copy(A[k], unused)
                T.clear(total)
                T.copy(B, tile)
                T.reduce_sum(tile, total, dim=0, clear=False)
            T.copy(total, Y)

    same_as_unsharded(kernel, {"x": 2}, {"A": {"x": 0}})


def test_two_indices_from_one_loop_beside_others():
    """The interpreter took `tile[e // 2, e % 2]` for one index, and compared it with the two of `tile[0, e % 2]`."""

    @T.prim_func
    def kernel(A: T.Tensor((3, 2), "float32"), Y: T.Tensor((3, 2), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_fragment((3, 2), "float32")
            T.copy(A, tile)
            for e in T.serial(6):
                tile[e // 2, e % 2] = tile[e // 2, e % 2] + tile[0, e % 2]
            T.copy(tile, Y)

    same_as_unsharded(kernel, {"x": 2}, {"A": {"x": 0}, "Y": {"x": 0}})


def test_an_update_at_another_place():
    """`Y[I[i]] = min(Y[J[i]], A[i])` was taken for an update: to TVM, loads from `I` and `J` are structurally equal."""

    @T.prim_func
    def kernel(
        A: T.Tensor((5, 5), "float32"),
        I: T.Tensor((5,), "int32"),  # noqa: E741
        J: T.Tensor((5,), "int32"),
        Y: T.Tensor((5, 5), "float32"),
    ):
        with T.Kernel(5, threads=128) as bx:
            for j in T.serial(5):
                Y[bx, I[4 - j]] = T.min(Y[bx, J[4 - j]], A[bx, j] - 2.0)
                Y[bx, I[j]] = Y[bx, J[j]] + A[bx, j]

    same_as_unsharded(kernel, {"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "Y": {"x": 0}})
    assert mt.sharding_rule(kernel).factors["k"].startswith("whole")


def test_an_update_in_a_loop_of_one_block_of_another_dim():
    """The loop over the one block of B ran on the device that has it alone, and what else is in it, too."""

    @T.prim_func
    def kernel(B: T.Tensor((3, 4), "float32"), D: T.Tensor((3, 3), "float32"), Y: T.Tensor((3, 3), "float32")):
        with T.Kernel(1, threads=128) as bx:
            total = T.alloc_fragment((3, 3), "float32")
            block = T.alloc_shared((4, 4), "float32")
            T.fill(total, 1.0)
            for ko in T.serial(T.ceildiv(3, 4)):
                T.copy(B[ko * 4, bx], block)
                for i, j in T.Parallel(3, 3):
                    total[i, j] += D[i, ko + j] * -1.0
            T.copy(total, Y[0, 0])

    same_as_unsharded(kernel, {"x": 2, "y": 2}, {"B": {"y": 0}, "Y": {"x": 1}})


def test_what_is_handed_on_is_complete_along_other_axes():
    """A running sum over rows and columns: devices along x take turns, and each along y handed on its own columns'."""

    @T.prim_func
    def kernel(A: T.Tensor((3, 11), "float32"), Y: T.Tensor((3, 11), "float32")):
        with T.Kernel(1, threads=128) as _:
            total = T.alloc_var("float32", init=0)
            for r in T.serial(3):
                for j in T.serial(11):
                    total = total + A[r, j]
                    Y[r, j] = total

    with machine(1):
        same_as_unsharded(kernel, {"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "Y": {"x": 0, "y": 1}})
