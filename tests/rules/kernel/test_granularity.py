"""Dims of which one is walked in groups of another's: nothing moves where axes split both at the borders of groups."""

import math
from itertools import product

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.neighbourhoods import upsample, upsample_reference
from kernels.quantized import dequantize, dequantize_reference, packed_matmul, packed_matmul_reference
from tests.lowering.every_layout import check
from tests.lowering.support import lowered, outline, run
from tests.other_machines import machine

B, H, G, S, D, BLOCK = 2, 8, 2, 20, 8, 8


def grouped_attention(heads=H, group=G, block=BLOCK):
    """softmax(q k^T) v, in which `group` query heads share a key head."""

    @T.prim_func
    def main(
        Q: T.Tensor((B, heads, S, D), "float32"),
        K: T.Tensor((B, heads // group, S, D), "float32"),
        V: T.Tensor((B, heads // group, S, D), "float32"),
        O: T.Tensor((B, heads, S, D), "float32"),  # noqa: E741
    ):
        with T.Kernel(T.ceildiv(S, block), heads, B, threads=32) as (bx, by, bz):
            q = T.alloc_shared((block, D), "float32")
            k = T.alloc_shared((S, D), "float32")
            v = T.alloc_shared((S, D), "float32")
            scores = T.alloc_fragment((block, S), "float32")
            largest, total = T.alloc_fragment((block,), "float32"), T.alloc_fragment((block,), "float32")
            out = T.alloc_fragment((block, D), "float32")
            T.copy(Q[bz, by, bx * block, 0], q)
            T.copy(K[bz, by // group, 0, 0], k)
            T.copy(V[bz, by // group, 0, 0], v)
            T.clear(scores)
            T.gemm(q, k, scores, transpose_B=True)
            T.reduce_max(scores, largest, dim=1)
            for i, j in T.Parallel(block, S):
                scores[i, j] = T.exp(scores[i, j] - largest[i])
            T.reduce_sum(scores, total, dim=1)
            for i, j in T.Parallel(block, S):
                scores[i, j] /= total[i]
            T.clear(out)
            T.gemm(scores, v, out)
            T.copy(out, O[bz, by, bx * block, 0])

    return main


def attended(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return torch.softmax(q @ k.mT, -1) @ v


def tensors(heads=H, group=G):
    torch.manual_seed(0)
    return [torch.randn(B, count, S, D) for count in (heads, heads // group, heads // group)]


HEADS = {name: {"x": 1} for name in "QKVO"}


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}])
def test_query_heads_that_share_key_heads(mesh):
    made = lowered(grouped_attention(), mesh, HEADS)
    assert outline(made) == ["kernel(Q, K, V, O)"]
    assert [dim for dim, *_ in made.rule.inputs.values()] == ["c", "c", "c"]
    assert made.rule.inputs["Q"][1] == "(d e)"
    assert made.rule.inputs["K"][1] == "d"
    torch.testing.assert_close(run(grouped_attention(), mesh, HEADS, *tensors()), attended(*tensors()))


def test_several_axes():
    mesh, heads = {"x": 2, "y": 2}, {name: {"x": 1, "y": 1} for name in "QKVO"}
    assert outline(lowered(grouped_attention(), mesh, heads)) == ["kernel(Q, K, V, O)"]
    torch.testing.assert_close(run(grouped_attention(), mesh, heads, *tensors()), attended(*tensors()))
    batch = {name: {"x": 1, "y": 0} for name in "QKVO"}
    assert outline(lowered(grouped_attention(), mesh, batch)) == ["kernel(Q, K, V, O)"]
    torch.testing.assert_close(run(grouped_attention(), mesh, batch, *tensors()), attended(*tensors()))


@pytest.mark.parametrize(("mesh", "heads"), [({"x": 3}, 8), ({"x": 8}, 8), ({"x": 2}, 6), ({"x": 4}, 12)])
def test_groups_that_axes_do_not_divide(mesh, heads):
    """Tiles of the two would not hold the same groups: what is shared is gathered, as before."""
    func, given = grouped_attention(heads), tensors(heads)
    steps = outline(lowered(func, mesh, HEADS))
    divides = heads // G % mesh["x"] == 0
    assert (steps == ["kernel(Q, K, V, O)"]) == divides
    torch.testing.assert_close(run(func, mesh, HEADS, *given), attended(*given))


def test_attention_in_every_layout():
    check(grouped_attention(), tensors(), attended(*tensors()))


def scaled(rows=24, columns=64, group=16, block=8):
    """Every group of a row has a scale."""

    @T.prim_func
    def main(
        X: T.Tensor((rows, columns), "float32"),
        W: T.Tensor((rows, columns // group), "float32"),
        Y: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(columns // group, T.ceildiv(rows, block), threads=32) as (bx, by):
            for i, j in T.Parallel(block, group):
                Y[by * block + i, bx * group + j] = X[by * block + i, bx * group + j] * W[by * block + i, bx]

    return main


def block_scaled_product(m=16, n=24, k=64, group=16):
    """A product whose left operand has a scale per group of what is summed over."""

    @T.prim_func
    def main(
        A: T.Tensor((m, k), "float32"),
        W: T.Tensor((m, k // group), "float32"),
        C: T.Tensor((k, n), "float32"),
        Y: T.Tensor((m, n), "float32"),
    ):
        with T.Kernel(T.ceildiv(n, 8), T.ceildiv(m, 8), threads=32) as (bx, by):
            a, b = T.alloc_shared((8, group), "float32"), T.alloc_shared((group, 8), "float32")
            total = T.alloc_fragment((8, 8), "float32")
            T.clear(total)
            for ko in T.serial(k // group):
                for i, j in T.Parallel(8, group):
                    a[i, j] = A[by * 8 + i, ko * group + j] * W[by * 8 + i, ko]
                T.copy(C[ko * group, bx * 8], b)
                T.gemm(a, b, total)
            T.copy(total, Y[by * 8, bx * 8])

    return main


def test_scales_of_groups():
    x, w = torch.randn(24, 64), torch.randn(24, 4)
    columns = {name: {"x": 1} for name in "XWY"}
    assert outline(lowered(scaled(), {"x": 2}, columns)) == ["kernel(X, W, Y)"]
    check(scaled(), [x, w], x * w.repeat_interleave(16, 1))


def test_scales_of_groups_that_are_summed_over():
    a, w, c = torch.randn(16, 64), torch.randn(16, 4), torch.randn(64, 24)
    split = {"A": {"x": 1}, "W": {"x": 1}, "C": {"x": 0}}
    made = outline(lowered(block_scaled_product(), {"x": 2}, split))
    assert [step.partition("(")[0] for step in made] == ["kernel", "all_reduce"]
    check(block_scaled_product(), [a, w, c], (a * w.repeat_interleave(16, 1)) @ c)


def test_positions_that_are_values_too():
    """A head's slope, and a table of a group's members: global positions, whatever is split."""

    @T.prim_func
    def main(
        X: T.Tensor((8, 6), "float32"),
        W: T.Tensor((4, 6), "float32"),
        P: T.Tensor((2, 6), "float32"),
        Y: T.Tensor((8, 6), "float32"),
    ):
        with T.Kernel(8, threads=32) as by:
            for j in T.Parallel(6):
                Y[by, j] = X[by, j] * W[by // 2, j] + P[by % 2, j] * T.Cast("float32", by) + T.Cast("float32", by // 2)

    x, w, p = torch.randn(8, 6), torch.randn(4, 6), torch.randn(2, 6)
    heads = torch.arange(8.0)[:, None]
    expected = x * w.repeat_interleave(2, 0) + p.repeat(4, 1) * heads + heads.div(2, rounding_mode="floor")
    split = {"X": {"x": 0}, "W": {"x": 0}, "Y": {"x": 0}}
    assert outline(lowered(main, {"x": 4}, split)) == ["kernel(X, W, P, Y)"]
    torch.testing.assert_close(run(main, {"x": 4}, split, x, w, p), expected)
    check(main, [x, w, p], expected)


def test_what_groups_sum_up():
    """The gradient of a shared head: members of a group add to one place."""

    @T.prim_func
    def main(X: T.Tensor((8, 6), "float32"), W: T.Tensor((4, 6), "float32")):
        with T.Kernel(8, threads=32) as by:
            for j in T.Parallel(6):
                T.atomic_add(W[by // 2, j], X[by, j])

    x, start = torch.randn(8, 6), torch.randn(4, 6)
    expected = start + x.reshape(4, 2, 6).sum(1)
    assert outline(lowered(main, {"x": 2}, {"X": {"x": 0}, "W": {"x": 0}})) == ["kernel(X, W)"]
    for mesh, x_dim, w_dim in [
        ({"x": 2}, 0, 0),
        ({"x": 4}, 0, 0),
        ({"x": 3}, 0, 0),
        ({"x": 2}, 0, 1),
        ({"x": 2}, 1, 0),
    ]:
        result = run(main, mesh, {"X": {"x": x_dim}, "W": {"x": w_dim}}, x, start.clone())
        torch.testing.assert_close(result, expected)


def test_one_of_each_group():
    """A device reads every second element of its own tile."""

    @T.prim_func
    def main(X: T.Tensor((64,), "float32"), Y: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                Y[bx * 8 + i] = X[(bx * 8 + i) * 2]

    x = torch.randn(64)
    assert outline(lowered(main, {"x": 4}, {"X": {"x": 0}, "Y": {"x": 0}})) == ["kernel(X, Y)"]
    check(main, [x], x[::2])


def test_two_lengths_of_groups():
    """What is walked in groups of 2 and of 4 stays whole; the results are right."""

    @T.prim_func
    def main(
        X: T.Tensor((8, 6), "float32"),
        W: T.Tensor((4, 6), "float32"),
        P: T.Tensor((2, 6), "float32"),
        Y: T.Tensor((8, 6), "float32"),
    ):
        with T.Kernel(8, threads=32) as by:
            for j in T.Parallel(6):
                Y[by, j] = X[by, j] * W[by // 2, j] + P[by // 4, j]

    x, w, p = torch.randn(8, 6), torch.randn(4, 6), torch.randn(2, 6)
    check(main, [x, w, p], x * w.repeat_interleave(2, 0) + p.repeat_interleave(4, 0))


def test_groups_that_only_a_part_of_the_kernel_splits():
    """The sum over y cuts the kernel; the first part alone walks X in the groups of W, which 3 devices don't divide."""

    @T.prim_func
    def main(X: T.Tensor((8,), "float32"), W: T.Tensor((4, 6), "float32"), Z: T.Tensor((4,), "float32")):
        with T.Kernel(8, threads=32) as by:
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for j in T.serial(6):
                total[0] += X[by] * W[by // 2, j]
            T.atomic_add(Z[by // 2], T.exp(total[0]) * X[7 - by])

    x, w = torch.randn(8), torch.randn(4, 6)
    expected = ((x[:, None] * w.repeat_interleave(2, 0)).sum(1).exp() * x.flip(0)).reshape(4, 2).sum(1)
    for mesh in ({"x": 2, "y": 2}, {"x": 3, "y": 2}):
        result = run(main, mesh, {"W": {"x": 0, "y": 1}}, x, w, torch.zeros(4))
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_groups_in_another_order():
    """Heads of one group are not beside each other: `by % 4` is the key head."""

    @T.prim_func
    def main(X: T.Tensor((8, 6), "float32"), W: T.Tensor((4, 6), "float32"), Y: T.Tensor((8, 6), "float32")):
        with T.Kernel(8, threads=32) as by:
            for j in T.Parallel(6):
                Y[by, j] = X[by, j] * W[by % 4, j]

    x, w = torch.randn(8, 6), torch.randn(4, 6)
    check(main, [x, w], x * w.repeat(2, 1))


def test_compiled():
    given = tensors()
    kernel = mt.compile(mt.annotate(grouped_attention(), {"x": 2}, HEADS), target="c")
    torch.testing.assert_close(kernel(*given), attended(*given), rtol=1e-4, atol=1e-5)


def test_bytes():
    """What the expert sends: nothing, at any size."""
    made = lowered(grouped_attention(32, 4), {"x": 8}, HEADS)
    assert outline(made) == ["kernel(Q, K, V, O)"]
    assert math.prod(made.tensors["K"].sharding.tile_shape((B, 8, S, D))) == B * S * D


BYTES = torch.randint(0, 256, (13, 64), dtype=torch.uint8)
SCALES, ZEROS, LEFT = torch.rand(13, 8) + 0.5, torch.rand(13, 8), torch.randn(10, 128)


def test_two_numbers_in_a_byte():
    """Numbers, the bytes that hold them, and scales are walked in blocks of 16, 8 and 1."""
    func, expected = dequantize(13, 128, 16, 4), dequantize_reference(BYTES, SCALES, ZEROS)
    columns = {name: {"x": 1} for name in ("B", "scale", "zero", "W")}
    for devices in (2, 4, 8):
        assert outline(lowered(func, {"x": devices}, columns, strict=True)) == ["kernel(B, scale, zero, W)"]
        torch.testing.assert_close(run(func, {"x": devices}, columns, BYTES, SCALES, ZEROS), expected)
    with machine(1):
        check(func, [BYTES, SCALES, ZEROS], expected)


def test_a_product_of_numbers_in_bytes():
    func, expected = packed_matmul(10, 13, 128, 4, 4, 16), packed_matmul_reference(LEFT, BYTES)
    with machine(1):
        steps = outline(lowered(func, {"x": 4}, {"A": {"x": 1}, "B": {"x": 1}}))
        assert steps == ["kernel(A, B, C)", "all_reduce(C, sum, x)"]
        for layouts in ({"A": {"x": 1}, "B": {"x": 1}}, {"A": {"x": 1}}, {"B": {"x": 1}, "C": {"x": 1}}):
            for devices in (2, 3, 8):
                out = run(func, {"x": devices}, layouts, LEFT, BYTES)
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)


def lookahead(blocks=8, long=6, short=3, shift=0):
    """Blocks of A beside blocks of B of another length, whose numbers a loop walks; B's from another block on."""

    @T.prim_func
    def main(
        A: T.Tensor((blocks * long,), "float32"),
        B: T.Tensor((blocks * short,), "float32"),
        C: T.Tensor((blocks * long,), "float32"),
    ):
        with T.Kernel(blocks, threads=32) as bx:
            b = T.alloc_fragment((short,), "float32")
            T.copy(B[((bx + shift) % blocks if shift else bx) * short], b)
            for i in T.Parallel(long):
                C[bx * long + i] = A[bx * long + i] * b[i * short // long] + b[(i + 1) % short]

    return main


@pytest.mark.parametrize(("long", "short", "shift"), [(6, 3, 0), (6, 4, 0), (5, 5, 0), (3, 7, 0), (6, 3, 1)])
def test_blocks_of_different_lengths(long, short, shift):
    func, a, b = lookahead(8, long, short, shift), torch.randn(8 * long), torch.randn(8 * short)
    rows, i = b.reshape(8, short).roll(-shift, 0), torch.arange(long)
    expected = (a.reshape(8, long) * rows[:, i * short // long] + rows[:, (i + 1) % short]).flatten()
    split = {name: {"x": 0} for name in "ABC"}
    steps = outline(lowered(func, {"x": 2}, split))
    assert (steps == ["kernel(A, B, C)"]) == (shift == 0)
    with machine(1):
        check(func, [a, b], expected, [{"x": 2}, {"x": 3}])


def test_dims_that_are_no_whole_blocks_are_not_taken_apart():
    """A block reaches past the end of D, which has a single element."""

    @T.prim_func
    def main(
        B: T.Tensor((1,), "int32"), D: T.Tensor((1,), "int32"), F: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")
    ):
        with T.Kernel(1, threads=32):
            total, tile = T.alloc_fragment((4,), "int32"), T.alloc_fragment((4,), "int32")
            T.clear(total)
            for k in T.serial(1):
                T.copy(B[k], tile)
                for i in T.Parallel(4):
                    tile[i] = T.if_then_else(D[k * 4 + i] <= 1, tile[i], B[i])
                for i in T.Parallel(4):
                    total[i] += tile[i]
            for i in T.Parallel(4):
                total[i] = T.if_then_else(i == 1, total[i], F[i])
            T.copy(total, Y[0])

    b, d = torch.tensor([5], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    f = torch.arange(4, dtype=torch.int32)
    func = mt.annotate(main, {"x": 2}, {"D": {"x": 0}, "F": {"x": 0}})
    result = mt.compile(func, target="interpret")(b, d, f)
    assert result.tolist() == [0, 0, 2, 3]


def rotated_pairs(rows=4, width=6):
    """Each element with its neighbour, turned by the pair's angle."""

    @T.prim_func
    def kernel(
        X: T.Tensor((rows, 2 * width)), C: T.Tensor((width,)), S: T.Tensor((width,)), Y: T.Tensor((rows, 2 * width))
    ):
        with T.Kernel(rows, threads=32) as b:
            for j in T.Parallel(2 * width):
                Y[b, j] = T.if_then_else(
                    j % 2 == 0,
                    X[b, j] * C[j // 2] - X[b, j + 1] * S[j // 2],
                    X[b, j] * C[j // 2] + X[b, j - 1] * S[j // 2],
                )

    return kernel


def products_of_pairs(rows=4, width=6):
    @T.prim_func
    def kernel(X: T.Tensor((rows, 2 * width), "float32"), Y: T.Tensor((rows,), "float32")):
        with T.Kernel(1, threads=32):
            total = T.alloc_fragment((rows,), "float32")
            T.clear(total)
            for k in T.serial(0, 2 * width, 2):
                for i in T.Parallel(rows):
                    total[i] += X[i, k] * X[i, k + 1]
            T.copy(total, Y)

    return kernel


def test_loops_in_a_program_that_walk_groups():
    x, y = torch.randn(4, 6), torch.randn(4, 12)
    cos, sin = torch.randn(6), torch.randn(6)
    even, odd = y[:, ::2], y[:, 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(4, 12)
    everywhere = {"X": {"x": 1}, "Y": {"x": 1}}
    for func, layouts, given, expected, sent in (
        (upsample(4, 6), {"A": {"x": 1}, "out": {"x": 1}}, [x], upsample_reference(x), []),
        (rotated_pairs(), {**everywhere, "C": {"x": 0}, "S": {"x": 0}}, [y, cos, sin], turned, []),
        (products_of_pairs(), {"X": {"x": 1}}, [y], (even * odd).sum(1), ["all_reduce(Y, sum, x)"]),
    ):
        with machine(1):
            for devices in (2, 3):
                assert outline(lowered(func, {"x": devices}, layouts))[1:] == sent
            check(func, given, expected, [{"x": 3}, {"x": 4}, {"x": 2, "y": 2}])


def halves_of_chunks(first=0):
    """`Y` of the second half of every chunk of 8 takes the mean of the first half, and has what it was in that.
    `first`: where in its chunk a half starts; with 4 more, the second is the next chunk's."""

    @T.prim_func
    def kernel(X: T.Tensor((32, 4)), Y: T.Tensor((32, 4))):
        with T.Kernel(4, threads=32) as b:
            low = T.alloc_shared((4, 4), "float32")
            high = T.alloc_shared((4, 4), "float32")
            mean = T.alloc_fragment((4,), "float32")
            start = b * 8
            T.copy(X[start, 0], low)
            T.clear(high)
            if start + 4 + first < 32:
                T.copy(X[start + 4 + first, 0], high)
            T.reduce_sum(low, mean, dim=0)
            for i, j in T.Parallel(4, 4):
                high[i, j] -= mean[j] / 4.0
            T.copy(low, Y[start, 0])
            T.copy(high, Y[start + 4, 0])

    return kernel


def halves_of_chunks_reference(x, first=0):
    chunks = x.view(4, 8, 4)
    high = chunks[:, 4:] if not first else torch.cat([chunks[1:, :4], torch.zeros(1, 4, 4)])
    return torch.cat([chunks[:, :4], high - chunks[:, :4].mean(1, keepdim=True)], 1).reshape(32, 4)


@pytest.mark.parametrize(("devices", "first"), [(2, 0), (4, 0), (3, 0), (2, 4), (8, 0)])
def test_parts_of_chunks(devices, first):
    """Nothing moves where devices have whole chunks and all of a chunk's parts are its own."""
    x, func, split = torch.randn(32, 4), halves_of_chunks(first), {"X": {"x": 0}, "Y": {"x": 0}}
    moved = outline(lowered(func, {"x": devices}, split)) != ["kernel(X, Y)"]
    assert moved is (devices in (3, 8) or first == 4)
    torch.testing.assert_close(run(func, {"x": devices}, split, x), halves_of_chunks_reference(x, first))


def test_blocks_that_threads_index_have_no_chunks():
    @T.prim_func
    def main(A: T.Tensor((8, 32), "float32"), C: T.Tensor((8,), "float32")):
        with T.Kernel(2, threads=4) as bx:
            thread = T.get_thread_binding(0)
            c = T.alloc_local((1,), "float32")
            T.clear(c)
            for ko in T.serial(2):
                for i in T.serial(16):
                    c[0] += A[bx * 4 + thread, ko * 16 + i]
            C[bx * 4 + thread] = c[0]

    with pytest.raises(mt.MeshTensorError, match="the thread index 'thread'"):
        mt.compile(mt.annotate(main, mt.Mesh({"x": 2}), {"A": {"x": 0}}), target="interpret")(torch.ones(8, 32))


def scaled_chunks(block, first=0):
    """`Y` has the rows of `X` times their chunk's number in `S`, for chunks of 8 rows, in blocks of `block`, from block
    `first` on."""

    @T.prim_func
    def kernel(X: T.Tensor((32, 4)), S: T.Tensor((4,)), Y: T.Tensor((32, 4))):
        with T.Kernel(4, threads=32) as chunk:
            rows = T.alloc_shared((block, 4), "float32")
            for k in T.serial(first, 8 // block):
                T.copy(X[chunk * 8 + k * block, 0], rows)
                for i, j in T.Parallel(block, 4):
                    rows[i, j] *= S[chunk]
                T.copy(rows, Y[chunk * 8 + k * block, 0])

    return kernel


@pytest.mark.parametrize(("block", "first"), [(8, 0), (4, 0), (4, 1)])
def test_chunks_of_one_block_or_several(block, first):
    """Nothing moves where devices have whole chunks, and it is said of one per chunk alone who has it."""
    x, s, func = torch.randn(32, 4), torch.randn(4), scaled_chunks(block, first)
    wanted = x.view(4, 8, 4) * s.view(4, 1, 1)
    wanted[:, : first * block] = 7.0
    for devices, split in product((2, 4, 3), "SXY"):
        layouts = {split: {"x": 0}}
        if split == "S":
            with machine(1):
                moved = outline(lowered(func, {"x": devices}, layouts)) != ["kernel(X, S, Y)"]
            assert moved is (devices == 3)
        result = run(func, {"x": devices}, layouts, x, s, torch.full((32, 4), 7.0))
        torch.testing.assert_close(result, wanted.reshape(32, 4))
