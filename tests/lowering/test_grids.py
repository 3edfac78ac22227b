"""Several kernels in one function: they run in order, and what one leaves the next takes where it lies."""

import itertools

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.grouped_query import grouped_decode_reference, split_decode
from kernels.sparse import expert_mlp, expert_mlp_reference
from tests.other_machines import machine

from .every_layout import check
from .kernels import halved_sums, unused_parameter
from .support import lowered, outline, run

MLP = expert_mlp(2, 13, 12, 10, 8, 8, 8)
X, W1, W2 = torch.randn(2, 13, 10), torch.randn(2, 10, 12), torch.randn(2, 12, 10)


def test_a_value_between_kernels_stays_split():
    layouts = {"X": {"x": 1}, "Y": {"x": 1}}
    steps = outline(lowered(MLP, {"x": 3}, layouts, strict=True))
    assert steps == ["kernel(X, W1, up)", "kernel(W2, up, Y)"]
    columns = {"W1": {"x": 2}, "W2": {"x": 1}, "Y": {}}
    with machine(1):
        steps = outline(lowered(MLP, {"x": 3}, columns))
    assert steps == ["kernel(X, W1, up)", "kernel(W2, up, Y)", "all_reduce(Y, sum, x)"]


@pytest.mark.parametrize(
    "layouts",
    [
        {"X": {"x": 0}, "W2": {"x": 0}, "Y": {"x": 0}},
        {"X": {"x": 1}, "up": {"x": 2}, "Y": {"x": 1}},
        {"W1": {"x": 2}, "up": {}, "W2": {"x": 1}, "Y": {"x": 2}},
        {"X": {"x": 2}, "W1": {"x": 1}, "up": {"x": 1}, "Y": {"x": 0}},
    ],
)
def test_experts(layouts):
    for number, devices in ((1, 2), (2, 3)):
        with machine(number):
            up, y = run(MLP, {"x": devices}, layouts, X, W1, W2)
        expected_up, expected_y = expert_mlp_reference(X, W1, W2)
        torch.testing.assert_close(up, expected_up, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-5)


def test_a_parameter_that_no_kernel_uses_is_one_of_all_the_same():
    for layouts in ({"unused": {"x": 0}}, {"first": {"x": 0}}):
        made = lowered(unused_parameter(), {"x": 2}, layouts)
        assert [name for name, _, _ in made.parameters] == ["a", "unused", "first", "second"]
        a = torch.randn(6)
        first, second = run(unused_parameter(), {"x": 2}, layouts, a, torch.randn(3, 4))
        assert torch.equal(first, a + 1)
        assert torch.equal(second, (a + 1).flip(0))


@pytest.mark.parametrize("annotated", [{}, {"unused": {"x": 0}}])
def test_a_parameter_that_no_part_of_a_cut_kernel_uses_is_one_of_it(annotated):
    layouts = {"a": {"x": 1}, **annotated}
    with machine(1):
        made = lowered(halved_sums(), {"x": 2}, layouts)
        assert [name for name, _, _ in made.parameters] == ["a", "unused", "out"]
        assert len(made.steps) > 1, "it is not cut"
        a, state = torch.randn(3, 12), torch.zeros(3)
        for column in a.T:
            state = torch.maximum(state, column) * 0.5
        assert torch.equal(run(halved_sums(), {"x": 2}, layouts, a, torch.randn(3, 4)), state)


