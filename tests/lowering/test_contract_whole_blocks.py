"""Kernels that depend on where their blocks start, of dims that axes don't split into whole blocks: tiles are made of
whole blocks first, and what comes of them goes back."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels import quantized, sparse
from kernels.convolution import convolution_2d, convolution_2d_reference
from kernels.flash_attention import flash_attention, flash_attention_reference
from kernels.grouped_query import grouped_decode, grouped_decode_reference
from kernels.indexer import index_scores, index_scores_reference
from kernels.linear_attention import (
    linear_attention,
    linear_attention_reference,
    value_gradient,
    value_gradient_reference,
)
from kernels.neighbourhoods import sliding_attention, sliding_attention_reference
from kernels.schedules import causal_product
from tests.kernels.adversarial.grids import grouped_matmul, persistent_matmul
from tests.other_machines import machine
from tests.random_compositions.strategy import make_case as make_composition
from tests.random_kernels.check import run as outcome_of
from tests.random_kernels.strategy import make_case

from .every_layout import check
from .support import lowered, outline, run

ROWS = {"S": {"x": 0}, "C": {"x": 0}}
S, V = torch.randn(30, 30), torch.randn(30, 6)


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"x": 5}])
@pytest.mark.parametrize("start", ["row", "zero"])
def test_rows_with_bounds_of_their_own(start, axes):
    """30 rows are tiles of 15, 10 or 6, and of 16, 12 or 8 in blocks of 4: the last ones are short, or empty."""
    func, expected = causal_product(30, 6, 4, start), (S.triu() if start == "row" else S.tril()) @ V
    assert outline(lowered(func, axes, ROWS, strict=True)) == ["halo(S, x)", "kernel(S.1, V, C)", "halo(C, x)"]
    torch.testing.assert_close(run(func, axes, ROWS, S, V), expected, rtol=1e-5, atol=1e-5)


def test_both_over_two_axes():
    """What is partial is completed in tiles of whole blocks, before their rows go back."""
    func, axes = causal_product(30, 6, 4), {"x": 2, "y": 2}
    layouts = {"S": {"x": 0, "y": 1}, "V": {"y": 0}, "C": {"x": 0}}
    assert outline(lowered(func, axes, layouts, strict=True)) == [
        "halo(S, x, y)",
        "halo(V, y)",
        "kernel(S.1, V.1, C)",
        "all_reduce(C, sum, y)",
        "halo(C.1, x)",
    ]
    with machine(1):
        check(func, [S, V], S.triu() @ V, [{"x": 3}, {"x": 2, "y": 2}])


def test_blocks_of_rows_and_windows_of_columns():
    """One tensor has both: rows in whole blocks along one axis, columns with what is next to them along the other."""

    @T.prim_func
    def pairs(X: T.Tensor((10, 7), "float32"), scale: T.Tensor((3,), "float32"), Y: T.Tensor((10, 6), "float32")):
        with T.Kernel(3, threads=32) as b:
            total = T.alloc_fragment((1,), "float32")
            total[0] = 0.0
            for k in T.serial(b + 1):
                total[0] = total[0] + scale[k]
            for i, j in T.Parallel(4, 6):
                if b * 4 + i < 10:
                    Y[b * 4 + i, j] = (X[b * 4 + i, j] + X[b * 4 + i, j + 1]) * total[0]

    x, scale, layouts = torch.randn(10, 7), torch.randn(3), {name: {"x": 0, "y": 1} for name in "XY"}
    made = lowered(pairs, {"x": 2, "y": 2}, layouts, strict=True)
    assert str(made.tensors["X.1"].sharding) == "S[0], S[1]; W[1](6, 1, 0, 4); B[0]4"
    expected = (x[:, :-1] + x[:, 1:]) * scale.cumsum(0).repeat_interleave(4)[:10, None]
    torch.testing.assert_close(run(pairs, {"x": 2, "y": 2}, layouts, x, scale), expected)


def test_two_axes_over_one_dim():
    func, axes = causal_product(30, 6, 4), {"x": 2, "y": 2}
    layouts = {"S": {"x": 0, "y": 0}, "C": {"x": 0, "y": 0}}
    assert "halo(S, x, y)" in outline(lowered(func, axes, layouts, strict=True))
    torch.testing.assert_close(run(func, axes, layouts, S, V), S.triu() @ V, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("func", [persistent_matmul(30, 31, 16, 4, 5), grouped_matmul(30, 31, 16, 4, 2)])
def test_blocks_in_another_order(func):
    a, b = torch.randn(30, 16), torch.randn(16, 31)
    with machine(1):
        assert "all_gather" not in str(outline(lowered(func, {"x": 3}, {"A": {"x": 0}, "C": {"x": 0}})))
        check(func, [a, b], a @ b, [{"x": 3}])


def first_largest(M, N, block, asks):
    """Where the largest of every row first is; the row's end is asked for in a condition of its own, or in the same."""

    @T.prim_func
    def largest(A: T.Tensor((M, N), "float32"), At: T.Tensor((M,), "int32")):
        with T.Kernel(M, threads=32) as row:
            best = T.alloc_fragment((1,), "float32")
            place = T.alloc_fragment((1,), "int32")
            T.fill(best, -T.infinity("float32"))
            T.fill(place, 0)
            for k in T.serial(T.ceildiv(N, block)):
                for i in T.Parallel(1):
                    for j in T.serial(block):
                        if asks == "first":
                            if k * block + j < N:  # noqa: SIM102  (two conditions)
                                if A[row, k * block + j] > best[i]:
                                    best[i] = A[row, k * block + j]
                                    place[i] = k * block + j
                        elif k * block + j < N and A[row, k * block + j] > best[i]:
                            best[i] = A[row, k * block + j]
                            place[i] = k * block + j
            At[row] = place[0]

    return largest


