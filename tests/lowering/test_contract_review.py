"""Kernels that were once lowered to wrong results, each for a reason of its own: right, or refused."""

import itertools

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt

MESHES = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}]


def layouts(ndims, axes):
    """Every layout of buffers with so many dims that puts each axis on at most one dim."""
    options = [list(itertools.product(*[[None, *range(ndim)]] * len(axes))) for ndim in ndims.values()]
    for choice in itertools.product(*options):
        yield {name: dict(zip(axes, dims, strict=True)) for name, dims in zip(ndims, choice, strict=True)}


def check(func, inputs, expected):
    """Every layout on every mesh gives the expected outputs, or is refused when it is compiled."""
    params = {func.buffer_map[p].name: func.buffer_map[p] for p in func.params}
    ndims = {name: len(buffer.shape) for name, buffer in params.items()}
    outputs = [torch.zeros([int(s) for s in b.shape]) for b in list(params.values())[len(inputs) :]]
    for mesh in MESHES:
        points = list(layouts(ndims, list(mesh)))
        for shardings in points[:: max(1, len(points) // 16)]:
            try:
                compiled = mt.compile(mt.annotate(func, mt.Mesh(mesh), shardings), target="interpret", poison=True)
            except mt.MeshTensorError:
                continue
            result = compiled(*(t.clone() for t in (*inputs, *outputs)))
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, msg=lambda m, s=shardings: f"{s}\n{m}")


def accepted(func, mesh, shardings):
    """The factor kinds of a kernel that compiles."""
    mt.compile(mt.annotate(func, mt.Mesh(mesh), shardings), target="interpret")
    return mt.sharding_rule(func).factors


def test_a_buffer_that_only_one_iteration_fills_is_carried():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8, 4)), C: T.Tensor((8, 4))):
        with T.Kernel(1, threads=32):
            row = T.alloc_fragment((4,), "float32")
            for o in T.serial(8):
                for _ in T.serial(2):
                    if o == 0:
                        for i in T.Parallel(4):
                            row[i] = B[0, i]
                for i in T.Parallel(4):
                    C[o, i] = row[i] + A[o]

    a, b = torch.randn(8), torch.randn(8, 4)
    check(kernel, [a, b], b[0] + a[:, None])


def test_a_condition_on_a_bound_value_overwrites_a_part():
    @T.prim_func
    def kernel(A: T.Tensor((8, 4)), C: T.Tensor((8, 4))):
        with T.Kernel(1, threads=32):
            last = T.alloc_fragment((4,), "float32")
            T.clear(last)
            for o in T.serial(8):
                for i in T.Parallel(4):
                    v = A[o, i]
                    if v > 0.0:
                        last[i] = v
                for i in T.Parallel(4):
                    C[o, i] = last[i]

    a = torch.randn(8, 4)
    expected, last = torch.empty(8, 4), torch.zeros(4)
    for o in range(8):
        last = torch.where(a[o] > 0, a[o], last)
        expected[o] = last
    check(kernel, [a], expected)


def test_a_bound_value_outlives_the_buffer_it_came_from():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            s = T.alloc_fragment((1,), "float32")
            t = T.alloc_fragment((1,), "float32")
            for o in T.serial(8):
                s[0] = A[o]
                v = s[0]
                s[0] = 0.0
                t[0] = v
            C[0] = t[0]

    a = torch.randn(8)
    check(kernel, [a], a[-1:])


def test_an_accumulator_cleared_in_every_block_keeps_the_last_one():
    @T.prim_func
    def kernel(A: T.Tensor((8, 16)), B: T.Tensor((16, 8)), C: T.Tensor((8, 8))):
        with T.Kernel(1, threads=32):
            A_shared = T.alloc_shared((8, 4), "float32")
            B_shared = T.alloc_shared((4, 8), "float32")
            C_local = T.alloc_fragment((8, 8), "float32")
            for ko in T.serial(4):
                T.copy(A[0, ko * 4], A_shared)
                T.copy(B[ko * 4, 0], B_shared)
                T.gemm(A_shared, B_shared, C_local, clear_accum=True)
            T.copy(C_local, C)

    a, b = torch.randn(8, 16), torch.randn(16, 8)
    check(kernel, [a, b], a[:, 12:] @ b[12:])