def test_flash_decoding():
    batch, heads, groups, seq, dim = 2, 4, 2, 21, 8
    func = split_decode(batch, heads, groups, seq, dim, parts=3, block_N=4)
    q, k, v = torch.randn(batch, heads, dim), torch.randn(batch, seq, groups, dim), torch.randn(batch, seq, groups, dim)
    expected = grouped_decode_reference(q, k, v, torch.full((batch,), seq))
    ways = [
        {"K": {"x": 2}, "V": {"x": 2}, "Q": {"x": 1}, "Out": {"x": 1}},
        {n: {"x": 0} for n in ("Q", "K", "V", "Out")},
    ]
    for layouts in ways:
        assert outline(lowered(func, {"x": 2}, layouts, strict=True))[-1] == "kernel(lse, partial, Out)"
    ways += [
        {"K": {"x": 1}, "V": {"x": 1}},
        {"lse": {"x": 2}},
        {"partial": {"x": 3}, "Out": {"x": 2}},
        {"lse": {"x": 1}},
    ]
    for layouts, devices in itertools.product(ways, (2, 3)):
        out = run(func, {"x": devices}, layouts, q, k, v)[-1]
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def padded_blocks(batch=3, heads=6, valid=2, block=4, columns=5, skips=False):
    """Sums of rows, blocks of heads of which only the first are valid (and, with `skips`, not of every batch), then
    quotients by them."""

    @T.prim_func
    def main(A: T.Tensor((batch, heads, columns), "float32"), B: T.Tensor((batch, heads, columns), "float32")):
        sums = T.alloc_global((batch, heads), "float32")
        with T.Kernel(batch, heads // valid, threads=32) as (bx, by):
            a = T.alloc_shared((block, columns), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(A[bx, by * valid : by * valid + block, :], a)
            T.reduce_sum(a, total, dim=1)
            for i in T.Parallel(block):
                if i < valid and (bx != 1 or not skips):
                    sums[bx, by * valid + i] = total[i]
        with T.Kernel(batch, heads, threads=32) as (bx, by):
            for j in T.Parallel(columns):
                B[bx, by, j] = A[bx, by, j] / (1.0 + T.abs(sums[bx, by]))

    return main


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("dims", [{"A": {"x": 0}, "B": {"x": 0}}, {"A": {"x": 1}, "B": {"x": 1}}, {"A": {"x": 2}}])
def test_memory_between_that_is_written_in_parts(dims, skips):
    """What no kernel writes of it is 0, on every device."""
    a = torch.randn(3, 6, 5)
    sums = a.sum(2, keepdim=True).abs()
    sums[1] *= not skips
    for number, devices in ((0, 2), (1, 3), (2, 2)):
        with machine(number):
            found = run(padded_blocks(skips=skips), {"x": devices}, dims, a)
        torch.testing.assert_close(found, a / (1 + sums), rtol=1e-5, atol=1e-5)


def test_memory_that_is_written_in_parts_lies_as_it_is_used():
    dims = {"A": {"x": 0}, "B": {"x": 0}}
    found = lowered(padded_blocks(), {"x": 3}, dims, strict=True)
    assert outline(found) == ["kernel(sums)", "kernel(A, sums)", "kernel(A, B, sums)"]
    assert found.tensors["sums"].sharding.dim_of("x") == 0


def memory_between(rows=13, columns=10, block=4):
    """Rows, then columns, and a tensor that only the function has."""

    @T.prim_func
    def main(A: T.Tensor((rows, columns), "float32"), B: T.Tensor((columns, rows), "float32")):
        kept = T.alloc_global((rows, columns), "float32")
        with T.Kernel(T.ceildiv(rows, block), threads=32) as bx:
            for i, j in T.Parallel(block, columns):
                if bx * block + i < rows:
                    kept[bx * block + i, j] = A[bx * block + i, j] * 2.0
        with T.Kernel(T.ceildiv(columns, block), threads=32) as bx:
            for i, j in T.Parallel(block, rows):
                if bx * block + i < columns:
                    B[bx * block + i, j] = kept[j, bx * block + i] + A[j, bx * block + i]

    return main


def test_memory_of_the_function_itself():
    func, a = memory_between(), torch.randn(13, 10)
    with machine(1):
        check(func, [a], 3 * a.T)
    for target in ("interpret", "c"):
        kernel = mt.compile(mt.annotate(func, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}), target=target)
        torch.testing.assert_close(kernel(a), 3 * a.T)
    assert [p.name for p in kernel.program.parameters] == ["A", "B"]
    local = mt.lower(mt.annotate(func, {"x": 2}, {"A": {"x": 0}}))["main"]
    assert "kept" in local.script()


def in_place(rows=13, block=4):
    """Adds to a tensor, to part of it, and to all of it; a tensor is written first, and then looked at."""

    @T.prim_func
    def main(A: T.Tensor((rows,), "float32"), B: T.Tensor((rows,), "float32"), C: T.Tensor((rows,), "float32")):
        with T.Kernel(T.ceildiv(rows, block), threads=32) as bx:
            for i in T.Parallel(block):
                if bx * block + i < rows:
                    A[bx * block + i] = A[bx * block + i] + 1.0
        with T.Kernel(T.ceildiv(rows, block), threads=32) as bx:
            for i in T.Parallel(block):
                if (bx * block + i) % 2 == 0 and bx * block + i < rows:
                    B[bx * block + i] = A[bx * block + i]
        with T.Kernel(1, threads=32):
            total = T.alloc_fragment((rows,), "float32")
            T.copy(B, total)
            for i in T.Parallel(rows):
                C[i] = total[i] - A[i]
        with T.Kernel(T.ceildiv(rows, block), threads=32) as bx:
            for i in T.Parallel(block):
                if bx * block + i < rows:
                    A[bx * block + i] = C[bx * block + i] * 2.0

    return main


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}])
def test_tensors_that_are_updated_in_place(mesh):
    a, b = torch.randn(13), torch.randn(13)
    kept = torch.where(torch.arange(13) % 2 == 0, a + 1, b)
    c = kept - (a + 1)
    for layouts in itertools.product([{}, {"x": 0}, None], repeat=3):
        stated = {name: layout for name, layout in zip("ABC", layouts, strict=True) if layout is not None}
        func = mt.annotate(in_place(), mesh, stated)
        kernel = mt.compile(func, target="interpret", poison=True)
        assert [(p.name, p.input is None, p.kept) for p in kernel.program.parameters] == [
            ("A", False, False),
            ("B", False, False),
            ("C", True, False),
        ]
        for result, expected in zip(kernel(a.clone(), b.clone()), (2 * c, kept, c), strict=True):
            torch.testing.assert_close(result, expected)


def test_symbolic_sizes():
    rows = T.dynamic("rows")

    @T.prim_func
    def main(A: T.Tensor((rows, 8), "float32"), s: T.Tensor((rows,), "float32"), B: T.Tensor((rows, 8), "float32")):
        with T.Kernel(T.ceildiv(rows, 4), threads=32) as bx:
            tile, sums = T.alloc_fragment((4, 8), "float32"), T.alloc_fragment((4,), "float32")
            T.copy(A[bx * 4, 0], tile)
            T.reduce_sum(tile, sums, dim=1)
            T.copy(sums, s[bx * 4])
        with T.Kernel(T.ceildiv(rows, 4), threads=32) as bx:
            for i, j in T.Parallel(4, 8):
                if bx * 4 + i < rows:
                    B[bx * 4 + i, j] = s[bx * 4 + i] + T.cast(rows, "float32")

    for layouts in ({"A": {"x": 0}, "B": {"x": 0}}, {"A": {"x": 1}}, {"B": {"x": 1}}):
        kernel = mt.compile(mt.annotate(main, {"x": 2}, layouts), target="interpret", poison=True)
        for size in (8, 7):
            a = torch.randn(size, 8)
            sums, b = kernel(a)
            torch.testing.assert_close(sums, a.sum(1))
            torch.testing.assert_close(b, (a.sum(1) + size)[:, None].expand(size, 8))
