"""Parts of a kernel that have nothing to do with each other: each is split as it is asked to be."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.paged import put_and_attend, put_and_attend_reference
from mesh_tensor.rules.kernel.independent_parts import independent_parts
from mesh_tensor.rules.kernel.normalize import normalize
from tests.other_machines import machine

from .every_layout import check
from .support import lowered, outline, run

HEADS = {name: {"x": 1} for name in ("Q", "K", "Qo", "Ko")}


@T.macro
def rotate(X, Cos, Sin, Out, row, head, half):
    for j in T.Parallel(half):
        Out[row, head, j] = X[row, head, j] * Cos[row, j] - X[row, head, j + half] * Sin[row, j]
        Out[row, head, j + half] = X[row, head, j + half] * Cos[row, j] + X[row, head, j] * Sin[row, j]


def rotated(form, rows=7, q_heads=6, k_heads=3, dim=8):
    """q's heads and k's rotated in one kernel: by one grid over all heads, over q's, by one loop, or by two."""
    half, heads = dim // 2, {"one grid": q_heads + k_heads, "q's grid": q_heads, "loop": 1, "loops": 1}[form]

    @T.prim_func
    def kernel(
        Q: T.Tensor((rows, q_heads, dim), "float32"),
        K: T.Tensor((rows, k_heads, dim), "float32"),
        Cos: T.Tensor((rows, half), "float32"),
        Sin: T.Tensor((rows, half), "float32"),
        Qo: T.Tensor((rows, q_heads, dim), "float32"),
        Ko: T.Tensor((rows, k_heads, dim), "float32"),
    ):
        with T.Kernel(heads, rows, threads=32) as (bh, row):
            if form == "one grid":
                if bh < q_heads:
                    rotate(Q, Cos, Sin, Qo, row, bh, half)
                else:
                    rotate(K, Cos, Sin, Ko, row, bh - q_heads, half)
            elif form == "q's grid":
                rotate(Q, Cos, Sin, Qo, row, bh, half)
                if bh < k_heads:
                    rotate(K, Cos, Sin, Ko, row, bh, half)
            elif form == "loop":
                for h in T.serial(q_heads + k_heads):
                    if h < q_heads:
                        rotate(Q, Cos, Sin, Qo, row, h, half)
                    else:
                        rotate(K, Cos, Sin, Ko, row, h - q_heads, half)
            else:
                for h in T.serial(q_heads):
                    rotate(Q, Cos, Sin, Qo, row, h, half)
                for h in T.serial(k_heads):
                    rotate(K, Cos, Sin, Ko, row, h, half)

    return kernel