def test_a_reduction_started_anew_in_every_block_keeps_the_last_one():
    @T.prim_func
    def kernel(A: T.Tensor((8, 16)), C: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((8, 4), "float32")
            total = T.alloc_fragment((8,), "float32")
            for ko in T.serial(4):
                T.copy(A[0, ko * 4], tile)
                T.reduce_sum(tile, total, dim=1)
            T.copy(total, C)

    a = torch.randn(8, 16)
    check(kernel, [a], a[:, 12:].sum(1))


def test_one_block_that_starts_its_accumulator_anew_is_split():
    @T.prim_func
    def kernel(A: T.Tensor((8, 16)), C: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((8, 16), "float32")
            total = T.alloc_fragment((8,), "float32")
            for ko in T.serial(1):
                T.copy(A[0, ko * 16], tile)
                T.reduce_sum(tile, total, dim=1)
            T.copy(total, C)

    a = torch.randn(8, 16)
    check(kernel, [a], a.sum(1))
    assert accepted(kernel, {"x": 2}, {"A": {"x": 1}}) == {"m": "parallel", "k": "sum"}


@pytest.mark.parametrize("dependent", [False, True])
def test_a_sum_repeated_by_another_loop_over_the_same_dim(dependent):
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            total = T.alloc_fragment((1,), "float32")
            here = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for o in T.serial(8):
                B[o] = A[o] * 2.0
                here[0] = A[o] if dependent else 1.0
                for k in T.serial(8):
                    total[0] += A[k] * here[0]
            T.copy(total, C)

    a = torch.randn(8)
    total = a.sum() * (a.sum() if dependent else 8.0)
    check(kernel, [a], (a * 2, total.reshape(1)))


def test_a_maximum_repeated_by_another_loop_over_the_same_dim():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            largest = T.alloc_fragment((1,), "float32")
            here = T.alloc_fragment((1,), "float32")
            T.fill(largest, -T.infinity("float32"))
            for o in T.serial(8):
                here[0] = A[o]
                B[o] = here[0]
                for k in T.serial(8):
                    largest[0] = T.max(largest[0], A[k] * here[0])
            T.copy(largest, C)

    a = torch.randn(8)
    check(kernel, [a], (a, torch.outer(a, a).max().reshape(1)))


def test_tiles_are_whole_blocks_at_every_level_of_a_split():
    @T.prim_func
    def kernel(A: T.Tensor((10,)), C: T.Tensor((10,))):
        with T.Kernel(T.ceildiv(10, 3), threads=32) as bx:
            for i in T.Parallel(3):
                C[bx * 3 + i] = A[bx * 3 + i] + T.cast(bx, "float32")

    a = torch.randn(10)
    check(kernel, [a], a + torch.arange(10) // 3)


def test_tiles_added_as_they_lie_do_not_add_their_padding():
    @T.prim_func
    def kernel(A: T.Tensor((7, 8)), C: T.Tensor((8,))):
        with T.Kernel(7, threads=32) as bx:
            T.atomic_add(C[0:8], A[bx, 0:8])

    a = torch.randn(7, 8)
    check(kernel, [a], a.sum(0))


def test_a_total_broadcast_over_the_dim_it_sums():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), D: T.Tensor((8,))):
        with T.Kernel(1, threads=32):
            values = T.alloc_fragment((8,), "float32")
            total = T.alloc_fragment((1,), "float32")
            everywhere = T.alloc_fragment((8,), "float32")
            T.copy(A, values)
            T.reduce_sum(values, total, dim=0)
            for k in T.Parallel(8):
                everywhere[k] = total[0]
            for k in T.Parallel(8):
                values[k] = values[k] - everywhere[k]
            T.copy(values, D)

    a = torch.randn(8)
    check(kernel, [a], a - a.sum())


def test_what_lies_past_the_end_survives_a_cut():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6)), W: T.Tensor((6, 5)), B: T.Tensor((5,)), C: T.Tensor((4,))):
        with T.Kernel(1, threads=32):
            bias = T.alloc_fragment((8,), "float32")
            A_shared = T.alloc_shared((4, 2), "float32")
            W_shared = T.alloc_shared((2, 8), "float32")
            scores = T.alloc_fragment((4, 8), "float32")
            largest = T.alloc_fragment((4,), "float32")
            for j in T.Parallel(8):
                bias[j] = T.if_then_else(j < 5, B[j] - 100.0, -1e30)
            T.clear(scores)
            for ko in T.serial(3):
                T.copy(A[0, ko * 2], A_shared)
                T.copy(W[ko * 2, 0], W_shared)
                T.gemm(A_shared, W_shared, scores)
            for i, j in T.Parallel(4, 8):
                scores[i, j] = T.min(scores[i, j] + bias[j], 0.0)
            T.reduce_max(scores, largest, dim=1)
            T.copy(largest, C)

    a, w, b = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)
    check(kernel, [a, w, b], (a @ w + b - 100).clamp_max(0).amax(1))


