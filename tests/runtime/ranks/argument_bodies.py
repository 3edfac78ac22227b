"""Arguments that are not what they seem: each body returns the messages that its rank raised, and leaves a group that
can be used."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.refusals import refusal
from tests.runtime.programs import axpy_kernel

from .fault_bodies import assert_usable


def placements_that_mean_more(rank):
    """Partial with a mask, with a root to be taken, with an average; a shard of strided parts."""
    mesh, kern = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), k_split()
    a, b = torch.randn(8, 8), distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])
    table = distribute_tensor(torch.randn(10, 8), mesh, [Shard(0)])
    embedded = F.embedding(distribute_tensor(torch.tensor([0, 9, 3, 7, 5, 1, 2, 8]), mesh, [Replicate()]), table)
    norm = torch.linalg.vector_norm(distribute_tensor(a, mesh, [Shard(0)]))
    strided = DTensor.from_local(a[rank * 4 :][:4], mesh, [_StridedShard(0, split_factor=2)])
    texts = [
        refusal(lambda: kern(embedded, b)),
        refusal(lambda: mt.redistribute(embedded, {})),
        refusal(lambda: mt.redistribute(norm, {})),
        refusal(lambda: mt.from_dtensor(norm)),
        refusal(lambda: kern(DTensor.from_local(a, mesh, [Partial("avg")]), b)),
        refusal(lambda: kern(strided, b)),
    ]
    assert_usable()
    return texts


def parts_of_other_sizes(rank):
    """Parts that DTensor.from_local takes, but that are not as torch cuts them; then the group works."""
    mesh, kern = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), k_split()
    a = torch.randn(8, 8)
    good = distribute_tensor(a, mesh, [Shard(0)])
    odd = DTensor.from_local((a[:1], a[1:])[rank], mesh, [Shard(0)], run_check=False, shape=a.shape, stride=a.stride())
    texts = [refusal(lambda: kern(good, odd))]
    assert torch.equal(kern(good, good).full_tensor(), kern(a, a))
    texts += [refusal(lambda: mt.redistribute(odd, {"x": 1})), refusal(lambda: mt.from_dtensor(odd))]
    assert torch.equal(mt.from_dtensor(mt.redistribute(good, {"x": 1})).full(), a)
    texts.append(refusal(lambda: kern(good, odd)))
    assert_usable()
    return texts


def part_of_another_size_on_one_rank(rank):
    """Only rank 1's part is not as torch cuts it: both refuse."""
    mesh, kern = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), k_split()
    part = torch.ones((4, 3)[rank], 8)
    odd = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=(8, 8), stride=(8, 1))
    texts = [refusal(lambda: kern(odd, odd)), refusal(lambda: mt.redistribute(odd, {}))]
    texts.append(refusal(lambda: mt.from_dtensor(odd)))
    assert_usable()
    return texts


def wrong_on_one_rank(rank):
    """Rank 1's first call is no call at all; both refuse at once, and a later call works."""
    a, b = torch.ones(8, 4), torch.ones(4, 8)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    da = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    calls = [
        (lambda kern: kern.local(a, b), lambda kern: kern.local(a)),
        (lambda kern: kern.local(a, b), lambda kern: kern.local(a, b, shapes=[8, 8])),
        (lambda kern: kern.local(a, b), lambda kern: kern.local(a, b, shapes={"A": [[8], 8]})),
        (lambda kern: kern.local(a, b), lambda kern: kern.local(a.to_sparse_csr(), b)),
        (lambda kern: kern(da, da), lambda kern: kern(da)),
        (lambda kern: kern.local(a, B=b), lambda kern: kern.local(a, b=b)),
        (lambda kern: kern(B=da, A=da), lambda kern: kern(da, A=da)),
    ]
    texts = []
    for pair in calls:
        kern = k_split()
        texts.append(refusal(lambda kern=kern, pair=pair: pair[rank](kern)))
        assert kern.local(a, b).eq(8).all()
    assert_usable()
    return texts


def scalars_that_are_none(rank):
    """Numbers are checked at every call, whatever was called before."""
    kern = mt.compile(mt.annotate(axpy_kernel(8), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}), target="c")
    kern_on_parts = partial(kern.local, torch.ones(4), 2.0, torch.zeros(4))
    texts = []
    for number in (1.5, "7", 2**31, -(2**40)):
        assert kern_on_parts(1).eq(3).all()
        texts.append(refusal(lambda number=number: kern_on_parts(number)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    whole = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    assert kern(whole, 2.0, whole, 1).to_local().eq(3).all()
    texts.append(refusal(lambda: kern(whole, 2.0, whole, 2**31)))
    assert_usable()
    return texts


def memory_that_is_shared(rank):
    """A result can't be written where several of its elements are one in memory."""
    kern, out = k_split(), torch.zeros(1, 8)
    text = refusal(lambda: kern.local(torch.ones(8, 4), torch.ones(4, 8), out.expand(8, 8)))
    assert out.eq(0).all()
    rows = torch.zeros(8, 16)[:, ::2]
    assert kern.local(torch.ones(8, 4), torch.ones(4, 8), rows).eq(8).all()
    return text


def device_meshes_that_look_alike(rank):
    """The same ranks in another order."""
    kern = k_split()
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("x",)) for ranks in ([0, 1], [1, 0])]
    one, other = (DTensor.from_local(torch.ones(8, 8), mesh, [Replicate()], run_check=False) for mesh in meshes)
    return refusal(lambda: kern(one, other))


