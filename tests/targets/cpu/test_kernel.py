"""Compiled kernels as a whole: control flow, sizes, memory, threads."""

import threading
import time

import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.kernel import compile_for_cpu

from .kernels import dynamic_scale


def softmax(M, N, dtype="float32", block_M=8):
    """Rows held whole; what lies past the end of a row is masked to minus infinity."""

    @T.prim_func
    def softmax_kernel(X: T.Tensor((M, N), dtype), Y: T.Tensor((M, N), dtype), valid: T.int32):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), "float32")
            row_max = T.alloc_fragment((block_M,), "float32")
            row_sum = T.alloc_fragment((block_M,), "float32")
            T.copy(X[bx * block_M, 0], x)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = T.if_then_else(j < valid, x[i, j], -T.infinity("float32"))
            T.reduce_max(x, row_max, dim=1)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = T.exp(x[i, j] - row_max[i])
            T.reduce_sum(x, row_sum, dim=1)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] / row_sum[i]
            T.copy(x, Y[bx * block_M, 0])

    return softmax_kernel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax_with_a_mask(dtype):
    x = torch.randn(29, 70).to(getattr(torch, dtype))
    y = torch.empty_like(x)
    compile_for_cpu(softmax(29, 70, dtype))(x, y, 50)
    expected = torch.zeros(29, 70)
    expected[:, :50] = x[:, :50].float().softmax(1)
    torch.testing.assert_close(y, expected.to(x.dtype), rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-6)


def test_a_row_that_is_masked_whole_is_nan():
    x = torch.randn(3, 16)
    y = torch.empty_like(x)
    compile_for_cpu(softmax(3, 16))(x, y, 0)
    assert y.isnan().all()


def test_one_compiled_kernel_for_every_size():
    kernel = compile_for_cpu(dynamic_scale(3.0))
    for shape in [(1, 1), (16, 32), (33, 100), (0, 5), (5, 0)]:
        x = torch.randn(shape)
        y = torch.empty_like(x)
        kernel(x, y)
        assert torch.equal(y, x * 3.0)


def halved():
    n, m = T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def halved_kernel(X: T.Tensor((T.ceildiv(n, 2), m)), Y: T.Tensor((m,)), Z: T.Tensor((n,))):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(T.ceildiv(n, 2), m):
                X[i, j] = Z[2 * i] + Y[j]

    return halved_kernel


def test_sizes_that_are_computed_from_others():
    x, y, z = torch.empty(6, 3), torch.randn(3), torch.randn(11)
    compile_for_cpu(halved())(x, y, z)
    assert torch.equal(x, z[::2, None] + y)


def shifted():
    """Sizes and positions of 64 bits."""
    n = T.dynamic("n", "int64")

    @T.prim_func
    def shifted_kernel(X: T.Tensor((n, 8)), Y: T.Tensor((n, 8)), row: T.int64):
        with T.Kernel(T.ceildiv(n, 16), threads=32) as bx:
            x = T.alloc_shared((16, 8), "float32")
            T.copy(X[row + bx * 16, 0], x)
            for i, j in T.Parallel(16, 8):
                if row + i < n:
                    x[i, j] = x[i, j] + 1.0
            T.copy(x, Y[bx * 16, 0])

    return shifted_kernel


def test_sizes_and_positions_of_64_bits():
    x, y = torch.randn(37, 8), torch.empty(37, 8)
    compile_for_cpu(shifted())(x, y, 5)
    assert torch.equal(y, torch.cat([x[5:], torch.zeros(5, 8)]) + 1.0)


def test_old_values_of_atomics_and_iterations_given_up():
    @T.prim_func
    def compact(X: T.Tensor((40,)), Y: T.Tensor((40,)), count: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=128):
            for i in T.serial(40):
                if X[i] < 0:
                    continue
                p = T.atomic_add(count[0], 1, return_prev=True)
                Y[p] = X[i]
                if T.atomic_max(count[0], 7, return_prev=True) > 20:
                    break

    x, y, count = torch.randn(40), torch.zeros(40), torch.zeros(1, dtype=torch.int32)
    compile_for_cpu(compact)(x, y, count)
    kept = x[x >= 0][:15]
    expected = torch.zeros(40)
    expected[0] = kept[0]
    expected[7 : 6 + len(kept)] = kept[1:]
    assert torch.equal(y, expected)
    assert count.item() == 6 + len(kept)


def strided_copy():
    M, N = T.dynamic("m"), T.dynamic("n")
    s0, s1 = T.dynamic("s0"), T.dynamic("s1")

    @T.prim_func
    def strided_kernel(X: T.StridedTensor((M, N), (s0, s1), "float32"), Y: T.Tensor((M, N))):
        with T.Kernel(T.ceildiv(M, 16), threads=128) as bx:
            for i, j in T.Parallel(16, N):
                Y[bx * 16 + i, j] = X[bx * 16 + i, j]

    return strided_kernel


