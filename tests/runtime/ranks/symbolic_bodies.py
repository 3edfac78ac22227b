"""Kernels with symbolic sizes, called with local tensors; and what `explain` says of calls on ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import tilelang.language as T
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.refusals import refusal


def even_tiles(rank):
    """Sizes from what is not split, or from tiles that are even: several, in turn, and as with DTensors."""
    kern = symbolic_matmul({"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    for m, n, k in ((4, 6, 8), (5, 3, 2), (4, 6, 8), (1, 20, 36)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        mine = a.chunk(2, 1)[rank].contiguous(), b.chunk(2, 0)[rank].contiguous()
        for _ in range(2):
            c = kern.local(*mine)
            torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
            assert torch.equal(c, kern(a, b))
        out = torch.empty(m, n)
        assert kern.local(*mine, out) is out
        assert torch.equal(out, c)


def uneven_tiles(rank):
    """Sizes that the caller says, with parts and with padded tiles; or that another tensor tells."""
    split = symbolic_matmul({"A": {"x": 0}, "B": {}, "C": {"x": 0}})
    told = symbolic_matmul({"A": {"x": 1}, "B": {}, "C": {}})
    for m, n, k in ((7, 5, 6), (1, 4, 3), (3, 4, 5)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        expected = split(a, b)
        rows = -(-m // 2)
        mine = a[rank * rows : (rank + 1) * rows].clone()
        padded = torch.full((rows, k), float("nan"))
        padded[: len(mine)] = mine
        for part in (mine, padded):
            c = split.local(part, b, shapes={"A": (m, k)})
            assert torch.equal(c, expected[rank * rows : (rank + 1) * rows])
        columns = -(-k // 2)
        c = told.local(a[:, rank * columns : (rank + 1) * columns].contiguous(), b)
        assert torch.equal(c, told(a, b))


class Rows(Sequence):
    """A shape with other rows from call to call, which its repr doesn't show."""

    def __init__(self, columns):
        self.rows, self.columns = 0, columns

    def __len__(self):
        return 2

    def __getitem__(self, dim):
        return (self.rows, self.columns)[dim]


def shapes_that_change(rank):
    """Whole tiles of 5 rows and of 6 look alike; what the caller says of them tells which it is, every time."""
    kern = symbolic_matmul({"A": {"x": 0}, "B": {}, "C": {"x": 0}})
    shape, tile, b = Rows(columns=4), torch.randn(3, 4), torch.randn(4, 5)
    for shape.rows in (6, 5, 6):
        rows = 3 if rank == 0 else shape.rows - 3
        torch.testing.assert_close(kern.local(tile, b, shapes={"A": shape}), tile[:rows] @ b, rtol=1e-4, atol=1e-4)


def expressions(rank):
    """A dim that is an expression of a symbol is checked; a size that is also a parameter is taken from there."""
    n = T.dynamic("n")

    @T.prim_func
    def pairs(A: T.Tensor((n * 2,), "float32"), B: T.Tensor((n,), "float32"), C: T.Tensor((n * 2,), "float32")):
        with T.Kernel(T.ceildiv(n * 2, 16), threads=32) as bx:
            for i in T.Parallel(16):
                if bx * 16 + i < n * 2:
                    C[bx * 16 + i] = A[bx * 16 + i] + 1.0

    kern = mt.compile(mt.annotate(pairs, {"x": 2}, {"A": {"x": 0}, "B": {}, "C": {"x": 0}}), target="interpret")
    a, b = torch.randn(12), torch.zeros(6)
    mine = a[rank * 6 : rank * 6 + 6].clone()
    assert torch.equal(kern.local(mine, b), mine + 1)
    text = refusal(lambda: kern.local(mine, torch.zeros(7)))
    assert "parameter 'A': (6,) torch.float32 on cpu, but expected (7,) torch.float32 on cpu" in text


