"""Clause 9: what is written at one place of a dim is written by the device that has it; nothing moves."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.other_machines import AT_ONCE, planned_for

from .support import lowered, outline

N, BLOCK = 37, 16


def put(how, at, m=5):
    """One row of `out` is made of `A`; the others stay."""

    @T.prim_func
    def kernel(A: T.Tensor((N,), "float32"), out: T.Tensor((m, N), "float32")):
        with T.Kernel(T.ceildiv(N, BLOCK), threads=128) as bx:
            part = T.alloc_fragment((BLOCK,), "float32")
            T.copy(A[bx * BLOCK], part)
            if how == "copy":
                T.copy(part, out[at, bx * BLOCK])
            elif how == "fill":
                T.fill(out[at, bx * BLOCK : bx * BLOCK + BLOCK], 3.0)
            elif how == "atomic":
                T.atomic_add(out[at, bx * BLOCK], part)
            else:
                for j in T.Parallel(BLOCK):
                    if bx * BLOCK + j < N:
                        if how == "add":
                            out[at, bx * BLOCK + j] += part[j]
                        else:
                            out[at, bx * BLOCK + j] = part[j] * 2.0
                            out[0, bx * BLOCK + j] = part[j] * 3.0

    return kernel


def expected(how, at, a, before):
    after = before.clone()
    if how in ("add", "atomic"):
        after[at] += a
    elif how == "two rows":
        after[at], after[0] = a * 2, a * 3
    else:
        after[at] = a if how == "copy" else 3.0
    return after


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("how", ["copy", "fill", "atomic", "add", "two rows"])
def test_rows(how, mesh):
    a, before = torch.randn(N), torch.randn(5, N)
    layouts = {"A": {"y": 0}, "out": {"x": 0, "y": 1}} if "y" in mesh else {"out": {"x": 0}}
    for at in (1, 4):
        annotated = mt.annotate(put(how, at), mesh, layouts)
        assert [str(step) for step in outline(lowered(put(how, at), mesh, layouts))] == ["kernel(A, out)"]
        for options in ({"target": "interpret", "poison": True, "strict": True}, {"target": "c"}):
            if options["target"] == "c" and at == 1:
                continue
            result = mt.compile(annotated, **options)(a.clone(), before.clone())
            torch.testing.assert_close(result, expected(how, at, a, before))


def moments(m=21, n=45, block_m=8):
    """Per row its sum, and the square of that, side by side."""

    @T.prim_func
    def kernel(A: T.Tensor((m, n), "float32"), out: T.Tensor((m, 2), "float32")):
        with T.Kernel(T.ceildiv(m, block_m), threads=128) as bx:
            part = T.alloc_fragment((block_m, BLOCK), "float32")
            total = T.alloc_fragment((block_m,), "float32")
            T.clear(total)
            for k in T.serial(T.ceildiv(n, BLOCK)):
                T.copy(A[bx * block_m, k * BLOCK], part)
                T.reduce_sum(part, total, dim=1, clear=False)
            for i in T.Parallel(block_m):
                if bx * block_m + i < m:
                    out[bx * block_m + i, 0] = total[i]
                    out[bx * block_m + i, 1] = total[i] * total[i]

    return kernel


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("cheap", [False, True])
def test_beside_what_else_an_axis_may_split(mesh, cheap):
    """Sums over the columns are partial; the rows may be split instead, or the places of the results."""
    a, other = torch.randn(21, 45), "y" if "y" in mesh else "x"
    wanted = torch.stack([a.sum(1), a.sum(1) ** 2], 1)
    for mine in ({"x": 0}, {"x": 1}, {other: 1}):
        annotated = mt.annotate(moments(), mesh, {"A": mine, "out": {"x": 1}})
        if cheap:
            with planned_for(AT_ONCE):
                kernel = mt.compile(annotated, target="interpret", poison=True)
        else:
            kernel = mt.compile(annotated, target="interpret", poison=True)
        torch.testing.assert_close(kernel(a), wanted, rtol=1e-4, atol=1e-4)


def test_what_is_read_back_is_not_left_to_one_device():
    """Every program needs what was put there."""

    @T.prim_func
    def kernel(A: T.Tensor((24,), "float32"), out: T.Tensor((4,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=32):
            out[2] = A[0] + A[1]
            for i in T.Parallel(24):
                B[i] = A[i] * out[2]

    a, before = torch.randn(24), torch.randn(4)
    annotated = mt.annotate(kernel, {"x": 2}, {"out": {"x": 0}, "B": {"x": 0}})
    out, result = mt.compile(annotated, target="interpret", poison=True)(a, before.clone(), torch.zeros(24))
    put_there = before.clone()
    put_there[2] = a[0] + a[1]
    torch.testing.assert_close((out, result), (put_there, a * put_there[2]))