def dtypes_that_torch_can_not_gather(rank):
    """Layouts that torch splits otherwise than we: it gathers them, in dtypes that gloo does not know, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    at = mesh.get_coordinate()
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint32):
        whole = torch.randint(0, 100, (5, 3)).to(dtype)
        rows = [(0, 2, 3), (3, 4, 5)][at[0]]
        part = whole[rows[at[1]] : rows[at[1] + 1]]
        given = DTensor.from_local(part, mesh, [Shard(0), Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1))
        made = mt.redistribute(given, {})
        assert torch.equal(made.to_local().view(torch.uint8), whole.view(torch.uint8)), dtype
        back = mt.redistribute(made, {"x": 0, "y": 0})
        assert torch.equal(back.to_local().view(torch.uint8), part.view(torch.uint8)), dtype
        assert torch.equal(mt.from_dtensor(given).full().view(torch.uint8), whole.view(torch.uint8)), dtype


def views_that_are_not_as_their_memory(rank):
    """Conjugates and negated views, which torch computes when it reads them."""
    mesh, kern = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), k_split()
    whole, ones = torch.randn(4, 4, dtype=torch.complex64), torch.ones(8, 8)
    given = DTensor.from_local(whole[rank * 2 :][:2].conj(), mesh, [Shard(0)])
    assert torch.equal(mt.redistribute(given, {}).to_local(), whole.conj())
    assert torch.equal(mt.redistribute(given, {"x": 1}).to_local(), whole.conj()[:, rank * 2 :][:, :2])
    assert torch.equal(mt.from_dtensor(given).full(), whole.conj())
    negated = torch._neg_view(ones[:, :4].contiguous())
    assert kern.local(negated, ones[:4]).eq(-8).all()
    named = ones[:, :4].as_subclass(type("Named", (torch.Tensor,), {}))
    assert type(kern.local(named, ones[:4])) is torch.Tensor
    assert kern.local(named.contiguous(), ones[:4]).eq(8).all()
    text = refusal(
        lambda: kern(DTensor.from_local(negated, mesh, [Shard(1)]), distribute_tensor(ones, mesh, [Shard(0)]))
    )
    assert "parameter 'A': a view that torch negates when it reads it" in text


def fake_group(rank):
    """A process group that only pretends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return refusal(lambda: k_split().local(torch.ones(8, 4), torch.ones(4, 8)))


def ranks_in_another_order(rank):
    """A DeviceMesh whose ranks do not ascend: torch would gather in the wrong order, so what needs that is refused;
    what we move is right."""
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("x", "y"))
    at, whole = mesh.get_coordinate(), torch.randn(5, 4)
    form = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    rows = [(0, 2, 3), (3, 4, 5)][at[0]]
    nested = DTensor.from_local(whole[rows[at[1]] : rows[at[1] + 1]], mesh, [Shard(0), Shard(0)], **form)
    plain = DTensor.from_local(whole[:3] if at[0] == 0 else whole[3:], mesh, [Shard(0), Replicate()], **form)
    func = mt.annotate(matmul(4, 4, 4), {"x": 2, "y": 2}, {"A": {"x": 1, "y": 1}, "B": {"x": 0, "y": 0}, "C": {}})
    op = mt.as_custom_op(mt.compile(func, target="interpret"), "in_another_order", device_mesh=mesh)
    square = DTensor.from_local(torch.ones(4, 4)[:2], mesh, [Shard(0), Replicate()])
    texts = [
        refusal(lambda: mt.redistribute(nested, {})),
        refusal(lambda: mt.from_dtensor(nested)),
        refusal(lambda: op(square, square)),
    ]
    assert torch.equal(mt.redistribute(plain, {}).to_local(), whole)
    assert torch.equal(mt.redistribute(plain, {"x": 0, "y": 0}).to_local(), nested.to_local())
    assert_usable()
    return texts


def reductions_without_a_meaning(rank):
    """Complex numbers have no order and no bits to combine."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    part = torch.ones(4, dtype=torch.complex64)
    ops = ("max", "bor")
    texts = [refusal(lambda op=op: mt.redistribute(DTensor.from_local(part, mesh, [Partial(op)]), {})) for op in ops]
    total = mt.redistribute(DTensor.from_local(part, mesh, [Partial("sum")]), {})
    assert total.to_local().eq(dist.get_world_size()).all()
    return texts


def k_split():
    """C = A @ B of (8, 8) tensors, the contracted dim split."""
    func = mt.annotate(matmul(8, 8, 8, 16, 16, 16), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}})
    return mt.compile(func, target="interpret")