def test_strides_are_read_from_the_tensor():
    x = torch.randn(40, 70)
    y = torch.empty(35, 20)
    compile_for_cpu(strided_copy())(x.T[:70:2, :20], y)
    assert torch.equal(y, x.T[:70:2, :20])


def control_flow(N):
    """Loops that end early, conditions, variables, a serial loop with a step, vectorised and unrolled loops."""

    @T.prim_func
    def control_kernel(X: T.Tensor((N,)), Y: T.Tensor((8, N)), n: T.int32, scale: T.float32):
        with T.Kernel(T.ceildiv(N, 16), threads=128) as bx:
            count = T.alloc_var("int32", 0)
            total = T.alloc_var("float32", 0.0)
            values = T.alloc_local((16,), "float32")
            start = bx * 16
            for i in T.vectorized(16):
                values[i] = X[start + i] * scale
            while count < n:
                count = count + 1
                if count > 5:
                    T.loop_break()
                total = total + values[count]
            T.sync_threads()
            for i in T.Parallel(16):
                Y[0, start + i] = total
                if i % 2 == 0:
                    Y[1, start + i] = values[i]
                elif start + i < n:
                    Y[1, start + i] = -values[i]
                else:
                    Y[1, start + i] = 0
                Y[2, start + i] = T.Select(values[i] > 0, values[i], 0.5)
                Y[3, start + i] = X[start + i - 1] + X[start + i + 1]
                Y[4, start + i] = T.if_then_else(start + i + n < N, X[start + i + n], -1.0)
                Y[5, N - 1 - start - i] = X[start + i]
            for i in T.unroll(16):
                Y[6, start + i] = T.cast(start + i, "float32")
            for i in T.serial(0, 16, 3):
                Y[7, start + i] = 1.0

    return control_kernel


@pytest.mark.parametrize("n", [0, 3, 40])
def test_control_flow(n):
    N, scale = 100, 1.5
    x, y = torch.randn(N), torch.zeros(8, N)
    compile_for_cpu(control_flow(N))(x, y, n, scale)
    i = torch.arange(N)
    padded = torch.cat([torch.zeros(1), x, torch.zeros(200)])
    totals = [
        sum((padded[1 + start + k] * scale for k in range(1, min(n, 5) + 1)), torch.tensor(0.0))
        for start in range(0, N, 16)
    ]
    torch.testing.assert_close(y[0], torch.stack(totals).repeat_interleave(16)[:N])
    odd = torch.where(i < n, -x * scale, 0.0)
    expected = [
        torch.where(i % 16 % 2 == 0, x * scale, odd),
        torch.where(x * scale > 0, x * scale, 0.5),
        padded[i] + padded[i + 2],
        torch.where(i + n < N, padded[1 + i + n], -1.0),
        x.flip(0),
        i.float(),
        (i % 16 % 3 == 0).float(),
    ]
    assert torch.equal(y[1:], torch.stack(expected))


def gather(N):
    """Indices that are data, some outside: those read 0 and are not written."""

    @T.prim_func
    def gather_kernel(X: T.Tensor((N,)), ids: T.Tensor((N,), "int32"), Y: T.Tensor((N,)), Z: T.Tensor((N,))):
        with T.Kernel(1, threads=128):
            for i in T.serial(N):
                if ids[i] < N:
                    ids[i] = ids[i] + 5
                Y[i] = X[ids[i]]
                Z[ids[i]] = X[i]

    return gather_kernel


def test_indices_that_are_data_never_leave_the_buffer():
    N = 50
    x, ids = torch.randn(N), torch.randint(-100, 100, (N,), dtype=torch.int32)
    y, z, before = torch.empty(N), torch.zeros(N), ids.clone()
    compile_for_cpu(gather(N))(x, ids, y, z)
    moved = torch.where(before < N, before + 5, before)
    inside = (moved >= 0) & (moved < N)
    assert torch.equal(ids, moved)
    assert torch.equal(y, torch.where(inside, x[moved.clamp(0, N - 1)], 0.0))
    expected = torch.zeros(N)
    for i in range(N):
        if inside[i]:
            expected[moved[i]] = x[i]
    assert torch.equal(z, expected)


def big_block(N, rounds):
    """A block of N * N floats: far more than a thread's stack."""

    @T.prim_func
    def big_kernel(X: T.Tensor((N, N)), Y: T.Tensor((N, N))):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((N, N), "float32")
            T.copy(X, x)
            for _ in T.serial(rounds):
                for i, j in T.Parallel(N, N):
                    x[i, j] = x[i, j] * 0.5 + 1.0
            T.copy(x, Y)

    return big_kernel