def test_an_index_into_a_whole_dim_stays_inside_where_the_tile_is_short():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8)), C: T.Tensor((8, 8)), D: T.Tensor((8, 8))):
        with T.Kernel(1, threads=32):
            for i in T.serial(8):
                for j in T.Parallel(8):
                    C[i, j] = A[i, j]
                for j in T.Parallel(8):
                    D[i, j] = A[j, i]

    a = torch.randn(8, 8)
    check(kernel, [a], (a, a.mT))


def test_a_while_loop_writes_its_output():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), C: T.Tensor((8,))):
        with T.Kernel(8, threads=32) as bx:
            n = T.alloc_var("int32", init=0)
            while n < 3:
                C[bx] = A[bx] + T.cast(n, "float32")
                n = n + 1

    a = torch.randn(8)
    check(kernel, [a], a + 2)
    assert list(mt.sharding_rule(kernel).outputs) == ["C"]


def test_elements_that_a_loop_may_leave_out_keep_their_content():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), C: T.Tensor((8,))):
        with T.Kernel(8, threads=32) as bx:
            for j in T.serial(bx):
                C[bx] = A[bx] + T.cast(j, "float32")

    a = torch.randn(8)
    expected = a + torch.arange(8) - 1
    expected[0] = 0
    check(kernel, [a], expected)


def test_an_atomic_that_gives_the_previous_value_writes():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), C: T.Tensor((8,)), D: T.Tensor((1,))):
        with T.Kernel(8, threads=32) as bx:
            previous = T.atomic_add(D[0], A[bx], return_prev=True)
            C[bx] = previous

    rule = mt.sharding_rule(kernel)
    assert list(rule.outputs) == ["C", "D"]
    assert all(kind.startswith("whole") for kind in rule.factors.values())


def test_an_output_whose_content_one_iteration_leaves_to_the_next():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            for i in T.serial(8):
                B[i] = A[i] + C[0]
                C[0] = 5.0

    a = torch.randn(8)
    expected = a + 5
    expected[0] = a[0]
    check(kernel, [a], (expected, torch.full((1,), 5.0)))


