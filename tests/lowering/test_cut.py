"""Cutting a kernel in two: what comes before and after, and how values get over the cut."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

import mesh_tensor as mt
from kernels.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm
from mesh_tensor.lowering.cut import cut
from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.sharding_rule import analyse
from tests.other_machines import machine

from .support import assert_right, local_kernels, lowered, outline, run, text


def centred(M=16, N=32, block=4):
    """Y = X - mean(X, dim 1): cut after the sum."""

    @T.prim_func
    def kernel(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
            x = T.alloc_fragment((block, N), "float32")
            s = T.alloc_fragment((block,), "float32")
            T.copy(X[bx * block, 0], x)  # 0
            T.reduce_sum(x, s, dim=1)  # 1
            for i, j in T.Parallel(block, N):  # 2
                x[i, j] = x[i, j] - s[i] / N
            T.copy(x, Y[bx * block, 0])  # 3

    return kernel


def test_the_parts_are_kernels_in_global_view():
    first, second, (workspace,) = cut(analyse(normalize(centred())), 2, "w")

    def expected_first(M=16, N=32, block=4):
        @T.prim_func
        def kernel(X: T.Tensor((M, N), "float32"), W: T.Tensor((M,), "float32")):
            with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
                x = T.alloc_fragment((block, N), "float32")
                s = T.alloc_fragment((block,), "float32")
                T.copy(X[bx * block, 0], x)
                T.reduce_sum(x, s, dim=1)
                T.copy(s, W[bx * block])

        return kernel

    ir.assert_structural_equal(first.without_attr("global_symbol"), expected_first().without_attr("global_symbol"))
    assert [second.buffer_map[p].name for p in second.params] == ["X", "Y", "s_w"]
    assert workspace.buffer.name == "s_w"
    assert tuple(map(int, workspace.buffer.shape)) == (16,)
    assert workspace.buffer.dtype == "float32"
    assert [factor.name for factor in workspace.factors] == ["m"]


def test_layouts_that_split_the_same_share_their_parts():
    kernel, x = centred(), torch.randn(16, 32)
    layouts = [{"X": {"x": 1}, "Y": {"x": 1}}, {"X": {"x": 1}}]
    with machine(1):
        made = [local_kernels(lowered(kernel, {"x": 2}, layout)) for layout in layouts]
        for layout in layouts:
            assert_right(kernel, {"x": 2}, layout, [x], lambda a: a - a.mean(1, keepdim=True))
    assert [one.same_as(two) for one, two in zip(*made, strict=True)] == [True, True]


def test_what_was_only_copied_in_is_copied_again():
    _, second, workspaces = cut(analyse(normalize(centred())), 2, "w")
    assert [w.on_chip.name for w in workspaces] == ["s"], "x comes from X again"
    assert "T.copy(T.region(X[bx * 4, 0]" in text(second)


def test_what_was_changed_goes_through_a_workspace():
    @T.prim_func
    def kernel(X: T.Tensor((16, 32), "float32"), Y: T.Tensor((16, 32), "float32")):
        with T.Kernel(4, threads=32) as bx:
            x = T.alloc_fragment((4, 32), "float32")
            s = T.alloc_fragment((4,), "float32")
            T.copy(X[bx * 4, 0], x)
            for i, j in T.Parallel(4, 32):
                x[i, j] = T.exp(x[i, j])
            T.reduce_sum(x, s, dim=1)
            for i, j in T.Parallel(4, 32):
                x[i, j] = x[i, j] / s[i]
            T.copy(x, Y[bx * 4, 0])

    layouts = {"X": {"x": 1}, "Y": {"x": 1}}
    result = lowered(kernel, {"x": 2}, layouts)
    assert outline(result) == ["kernel(X, x_w1, s_w1)", "all_reduce(s_w1, sum, x)", "kernel(Y, x_w1, s_w1.1)"]
    assert str(result.tensors["x_w1"].sharding) == "S[1]", "it is split like X"
    assert_right(kernel, {"x": 2}, layouts, [torch.randn(16, 32)], lambda a: torch.softmax(a.double(), 1))


def test_a_value_per_program_has_a_workspace_per_program():
    @T.prim_func
    def kernel(X: T.Tensor((12, 32), "float32"), Y: T.Tensor((12,), "float32")):
        with T.Kernel(12, threads=32) as bx:
            total = T.alloc_fragment((1,), "float32")
            x = T.alloc_fragment((1, 32), "float32")
            T.copy(X[bx, 0], x)
            T.reduce_sum(x, total, dim=1)
            Y[bx] = T.exp(total[0])

    _, _, (workspace,) = cut(analyse(normalize(kernel)), 2, "w")
    assert 12 in [int(size) for size in workspace.buffer.shape]
    assert_right(kernel, {"x": 2}, {"X": {"x": 1}}, [torch.randn(12, 32)], lambda a: a.double().sum(1).exp())


@pytest.mark.parametrize("key", ["threadblock_swizzle_pattern", "tl.min_blocks_per_sm"])
def test_a_kernel_under_a_hint_is_cut_as_without_and_its_parts_keep_it(key):
    """A hint stands around all that follows it, as the parts' hints do."""

    def rounded(hint):
        @T.prim_func
        def kernel(
            A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")
        ):
            with T.Kernel(2, 2, threads=32) as (bx, by):
                a = T.alloc_shared((32, 32), "float16")
                b = T.alloc_shared((32, 32), "float16")
                c = T.alloc_fragment((32, 32), "float32")
                if hint == "threadblock_swizzle_pattern":
                    T.use_swizzle(10)
                if hint == "tl.min_blocks_per_sm":
                    T.annotate_min_blocks_per_sm(2)
                T.clear(c)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[by * 32, k * 32], a)
                    T.copy(B[k * 32, bx * 32], b)
                    T.gemm(a, b, c)
                T.copy(c, C[by * 32, bx * 32])

        return kernel

    mesh, dims = {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}
    plain, hinted = (lowered(rounded(hint), mesh, dims, strict=True) for hint in ("", key))
    assert [text(kernel).count(key) for kernel in local_kernels(hinted)] == [1, 1]
    assert outline(hinted) == outline(plain)
    inputs = [torch.randint(-4, 5, (64, 64)).half() for _ in range(2)]
    assert_right(rounded(key), mesh, dims, inputs, lambda a, b: a.float() @ b.float())