def test_blocks_of_many_megabytes_in_several_threads():
    kernel = compile_for_cpu(big_block(2048, 3))
    inputs = [torch.randn(2048, 2048) for _ in range(3)]
    outputs = [torch.empty_like(x) for x in inputs]
    threads = [threading.Thread(target=kernel, args=pair) for pair in zip(inputs, outputs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(y, x / 8 + 1.75)


def test_a_running_kernel_leaves_python_to_other_threads():
    kernel = compile_for_cpu(big_block(512, 2000))
    x, y = torch.randn(512, 512), torch.empty(512, 512)

    def ticks():
        """How often this thread goes on while the kernel runs. It goes on once where that keeps Python to itself."""
        thread, count = threading.Thread(target=kernel, args=(x, y)), 0
        start = time.perf_counter()
        thread.start()
        while thread.is_alive():
            time.sleep(0.001)
            count += 1
        assert time.perf_counter() - start > 0.01
        return count

    assert any(ticks() > 3 for _ in range(50))  # on a machine that has other things to do, not every time


def two_kernels(N):
    @T.prim_func
    def two_kernels_func(X: T.Tensor((N,)), Y: T.Tensor((N,)), Z: T.Tensor((N,))):
        with T.Kernel(T.ceildiv(N, 16), threads=32) as bx:
            for i in T.Parallel(16):
                Y[bx * 16 + i] = X[bx * 16 + i] + 1.0
        with T.Kernel(T.ceildiv(N, 16), threads=32) as bx:
            for i in T.Parallel(16):
                Z[bx * 16 + i] = Y[N - 1 - bx * 16 - i]

    return two_kernels_func


def test_grids_run_one_after_the_other():
    x = torch.randn(50)
    y, z = torch.empty(50), torch.empty(50)
    compile_for_cpu(two_kernels(50))(x, y, z)
    assert torch.equal(z, (x + 1).flip(0))


def test_a_kernel_that_does_nothing_runs():
    @T.prim_func
    def idle(X: T.Tensor((4,))):
        with T.Kernel(1, threads=32):
            T.sync_threads()

    compile_for_cpu(idle)(torch.zeros(4))


def keywords(N):
    """Names that mean something in C++ or in the C library."""

    @T.prim_func
    def keyword_kernel(new: T.Tensor((N,)), free: T.Tensor((N,)), this: T.int32):
        with T.Kernel(1, threads=32):
            static = T.alloc_shared((N,), "float32")
            T.copy(new, static)
            for auto in T.Parallel(N):
                double = static[auto] + 1.0
                free[auto] = double * T.cast(this, "float32")

    return keyword_kernel


def test_names_that_mean_something_in_c():
    x, y = torch.randn(400), torch.empty(400)
    compile_for_cpu(keywords(400))(x, y, 2)
    assert torch.equal(y, (x + 1) * 2)


def shared_by_programs(N):
    """Programs that leave something behind for those after them, in memory of the kernel's own."""

    @T.prim_func
    def shared_kernel(X: T.Tensor((N,)), Y: T.Tensor((N,))):
        with T.Kernel(1, threads=32):
            kept = T.alloc_global((4,), "float32")
            T.clear(kept)
            for i in T.serial(N):
                kept[i % 4] = kept[i % 4] + X[i]
                Y[i] = kept[i % 4]

    return shared_kernel


def test_global_memory_of_the_kernels_own():
    x, y = torch.randn(40), torch.empty(40)
    compile_for_cpu(shared_by_programs(40))(x, y)
    torch.testing.assert_close(y, x.reshape(10, 4).cumsum(0).flatten())


def test_a_loop_keeps_the_bounds_that_it_started_with():
    """Its body changes what they are made of: a variable, and a tensor that may be the same memory as another."""

    @T.prim_func
    def bounded(X: T.Tensor((2,), "int32"), Y: T.Tensor((2,), "int32"), Z: T.Tensor((2, 12), "int32")):
        with T.Kernel(1, threads=32):
            start = T.alloc_var("int32")
            start = 3
            for i in T.serial(start, start + 6):
                Z[0, i] = Z[0, i] + 1
                start = start - 1
            for i in T.serial(X[0], X[1]):
                Z[1, i] = Z[1, i] + 1
                Y[1] = 5

    x, z = torch.tensor([2, 9], dtype=torch.int32), torch.zeros(2, 12, dtype=torch.int32)
    compile_for_cpu(bounded)(x, x, z)
    assert z.tolist() == [[0] * 3 + [1] * 6 + [0] * 3, [0] * 2 + [1] * 7 + [0] * 3]
    assert x.tolist() == [2, 5]


def test_tile_operations_at_places_that_they_overwrite():
    """Where a copy starts, and what a block is filled with, is in the block itself."""

    @T.prim_func
    def overwriting(X: T.Tensor((64,), "int32"), Y: T.Tensor((2, 8), "int32")):
        with T.Kernel(1, threads=32):
            ids = T.alloc_shared((8,), "int32")
            for i in T.serial(8):
                ids[i] = 5 + i
            T.copy(X[ids[0] : ids[0] + 8], ids)
            T.copy(ids, Y[0, 0:8])
            T.fill(ids, ids[0] * 2)
            T.copy(ids, Y[1, 0:8])

    x, y = torch.randperm(64).int(), torch.zeros(2, 8, dtype=torch.int32)
    compile_for_cpu(overwriting)(x, y)
    assert torch.equal(y, torch.stack([x[5:13], x[5].expand(8) * 2]))