def test_an_output_that_every_iteration_changes():
    @T.prim_func
    def kernel(A: T.Tensor((8,)), B: T.Tensor((8,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            C[0] = 0.5
            for i in T.serial(8):
                B[i] = A[i]
                C[0] = C[0] * C[0] + 0.25

    a, c = torch.randn(8), 0.5
    for _ in range(8):
        c = c * c + 0.25
    check(kernel, [a], (a, torch.full((1,), c)))


def test_zero_times_infinity_past_a_tile_does_not_count():
    @T.prim_func
    def kernel(A: T.Tensor((12,)), B: T.Tensor((12,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            a = T.alloc_fragment((4,), "float32")
            b = T.alloc_fragment((4,), "float32")
            ratio = T.alloc_fragment((4,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for ko in T.serial(3):
                T.copy(A[ko * 4], a)
                T.copy(B[ko * 4], b)
                for i in T.Parallel(4):
                    ratio[i] = a[i] * (1.0 / b[i])
                T.reduce_sum(ratio, total, dim=0, clear=False)
            T.copy(total, C)

    a, b = torch.randn(12), torch.randn(12).abs() + 1
    check(kernel, [a, b], (a / b).sum().reshape(1))


def test_an_overflow_past_the_end_is_no_error():
    @T.prim_func
    def kernel(A: T.Tensor((10,)), C: T.Tensor((1,))):
        with T.Kernel(1, threads=32):
            a = T.alloc_fragment((4,), "float32")
            powers = T.alloc_fragment((4,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for ko in T.serial(3):
                for i in T.Parallel(4):
                    a[i] = T.if_then_else(ko * 4 + i < 10, A[ko * 4 + i], 1000.0)
                for i in T.Parallel(4):
                    powers[i] = T.if_then_else(ko * 4 + i < 10, T.exp(a[i]), 0.0 * T.exp(-T.exp(a[i])))
                T.reduce_sum(powers, total, dim=0, clear=False)
            T.copy(total, C)

    a = torch.randn(10)
    check(kernel, [a], a.exp().sum().reshape(1))


def test_loops_whose_length_depends_on_a_short_tile_stay_inside():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8)), C: T.Tensor((8,))):
        with T.Kernel(4, threads=32) as by:
            total = T.alloc_fragment((2,), "float32")
            T.clear(total)
            for k in T.serial((by + 1) * 2):
                for i in T.Parallel(2):
                    if k <= by * 2 + i:
                        total[i] += A[by * 2 + i, k]
            T.copy(total, C[by * 2])

    a = torch.randn(8, 8)
    check(kernel, [a], a.tril().sum(1))


def test_updates_past_the_end_that_change_nothing_do_not_keep_a_dim_whole():
    @T.prim_func
    def kernel(A: T.Tensor((5, 7)), C: T.Tensor((5,)), S: T.Tensor((1,))):
        with T.Kernel(3, threads=32) as by:
            tile = T.alloc_fragment((2, 2), "float32")
            total = T.alloc_fragment((2,), "float32")
            T.clear(total)
            for k in T.serial(4):
                T.copy(A[by * 2, k * 2], tile)
                for i, j in T.Parallel(2, 2):
                    tile[i, j] = tile[i, j] * T.cast(k + by, "float32")
                T.reduce_sum(tile, total, dim=1, clear=False)
            T.copy(total, C[by * 2])
            for i in T.serial(2):
                if by * 2 + i < 5:
                    T.atomic_add(S[0], total[i])

    a = torch.randn(5, 7)
    total = (a * (torch.arange(7) // 2 + torch.arange(5)[:, None] // 2)).sum(1)
    check(kernel, [a], (total, total.sum().reshape(1)))
    assert accepted(kernel, {"x": 2}, {"A": {"x": 0}}) == {"m": "sum", "k": "sum"}


@pytest.mark.parametrize("axis", ["data parallel", "for", "2d", "x-y", "µ", "int"])
def test_axes_may_have_any_name(axis):
    @T.prim_func
    def kernel(A: T.Tensor((6, 7)), C: T.Tensor((6,))):
        with T.Kernel(6, threads=32) as bx:
            C[bx] = T.cast(bx, "float32")
            for j in T.serial(7):
                C[bx] += A[bx, j]

    a = torch.randn(6, 7)
    func = mt.annotate(kernel, mt.Mesh({axis: 2}), {"A": {axis: 0}, "C": {axis: 0}})
    assert mt.lower(func).script()
    result = mt.compile(func, target="c")(a, torch.zeros(6))
    torch.testing.assert_close(result, a.sum(1) + torch.arange(6))