@pytest.mark.parametrize(("columns", "asks"), [(32, "also"), (30, "also"), (30, "first")])
def test_states_of_blocks(columns, asks):
    """Tiles of 11 and 10 columns, none of which is whole blocks of 4; the last block may be short."""
    func, a = first_largest(5, columns, 4, asks), torch.randint(0, 9, (5, columns)).float() - 9
    found = run(func, {"x": 3}, {"A": {"x": 1}}, a)
    torch.testing.assert_close(found, a.argmax(1).to(torch.int32))
    steps = outline(lowered(func, {"x": 3}, {"A": {"x": 1}}, strict=True))
    assert steps[0] == "halo(A, x)"
    assert "all_gather(A, dim 1, x)" not in steps


def test_what_would_move_more_is_gathered():
    """15 rows in blocks of 8 over 4 devices are the first two's: the rows of C that the others lack are more than S."""
    rows, v = {"C": {"x": 0}, "S": {"x": 0}}, torch.randn(15, 600)
    func, s = causal_product(15, 600, 8), torch.randn(15, 15)
    assert outline(lowered(func, {"x": 4}, rows)) == [
        "all_gather(S, dim 0, x)",
        "kernel(S.1, V, C)",
        "slice(C, dim 0, x)",
    ]
    torch.testing.assert_close(run(func, {"x": 4}, rows, s, v), s.triu() @ v, rtol=1e-4, atol=1e-4)


def added_product(rows, dim, block):
    """`C += triu(S) @ V`, in blocks of rows."""

    @T.prim_func
    def added(
        S: T.Tensor((rows, rows), "float32"), V: T.Tensor((rows, dim), "float32"), C: T.Tensor((rows, dim), "float32")
    ):
        with T.Kernel(T.ceildiv(rows, block), threads=32) as by:
            s = T.alloc_shared((block, block), "float32")
            v = T.alloc_shared((block, dim), "float32")
            total = T.alloc_fragment((block, dim), "float32")
            T.copy(C[by * block, 0], total)
            for k in T.serial(by, T.ceildiv(rows, block)):
                T.copy(S[by * block, k * block], s)
                T.copy(V[k * block, 0], v)
                for i, j in T.Parallel(block, block):
                    s[i, j] = T.if_then_else(k * block + j >= by * block + i, s[i, j], 0)
                T.gemm(s, v, total)
            T.copy(total, C[by * block, 0])

    return added


@pytest.mark.parametrize("target", ["c", "interpret"])
def test_what_is_updated_in_place(target):
    """What was there counts once, and the tensor that is given holds the result."""
    c = torch.randn(30, 6)
    expected = c + S.triu() @ V
    kernel = mt.compile(mt.annotate(added_product(30, 6, 4), mt.Mesh({"x": 3}), ROWS), target=target)
    torch.testing.assert_close(kernel(S, V, c), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5)