def rotated_reference(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


@pytest.mark.parametrize("form", ["one grid", "q's grid", "loop", "loops"])
def test_heads_of_two_tensors(form):
    """6 and 3 heads on 2 devices (3 and 2 each), and on 4; two axes over rows and heads, or both over heads."""
    func = rotated(form)
    assert outline(lowered(func, {"x": 2}, HEADS, strict=True)) == [
        "kernel(Q, Cos, Sin, Qo)",
        "kernel(K, Cos, Sin, Ko)",
    ]
    q, k, cos, sin = torch.randn(7, 6, 8), torch.randn(7, 3, 8), torch.randn(7, 4), torch.randn(7, 4)
    expected = rotated_reference(q, cos, sin), rotated_reference(k, cos, sin)
    for axes, layouts in (
        ({"x": 4}, HEADS),
        ({"x": 2, "y": 3}, {name: {"x": 1, "y": 0} for name in HEADS}),
        ({"x": 2, "y": 2}, {name: {("y", "x"): 1} for name in HEADS}),
        ({"x": 2, "y": 2}, {"Q": {"x": 1}, "Qo": {"x": 1}, "K": {"y": 1}, "Ko": {"y": 1}}),
    ):
        for found, wanted in zip(run(func, axes, layouts, q, k, cos, sin), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with machine(1):
        check(func, [q, k, cos, sin], expected, [{"x": 2, "y": 2}])


def products(form, rows=12, inner=8, q=24, k=8, block=4):
    """A product with two matrices: in one grid, one loop that takes blocks of either, or in two loops of a program."""
    of_q, of_k = q // block, k // block

    @T.prim_func
    def kernel(
        X: T.Tensor((rows, inner), "float32"),
        Wq: T.Tensor((inner, q), "float32"),
        Wk: T.Tensor((inner, k), "float32"),
        Q: T.Tensor((rows, q), "float32"),
        K: T.Tensor((rows, k), "float32"),
    ):
        with T.Kernel(of_q + of_k if form == "grid" else 1, T.ceildiv(rows, block), threads=32) as (bx, by):
            x = T.alloc_shared((block, inner), "float32")
            w = T.alloc_shared((inner, block), "float32")
            total = T.alloc_fragment((block, block), "float32")
            T.copy(X[by * block, 0], x)
            if form == "grid":
                if bx < of_q:
                    T.copy(Wq[0, bx * block], w)
                else:
                    T.copy(Wk[0, (bx - of_q) * block], w)
                T.clear(total)
                T.gemm(x, w, total)
                if bx >= of_q:
                    T.copy(total, K[by * block, (bx - of_q) * block])
                else:
                    T.copy(total, Q[by * block, bx * block])
            else:
                for n in T.serial(of_q):
                    T.copy(Wq[0, n * block], w)
                    T.gemm(x, w, total, clear_accum=True)
                    T.copy(total, Q[by * block, n * block])
                for n in T.serial(of_k):
                    T.copy(Wk[0, n * block], w)
                    T.gemm(x, w, total, clear_accum=True)
                    T.copy(total, K[by * block, n * block])

    return kernel


COLUMNS = {name: {"x": 1} for name in ("Wq", "Wk", "Q", "K")}


@pytest.mark.parametrize("form", ["grid", "loops"])
def test_products_that_use_the_same_blocks_on_chip(form):
    func = products(form)
    assert outline(lowered(func, {"x": 2}, COLUMNS, strict=True)) == ["kernel(X, Wq, Q)", "kernel(X, Wk, K)"]
    x, wq, wk = torch.randn(12, 8), torch.randn(8, 24), torch.randn(8, 8)
    with machine(1):
        check(func, [x, wq, wk], (x @ wq, x @ wk), [{"x": 3}])


def test_what_asks_for_one_factor_is_one_kernel():
    rows = {name: {"x": 0} for name in ("X", "Q", "K")}
    assert outline(lowered(products("grid"), {"x": 2}, rows)) == ["kernel(X, Wq, Wk, Q, K)"]


def normalized(rows=3, q_heads=6, k_heads=3, dim=4):
    """Heads of q and k by one loop, which has the buffers on chip in common; then columns in one parallel loop."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((rows, q_heads, dim), "float32"),
        K: T.Tensor((rows, k_heads, dim), "float32"),
        A: T.Tensor((rows, 10), "float32"),
        B: T.Tensor((rows, 4), "float32"),
        Qo: T.Tensor((rows, q_heads, dim), "float32"),
        Ko: T.Tensor((rows, k_heads, dim), "float32"),
        Left: T.Tensor((rows, 10), "float32"),
        Right: T.Tensor((rows, 4), "float32"),
    ):
        with T.Kernel(rows, threads=32) as row:
            head = T.alloc_shared((dim,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for h in T.serial(q_heads + k_heads):
                if h < q_heads:
                    T.copy(Q[row, h, 0], head)
                else:
                    T.copy(K[row, h - q_heads, 0], head)
                total[0] = 0.0
                for j in T.serial(dim):
                    total[0] += head[j] * head[j]
                for j in T.Parallel(dim):
                    head[j] = head[j] * T.rsqrt(total[0])
                if h < q_heads:
                    T.copy(head, Qo[row, h, 0])
                else:
                    T.copy(head, Ko[row, h - q_heads, 0])
            for i, j in T.Parallel(1, 14):
                if j < 10:
                    Left[row + i, j] = A[row + i, j] * 2.0
                else:
                    Right[row + i, j - 10] = B[row + i, j - 10] * 3.0

    return kernel


def test_iterations_that_have_buffers_in_common():
    columns = {name: {"x": 1} for name in ("Q", "K", "A", "B", "Qo", "Ko", "Left", "Right")}
    steps = outline(lowered(normalized(), {"x": 2}, columns, strict=True))
    assert steps == ["kernel(Q, Qo)", "kernel(K, Ko)", "kernel(A, Left)", "kernel(B, Right)"]
    q, k, a, b = torch.randn(3, 6, 4), torch.randn(3, 3, 4), torch.randn(3, 10), torch.randn(3, 4)
    unit = torch.nn.functional.normalize
    with machine(1):
        check(normalized(), [q, k, a, b], (unit(q, dim=-1), unit(k, dim=-1), a * 2, b * 3), [{"x": 3}])


def test_explain_says_why_there_are_several():
    kernel = mt.compile(mt.annotate(rotated("loops"), mt.Mesh({"x": 2}), HEADS), target="interpret")
    assert kernel.explain().startswith('2 kernels of kernel on Mesh({"x": 2}): its parts can go one after the other')


def updates(of_both):
    """Two tensors of different lengths, updated in place; with `of_both`, the second one by what the first is then."""

    @T.prim_func
    def kernel(
        A: T.Tensor((20,), "float32"),
        dA: T.Tensor((20,), "float32"),
        B: T.Tensor((10,), "float32"),
        dB: T.Tensor((10,), "float32"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.serial(20):
                A[i] = A[i] - 0.5 * dA[i]
            for i in T.serial(10):
                B[i] = B[i] - (A[0] if of_both else T.float32(0.5)) * dB[i]

    return kernel


@pytest.mark.parametrize("of_both", [False, True])
@pytest.mark.parametrize("target", ["interpret", "c"])
def test_updates_in_place(of_both, target):
    """What is made of another result is not made before it."""
    a, da, b, db = torch.randn(20), torch.randn(20), torch.randn(10), torch.randn(10)
    new_a = a - 0.5 * da
    expected = new_a, b - (new_a[0] if of_both else 0.5) * db
    layouts = {name: {"x": 0} for name in ("A", "dA", "B", "dB")}
    kernel = mt.compile(mt.annotate(updates(of_both), mt.Mesh({"x": 2}), layouts), target=target)
    kernel(a, da, b, db)
    for found, wanted in zip((a, b), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    if not of_both:
        steps = outline(lowered(updates(of_both), {"x": 2}, layouts, strict=True))
        assert steps == ["kernel(A, dA)", "kernel(B, dB)"]


def carried(form):
    """Sums of columns and of a shorter tensor's: the second goes on from the first one's, or starts anew."""

    @T.prim_func
    def kernel(
        A: T.Tensor((4, 12), "float32"),
        B: T.Tensor((4, 8), "float32"),
        Left: T.Tensor((4, 12), "float32"),
        Right: T.Tensor((4, 8), "float32"),
    ):
        with T.Kernel(4, threads=32) as row:
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for i in T.serial(12):
                Left[row, i] = A[row, i] + 1.0
                if form == "carried":
                    total[0] = total[0] + A[row, i]
            for i in T.serial(8):
                Right[row, i] = B[row, i] + total[0]
                if form == "first alone":
                    total[0] = total[0] + B[row, i]

    return kernel


@pytest.mark.parametrize("form", ["carried", "first alone", "zero"])
def test_what_is_carried_on_chip(form):
    a, b = torch.randn(4, 12), torch.randn(4, 8)
    right = {"carried": b + a.sum(1, keepdim=True), "first alone": b.cumsum(1), "zero": b}[form]
    with machine(1):
        check(carried(form), [a, b], (a + 1, right), [{"x": 3}])


def chosen(form, n=12, m=6):
    """Programs that are told apart by conditions of other kinds."""

    @T.prim_func
    def kernel(
        A: T.Tensor((n,), "float32"),
        B: T.Tensor((m,), "float32"),
        which: T.Tensor((1,), "int32"),
        Out: T.Tensor((n,), "float32"),
        Other: T.Tensor((m,), "float32"),
    ):
        with T.Kernel(2 if form == "kind" else n + m, threads=32) as bx:
            if form == "kind":
                if bx == 0:
                    for i in T.Parallel(n):
                        Out[i] = A[i] * 2.0
                else:
                    for i in T.Parallel(m):
                        Other[i] = B[i] * 3.0
            elif form == "data":
                if bx < n + which[0]:  # noqa: SIM102  (two conditions)
                    if bx < n:
                        Out[bx] = A[bx] * 2.0
                if bx >= n:
                    Other[bx - n] = B[bx - n] * 3.0
            elif form == "from behind":
                if n <= bx:
                    Other[bx - n] = B[bx - n] * 3.0
                if not n <= bx:
                    Out[n - 1 - bx] = A[n - 1 - bx] * 2.0
            else:
                value = T.if_then_else(bx > n - 1, B[T.max(bx - n, 0)] * 3.0, A[T.min(bx, n - 1)] * 2.0)
                if bx != n + m:
                    if bx < n:
                        Out[bx] = value
                    else:
                        Other[bx - n] = value

    return kernel


@pytest.mark.parametrize("form", ["kind", "data", "from behind", "value"])
def test_programs_that_are_told_apart(form):
    a, b, which = torch.randn(12), torch.randn(6), torch.zeros(1, dtype=torch.int32)
    with machine(1):
        check(chosen(form), [a, b, which], (a * 2, b * 3), [{"x": 4}])


def joined_result(n=8, m=4):
    """Two tensors, one after the other in one result."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((m,), "float32"), Out: T.Tensor((n + m,), "float32")):
        with T.Kernel(n + m, threads=32) as bx:
            if bx < n:
                Out[bx] = A[bx] * 2.0
            else:
                Out[bx] = B[bx - n] * 3.0

    return kernel


def test_one_result_is_of_one_kernel():
    a, b = torch.randn(8), torch.randn(4)
    layouts = {"A": {"x": 0}, "B": {"x": 0}, "Out": {"x": 0}}
    assert sum("kernel" in step for step in outline(lowered(joined_result(), {"x": 2}, layouts))) == 1
    check(joined_result(), [a, b], torch.cat([a * 2, b * 3]), [{"x": 2}, {"x": 3}])


def counted(n, m, where):
    """`Out = 2 A`; of B only the first `lens[1]` count, by a condition or by how far a loop goes."""

    @T.prim_func
    def kernel(
        A: T.Tensor((n,), "float32"),
        B: T.Tensor((m,), "float32"),
        lens: T.Tensor((2,), "int32"),
        Out: T.Tensor((n,), "float32"),
        Other: T.Tensor((m,), "float32"),
    ):
        with T.Kernel(1, threads=32) as _:
            count = T.alloc_var("int32")
            total = T.alloc_fragment((1,), "float32")
            count = lens[1]
            for i in T.serial(n):
                Out[i] = A[i] * 2.0
            if where == "condition":
                for i in T.serial(m):
                    Other[i] = T.if_then_else(i < count, B[i] + 1.0, 0.0)
            else:
                total[0] = 0.0
                for i in T.serial(count):
                    total[0] += B[i]
                for i in T.serial(m):
                    Other[i] = total[0]

    return kernel


@pytest.mark.parametrize("where", ["condition", "loop"])
@pytest.mark.parametrize("target", ["interpret", "c"])
def test_numbers_that_are_asked_for_stay(where, target):
    """A part keeps what makes the numbers that its conditions and its loops ask for."""
    a, b, lens = torch.randn(12), torch.randn(9), torch.tensor([3, 5], dtype=torch.int32)
    first = torch.arange(9) < 5
    other = (b + 1) * first if where == "condition" else (b * first).sum().expand(9)
    layouts = {"A": {"x": 0}, "Out": {"x": 0}, "B": {"x": 0} if where == "condition" else {}, "Other": {"x": 0}}
    with machine(1):
        kernel = mt.compile(mt.annotate(counted(12, 9, where), mt.Mesh({"x": 2}), layouts), target=target)
    assert "its parts can go one after the other" in kernel.explain() or where == "loop"
    for found, expected in zip(kernel(a, b, lens), (a * 2, other), strict=True):
        torch.testing.assert_close(found, expected)


CACHE_HEADS = {"Q": {"x": 1}, "K": {"x": 1}, "V": {"x": 1}, "K_cache": {"x": 2}, "V_cache": {"x": 2}, "Out": {"x": 1}}


def cache_inputs(batch, heads, groups, seq, dim):
    shapes = [(batch, heads, dim), *[(batch, groups, dim)] * 2, *[(batch, seq, groups, dim)] * 2]
    return [*(torch.randn(*shape) for shape in shapes), torch.randint(0, seq, (batch,), dtype=torch.int32)]


@pytest.mark.parametrize("devices", [2, 3])
def test_what_is_put_into_a_cache_first(devices):
    sizes = {"batch": 2, "heads": 12, "groups": 6, "seq": 5, "dim": 4}
    func, inputs = put_and_attend(**sizes), cache_inputs(**sizes)
    with machine(1):
        steps = outline(lowered(func, {"x": devices}, CACHE_HEADS, strict=True))
        found = run(func, {"x": devices}, CACHE_HEADS, *(tensor.clone() for tensor in inputs))
    assert {step.split("(")[0] for step in steps} == {"kernel"}
    torch.testing.assert_close(found, put_and_attend_reference(*inputs), rtol=1e-5, atol=1e-5)


def test_caches_in_some_layouts():
    sizes = {"batch": 3, "heads": 4, "groups": 2, "seq": 5, "dim": 4}
    inputs = cache_inputs(**sizes)
    with machine(1):
        check(put_and_attend(**sizes), inputs, put_and_attend_reference(*inputs), [{"x": 2, "y": 2}])


def put_and_read(what):
    """`B[p]` is what is in `A` at a place, after the program has put `X[p]` into its own."""

    @T.prim_func
    def kernel(
        X: T.Tensor((8, 4), "float32"),
        At: T.Tensor((8,), "int32"),
        A: T.Tensor((8, 4), "float32"),
        B: T.Tensor((8, 4), "float32"),
    ):
        with T.Kernel(8, threads=32) as p:
            if what == "again":
                for j in T.Parallel(4):
                    B[p, j] = A[p, j]
            if what == "sum":
                for j in T.Parallel(4):
                    A[p, j] = A[p, j] + X[p, j]
            else:
                for j in T.Parallel(4):
                    A[p, j] = X[p, j]
            for j in T.Parallel(4):
                if what == "next":
                    if p < 7:
                        B[p, j] = A[p + 1, j]
                elif what == "data":
                    B[p, j] = A[At[p], j]
                else:
                    B[p, j] = A[p, j]

    return kernel


@pytest.mark.parametrize(("what", "apart"), [("data", True), ("next", False), ("sum", False), ("again", False)])
def test_what_programs_read_of_what_they_write(what, apart):
    """A place that data say; that of the next program, what was added to, what is read before, too."""
    layout = {name: mt.Sharding.make(mt.Mesh({"x": 2}), 2, {"x": dim}) for name, dim in {"A": 0, "B": 1}.items()}
    ways = list(independent_parts(normalize(put_and_read(what)), layout))
    assert bool(ways) is apart