def test_parts_take_only_the_buffers_that_they_use():
    first, second = local_kernels(lowered(centred(), {"x": 2}, {"X": {"x": 1}}))
    assert [b.name for b in first.buffer_map.values()] == ["X", "s_w1"]
    assert {b.name for b in second.buffer_map.values()} == {"X", "Y", "s_w1"}


def test_a_kernel_is_cut_as_often_as_it_takes():
    layouts = dict.fromkeys(("X", "Y"), {"x": 1})
    result = lowered(layer_norm(512, 4096, 8), {"x": 2}, layouts)
    assert [step.split("(")[0] for step in outline(result) if "slice" not in step] == [
        "kernel",
        "all_reduce",
        "kernel",
        "all_reduce",
        "kernel",
    ]


def test_parts_keep_the_factors_of_the_whole():
    """Axes split the same dims before and after a cut."""
    result = lowered(centred(), {"x": 2, "y": 2}, {"X": {"x": 0, "y": 1}, "Y": {"x": 0, "y": 1}})
    assert outline(result) == ["kernel(X, s_w1)", "all_reduce(s_w1, sum, y)", "kernel(X, Y, s_w1.1)"]
    assert str(result.tensors["s_w1"].sharding) == "S[0], P[sum]"


def test_dims_that_were_one_are_split_together_after_a_cut():
    """Nothing in the part after the mean says that what is squared there is walked with what is normalized."""
    layouts = {name: {"x": 1} for name in ("X", "R", "Y", "S")}
    result = lowered(add_layer_norm(512, 4096, block_M=8), {"x": 2}, layouts)
    assert [step for step in outline(result) if "all_gather" in step] == []
    assert str(result.tensors["total_w1"].sharding) == "S[1]"


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 5}])
@pytest.mark.parametrize("sizes", [(16, 32), (13, 21), (8, 3)], ids=str)
def test_what_is_split_together_after_a_cut_is_right(mesh, sizes):
    M, N = sizes
    kernel = add_layer_norm(M, N, block_M=4)
    dims = {"x": 1} | ({"y": 0} if "y" in mesh else {})
    layouts = dict.fromkeys(("X", "R", "Y", "S"), dims)
    x, r, weight, bias = torch.randn(M, N), torch.randn(M, N), torch.randn(N), torch.randn(N)
    with machine(1):
        made = mt.compile(mt.annotate(kernel, mesh, layouts), target="interpret", poison=True)
    for found, expected in zip(made(x, r, weight, bias), add_layer_norm_reference(x, r, weight, bias), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def counted(is_updated=False):
    """Means of rows, whose length is loaded before they are summed; `is_updated`: and then counted down."""

    @T.prim_func
    def kernel(X: T.Tensor((16, 32), "float32"), n: T.Tensor((4,), "int32"), Y: T.Tensor((16,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            x = T.alloc_fragment((4, 32), "float32")
            s = T.alloc_fragment((4,), "float32")
            count = n[bx]
            twice = count * 2
            T.copy(X[bx * 4, 0], x)
            T.reduce_sum(x, s, dim=1)
            if is_updated:
                n[bx] = 1
            for i in T.Parallel(4):
                if count > 0:
                    s[i] = s[i] / T.Cast("float32", twice)
            T.copy(s, Y[bx * 4])

    return kernel


COUNTS = torch.tensor([5, 0, 2, 1], dtype=torch.int32)


def mean_by_counts(x):
    counts = COUNTS.repeat_interleave(4)
    return torch.where(counts > 0, x.sum(1) / (2 * counts).clamp(min=1), x.sum(1))


def test_a_value_loaded_before_the_cut_is_loaded_again():
    x, layouts = torch.randn(16, 32), {"X": {"x": 1}}
    with machine(1):
        steps = outline(lowered(counted(), {"x": 2}, layouts))
        assert steps == ["kernel(X, n, s_w1)", "all_reduce(s_w1, sum, x)", "kernel(n, Y, s_w1.1)"]
        torch.testing.assert_close(run(counted(), {"x": 2}, layouts, x, COUNTS), mean_by_counts(x))


def test_a_value_loaded_from_what_changes_stops_the_cut():
    with pytest.raises(Blocked, match="count is loaded before the point where the kernel would be cut"):
        cut(analyse(normalize(counted(is_updated=True))), 4, "w")
    x = torch.randn(16, 32)
    with machine(1):
        n, y = run(counted(is_updated=True), {"x": 2}, {"X": {"x": 1}}, x, COUNTS.clone())
    assert n.tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(y, mean_by_counts(x))


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("dims", [(1, 1), (1, 0), (1, None), (0, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(16, 32), (7, 10)], ids=str)
def test_numbers(mesh, dims, sizes):
    layouts = {name: dict.fromkeys(mesh, dim) for name, dim in zip("XY", dims, strict=True)}
    inputs = [torch.randn(sizes)]
    assert_right(centred(*sizes), mesh, layouts, inputs, lambda a: a - a.double().mean(1, keepdim=True))