def test_a_part_that_depends_on_blocks_where_the_whole_does_not():
    """What axes split of the whole kernel they split of its parts, in whole blocks or not."""
    assert outcome_of(make_case(7820056)).verdict == "right"


@pytest.mark.parametrize("axes", [{"x": 3}, {"x": 4, "y": 2}])
def test_channels_need_no_whole_blocks(axes):
    """Blocks of 8 of 20 channels, and of 9 positions, are two loops: tiles of 7 or 5 channels stay where they are."""
    layouts = {"data": {"x": 3}, "kernel": {"x": 2}}
    big = mt.annotate(convolution_2d(16, 64, 32, 32, 128), mt.Mesh({"x": 4}), layouts)
    received = sum(step.bytes for step in mt.compile(big, target="interpret").program.steps)
    assert received == 2 * 3 * (16 * 32 * 32 * 128) * 4 // 4  # a ring all-reduce of the result
    func = convolution_2d(2, 20, 5, 6, 8, block_M=8, block_N=4, block_K=10)
    data, kernel = torch.randn(2, 5, 6, 20), torch.randn(3, 3, 20, 8)
    found = run(func, axes, layouts, data, kernel)
    torch.testing.assert_close(found, convolution_2d_reference(data, kernel), rtol=1e-4, atol=1e-4)
    assert "halo" not in str(outline(lowered(func, axes, layouts)))


# -- what is read around blocks, and chunks ---------------------------------------------------------------------------


def inputs_of(func, below=4):
    """Random inputs of a kernel, after which its outputs come; whole numbers are 0 .. below - 1."""
    buffers = [func.buffer_map[param] for param in func.params][: -len(mt.sharding_rule(func).outputs)]
    shapes = [([int(size) for size in buffer.shape], buffer.dtype) for buffer in buffers]
    draw = {
        "float32": torch.randn,
        "bool": lambda *shape: torch.rand(shape) > 0.4,
        "int32": lambda *shape: torch.randint(0, below, shape, dtype=torch.int32),
        "uint8": lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8),
    }
    return [draw[dtype](*shape) for shape, dtype in shapes]


ROW_KERNELS = {
    "masks of blocks": (
        sparse.block_sparse_matmul(40, 24, 16, 8, 8, 8),
        {"A": 0, "mask": 0, "C": 0},
        lambda *tensors: sparse.block_sparse_matmul_reference(*tensors, 8),
    ),
    "groups of blocks": (
        sparse.padded_grouped_matmul(4, 40, 24, 16, 8, 8, 8),
        {"A": 0, "group_of": 0, "C": 0},
        lambda *tensors: sparse.padded_grouped_matmul_reference(*tensors, 8),
    ),
    "scales of blocks": (
        quantized.block_scaled_matmul(24, 48, 64, group=16, block_M=8, block_N=8),
        {"B": 0, "B_scale": 0, "C": 1},
        quantized.block_scaled_matmul_reference,
    ),
    "two numbers in a byte": (
        quantized.dequantize(8, 80, group=16, block_N=16),
        {"B": 1, "scale": 1, "zero": 1, "W": 1},
        quantized.dequantize_reference,
    ),
    "what is near": (
        sliding_attention(72, 8, 16, block=8, bounds=True),
        {"Q": 0, "K": 0, "V": 0, "Out": 0},
        lambda *tensors: sliding_attention_reference(*tensors, 16),
    ),
    "heads of one head's queries": (
        index_scores(40, 48, 4, 8, 8, 16),
        {"Q": 0, "W": 0, "S": 0},
        index_scores_reference,
    ),
    "states by chunks": (
        linear_attention(2, 3, 40, 4, 5, chunk=8),
        {"Q": 1, "K": 1, "V": 1, "Out": 1},
        lambda *tensors: linear_attention_reference(*tensors)[0],
    ),
    "states by chunks, backwards": (
        value_gradient(2, 3, 40, 4, 5, chunk=8),
        {"Q": 1, "K": 1, "dOut": 1, "dV": 1},
        value_gradient_reference,
    ),
}


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_what_goes_with_blocks_is_split(name):
    """On 3 devices no tile is whole blocks: nothing is gathered, but states of as many elements whatever the length."""
    func, dims, reference = ROW_KERNELS[name]
    layouts = {param: {"x": dim} for param, dim in dims.items()}
    inputs = inputs_of(func)
    with machine(1):
        steps = outline(lowered(func, {"x": 3}, layouts))
        assert not [step for step in steps for param in dims if step.startswith(f"all_gather({param},")], steps
        for axes in ({"x": 3}, {"x": 4}):
            found = run(func, axes, layouts, *inputs)
            found = found[0] if isinstance(found, (tuple, list)) else found
            torch.testing.assert_close(found, reference(*inputs), rtol=1e-4, atol=1e-4)