def new_sizes_without_exchange(rank):
    """Once the ranks have agreed on the kernel, one of them may call it with new sizes by itself where nothing is sent;
    between such calls what was agreed on goes on as it was. A rank that can't run its call says so alone."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    rows, summed = symbolic_matmul({"A": {"x": 0}, "B": {}, "C": {"x": 0}}), symbolic_matmul({"A": {"x": 1}, "C": {}})
    a, b = torch.randn(8, 6), torch.randn(6, 5)
    shared = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    split = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    for kern, tensors in ((rows, shared), (summed, split)):
        torch.testing.assert_close(kern(*tensors).full_tensor(), a @ b)
    for m in (6, 32, 7, 6):
        if rank == 0:
            new = torch.randn(m, 6)
            half = new[: -(-m // 2)].clone()
            part = DTensor.from_local(half, mesh, [Shard(0)], run_check=False, shape=new.shape, stride=new.stride())
            torch.testing.assert_close(rows(part, shared[1]).to_local(), half @ b)
            said = {"A": (m, 6), "B": (6, 5)}
            torch.testing.assert_close(rows.local(half, b, device_mesh=mesh, shapes=said), half @ b)
            assert rows.program.values["A"].shape == (m, 6)
            said["A"] = (m + 2, 6)
            text = refusal(partial(rows.local, half, b, device_mesh=mesh, shapes=said))
            assert "parameter 'A'" in text
        torch.testing.assert_close(summed(*split).to_local(), a @ b)
    torch.testing.assert_close(rows(*shared).full_tensor(), a @ b)


def sizes_that_nothing_tells(rank):
    """What is ambiguous, or contradicts what the caller says, is refused, on every rank before anything is sent."""
    kern = symbolic_matmul({"A": {"x": 0}, "B": {}, "C": {"x": 0}})
    part = torch.ones(4 - rank, 6)
    b = torch.ones(6, 5)
    texts = [
        refusal(lambda: kern.local(part, b)),
        refusal(lambda: kern.local(part, b, shapes={"A": (9, 6)})),
        refusal(lambda: kern.local(part, b, shapes={"D": (8, 6), "A": (7,), "B": (6.5, 5)})),
        refusal(lambda: kern.local(part, b, shapes={"A": (7, 6), "B": (5, 5)})),
        refusal(lambda: kern.local(part, b, shapes={"A": 7})),
        refusal(lambda: kern.local(part, b[0])),
    ]
    assert kern.local(part, b, shapes={"A": (7, 6)}).eq(6).all()
    both = symbolic_matmul({"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    texts.append(refusal(lambda: both.local(torch.ones(4, 3), torch.ones(5, 4))))
    return texts


def explained(rank):
    """`explain` before any call, after calls whose DTensors lie as annotated, and otherwise."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    layouts = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0, "y": 0}}
    kern = mt.compile(mt.annotate(matmul(10, 8, 8), {"x": 2, "y": 2}, layouts), target="interpret")
    a, b = torch.randn(10, 8), torch.randn(8, 8)
    whole, split = [Replicate(), Replicate()], [Shard(0), Shard(1)]
    texts = [kern.explain()]
    kern(distribute_tensor(a, mesh, split), distribute_tensor(b, mesh, [Replicate(), Shard(0)]))
    texts.append(kern.explain())
    partly = DTensor.from_local(b[:, :4].contiguous(), mesh, [Partial("sum"), Shard(1)])
    out = distribute_tensor(torch.zeros(10, 8), mesh, whole)
    kern(distribute_tensor(a, mesh, [Shard(0), Shard(0)]), partly, out)
    texts.append(kern.explain())
    return texts


def strict_refuses(rank):
    """What explain would say is refused under strict=True, on every rank, and nothing is written."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    func = mt.annotate(matmul(8, 8, 8), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    kern, a = mt.compile(func, target="interpret", strict=True), torch.ones(8, 8)
    columns, rows, whole = (distribute_tensor(a, mesh, [p]) for p in (Shard(1), Shard(0), Replicate()))
    texts = [refusal(lambda: kern(whole, whole)), refusal(lambda: kern(columns, rows, rows))]
    assert rows.full_tensor().eq(1).all()
    assert kern(columns, rows).to_local().eq(8).all()
    texts.append(kern.explain())
    return texts


def symbolic_matmul(layouts):
    """C = A @ B for any sizes."""
    m, n, k = (T.dynamic(name) for name in "mnk")
    return mt.compile(mt.annotate(matmul(m, n, k, 16, 16, 16), {"x": 2}, layouts), target="interpret")


def tiles_that_become_uneven(rank):
    """Calls like those before for one rank only: all refuse them, at once, and go on with the next call."""
    whole, b, begun, texts = torch.randn(8, 6), torch.randn(6, 5), time.monotonic(), []
    mine = slice(rank * 4, rank * 4 + 4)
    for layouts in ({"A": {"x": 0}, "B": {}, "C": {"x": 0}}, {"A": {"x": 0}, "B": {}, "C": {}}):
        kern = symbolic_matmul(layouts)
        for _ in range(2):
            for rows in (8, 8, 7):
                part, expected = whole[:rows][mine], (whole @ b)[:rows]
                expected = expected[mine] if layouts["C"] else expected
                said = {"A": (rows, 6)}
                if rows == 8:
                    torch.testing.assert_close(kern.local(part, b), expected)
                else:
                    texts.append(refusal(lambda kern=kern, part=part: kern.local(part, b)))
                    other = part.double() if rank == 1 else whole[mine]
                    texts.append(refusal(lambda kern=kern, other=other: kern.local(other, b)))
                torch.testing.assert_close(kern.local(part, b, shapes=said), expected)
    assert time.monotonic() - begun < 30  # the group's timeout is twice that
    return texts
