"""What can't run on a CPU is refused with a message that names it, the kernel and the way out."""

from functools import partial

import pytest
import tilelang.language as T
import torch

from mesh_tensor import MeshTensorError
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.cpu.retarget import retarget_for_cpu
from tests.refusals import refusal

refused = partial(refusal, compile_for_cpu)


def test_the_thread_index():
    @T.prim_func
    def per_thread(X: T.Tensor((128,))):
        with T.Kernel(1, threads=128):
            X[T.get_thread_binding(0)] = 1.0

    message = refused(per_thread)
    assert "thread index 'tx'" in message
    assert "kernel 'per_thread', target 'c'" in message
    assert "T.Parallel" in message


def test_an_intrinsic_of_gpus():
    @T.prim_func
    def shuffled(X: T.Tensor((128,))):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(128):
                X[i] = T.shfl_xor(X[i], 1)

    message = refused(shuffled)
    assert "T.shfl_xor_sync on " in message
    assert "kernel 'shuffled'" in message


def test_a_statement_of_gpus():
    @T.prim_func
    def grid_barrier(X: T.Tensor((128,))):
        with T.Kernel(2, threads=128):
            for _ in T.serial(2):
                T.sync_grid()
            T.clear(X)

    message = refused(grid_barrier)
    assert "T.sync_grid can't run on a CPU" in message
    assert "kernel 'grid_barrier'" in message
    assert 'use target="cuda"' in message


def test_an_old_value_that_is_not_always_asked_for():
    @T.prim_func
    def counter(X: T.Tensor((1,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=32) as bx:
            if Y[bx] > 0 and T.atomic_add(X[0], 1, return_prev=True) < 3:
                Y[bx] = 0

    assert "T.atomic_add_ret_elem_op" in refused(counter)


def test_a_dtype_that_c_lacks():
    @T.prim_func
    def four_bits(X: T.Tensor((8,), "float4_e2m1fn"), Y: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                Y[i] = X[i]

    message = refused(four_bits)
    assert "float4_e2m1fn" in message
    assert "kernel 'four_bits'" in message
    assert "float16" in message


def test_a_block_of_a_dtype_that_c_lacks():
    @T.prim_func
    def four_bits(X: T.Tensor((8,), "float4_e2m1fn"), Y: T.Tensor((8,), "float4_e2m1fn")):
        with T.Kernel(1, threads=32):
            x = T.alloc_shared((8,), "float4_e2m1fn")
            T.copy(X, x)
            T.copy(x, Y)

    assert "float4_e2m1fn" in refused(four_bits)


def test_a_gemm_past_the_end_of_a_block():
    @T.prim_func
    def too_far(C: T.Tensor((16, 16)), n: T.int32):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((32, 16), "float32")
            b = T.alloc_shared((16, 16), "float32")
            c = T.alloc_fragment((16, 16), "float32")
            T.gemm(a[n : n + 16, 0:16], b, c)
            T.copy(c, C)

    message = refused(too_far)
    assert "T.gemm over 'a' (16, 16) reaches past the buffer" in message
    assert "kernel 'too_far'" in message


def test_a_copy_between_blocks_that_do_not_pair_up():
    @T.prim_func
    def lopsided(X: T.Tensor((4, 8, 16)), Y: T.Tensor((8, 16))):
        with T.Kernel(1, threads=128):
            T.copy(X[0:4, 0:8, 0:16], Y[0:8, 0:16])

    message = refused(lopsided)
    assert "'X' (4, 8, 16)" in message
    assert "'Y' (8, 16)" in message
    assert "kernel 'lopsided'" in message


def test_an_unknown_external_function():
    @T.prim_func
    def external(X: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                X[i] = T.call_extern("float32", "__nv_fast_sqrtf", X[i])

    message = refused(external)
    assert "'__nv_fast_sqrtf'" in message
    assert "sqrtf" in message


def test_a_scalar_parameter_of_16_bits():
    @T.prim_func
    def half_scalar(X: T.Tensor((8,)), s: T.float16):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                X[i] = X[i] * T.cast(s, "float32")

    message = refused(half_scalar)
    assert "'s'" in message
    assert "float16" in message
    assert "pass it as float32" in message


def test_a_size_that_no_argument_has():
    n = T.dynamic("n")

    @T.prim_func
    def halves(X: T.Tensor((n // 2,))):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n // 2):
                X[i] = 1.0

    message = refused(halves)
    assert "'n'" in message
    assert "kernel 'halves'" in message


def test_nothing_is_changed_by_a_refusal():
    @T.prim_func
    def per_thread(X: T.Tensor((128,))):
        with T.Kernel(1, threads=128):
            X[T.get_thread_binding(0)] = 1.0

    before = per_thread.script()
    with pytest.raises(MeshTensorError):
        retarget_for_cpu(per_thread)
    assert per_thread.script() == before


def test_no_memory_for_the_blocks():
    @T.prim_func
    def enormous(X: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            block = T.alloc_shared((1 << 20, 1 << 20, 8), "float64")
            for i in T.Parallel(8):
                block[i, 0, 0] = 1.0
                X[i] = T.cast(block[7 - i, 0, 0], "float32")

    kernel = compile_for_cpu(enormous)
    with pytest.raises(MemoryError, match="blocks of a kernel"):
        kernel(torch.zeros(8))