def test_parts_have_the_tiles_of_the_whole():
    """What is summed before a cut is of the same blocks that the rest takes up: inputs on all devices are no reason for
    tiles of 20 where states change hands after 24."""
    func = value_gradient(2, 3, 40, 4, 5, chunk=8)
    inputs, layouts = inputs_of(func), {"Q": {}, "K": {"x": 1}, "dOut": {}, "dV": {"x": 1}}
    with machine(1):
        assert "halo(dV, x)" in outline(lowered(func, {"x": 2}, layouts))
        found = run(func, {"x": 2}, layouts, *inputs)
    torch.testing.assert_close(found, value_gradient_reference(*inputs), rtol=1e-4, atol=1e-4)


def test_axes_that_nest_otherwise_than_groups():
    """5 chunks over 2 x 2 devices start at 0, 2, 3 and 5 where each axis splits tiles, and nowhere else."""
    func = linear_attention(2, 3, 40, 4, 5, chunk=8)
    inputs, dims = inputs_of(func), {"Q": 1, "K": 1, "V": 1, "Out": 1}
    layouts = {param: {"x": dim, "y": dim} for param, dim in dims.items()}
    with machine(1):
        found = run(func, {"x": 2, "y": 2}, layouts, *inputs)
    found = found[0] if isinstance(found, (tuple, list)) else found
    torch.testing.assert_close(found, linear_attention_reference(*inputs)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "heads"), [(2, 10), (4, 20)])
def test_heads_that_devices_do_not_divide(rows, heads):
    """5 key heads on 3 devices: of the queries whole groups move, of the cache nothing."""
    func = grouped_decode(2, heads, 5, 32, 8, block_H=rows, block_N=8)
    *tensors, lengths = inputs_of(func, 32)
    inputs, layouts = [*tensors, lengths + 1], {"Q": {"x": 1}, "K": {"x": 2}, "V": {"x": 2}, "Out": {"x": 1}}
    steps = [step.split("(")[1][0] for step in outline(lowered(func, {"x": 3}, layouts)) if step.startswith("halo")]
    assert steps == ["Q", "O"]
    torch.testing.assert_close(
        run(func, {"x": 3}, layouts, *inputs), grouped_decode_reference(*inputs), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("rows", "moved"), [(2, ["Q", "Out"]), (64, ["K", "V"])])
def test_the_fewer_of_queries_and_keys_move(rows, moved):
    """10 heads of queries and 5 of keys, on 3 devices with 4 and 2: either heads of queries go where their keys are, or
    keys where their queries are."""
    sizes = {"groups": 2, "block_M": 8, "block_N": 8, "dtype": "float32"}
    func = flash_attention(1, 10, rows, 40, 8, **sizes)
    inputs, layouts = inputs_of(func), {param: {"x": 1} for param in ("Q", "K", "V", "Out")}
    with machine(1):
        kernel = mt.compile(mt.annotate(func, mt.Mesh({"x": 4}), layouts), target="interpret", poison=True)
        assert [step.src for step in kernel.program.collectives if step.bytes] == moved
        for axes in ({"x": 3}, {"x": 4}, {"x": 2, "y": 2}):
            found = run(func, axes, {p: dict.fromkeys(axes, 1) for p in layouts}, *inputs)
            torch.testing.assert_close(found, flash_attention_reference(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "number",
    [
        37200107,  # what lets one dim be split is not what lets the others be
        37700007,  # a part reads the first few groups of a dim, which were taken for its first few places
    ],
)
def test_groups_in_compositions(number):
    assert outcome_of(make_composition(number)).verdict == "right"
