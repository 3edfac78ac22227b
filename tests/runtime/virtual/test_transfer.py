"""Between any two layouts on two meshes: the same tensor, and no byte more than needed."""

import random
from collections import Counter

import pytest
import torch

import mesh_tensor as mt
from mesh_tensor import Mesh, MeshTensorError, Sharding
from mesh_tensor.redistribution.transfer import TransferPlan
from mesh_tensor.runtime.virtual.mesh_tensor import run_transfer

MESHES = [
    Mesh(axes) for axes in ({"d": 2, "m": 2}, {"d": 3}, {"a": 2, "b": 3}, {"x": 1}, {"x": 4}, {"p": 2, "q": 2, "r": 2})
]

REDUCTIONS = ("sum", "max", "min", "prod")


def random_sharding(draw, mesh, ndim, op):
    choices = [None, *range(ndim), "partial"]
    placed = {axis: draw.choice(choices) for axis in mesh}
    partial = {axis: op for axis, place in placed.items() if place == "partial"}
    return Sharding.make(mesh, ndim, {a: p for a, p in placed.items() if a not in partial}, partial=partial)


@pytest.mark.parametrize("small", [0, 4096])
def test_random_pairs(small):
    draw, crossed_once = random.Random(small), 0
    for number in range(300):
        ops = (REDUCTIONS[number % 4], REDUCTIONS[number // 4 % 4])
        one, other = draw.choice(MESHES), draw.choice(MESHES)
        ndim = draw.randint(0, 3)
        shape = tuple(draw.randint(0 if draw.random() < 0.1 else 1, 9) for _ in range(ndim))
        src, dst = (random_sharding(draw, mesh, ndim, op) for mesh, op in zip((one, other), ops, strict=True))
        whole = torch.randint(-50, 50, shape).float()
        plan = mt.plan_transfer(shape, whole.dtype, src, other, dst, small=small)
        there = run_transfer(plan, mt.distribute(whole, one, src))
        assert (there.mesh, there.sharding) == (other, dst)
        assert torch.equal(there.full(), whole), (src, dst, shape)
        if not dst.partial:
            wanted = mt.distribute(whole, other, dst)
            assert all(torch.equal(there.tile(rank), wanted.tile(rank)) for rank in range(other.num_devices))
        check(plan, whole)
        crossed_once += plan.bytes == whole.numel() * 4
    assert crossed_once > (140 if small == 0 else 100)  # others would be padded, and so are sent to all


def check(plan, whole):
    """Every element arrives where it is needed exactly once, from one that has it."""
    source, landing = plan.before.dst, plan.after.src
    assert not source.partial
    assert not landing.partial
    tiles = mt.distribute(whole, source.mesh, source)
    arrived = {rank: torch.zeros(landing.tile_shape(plan.shape)) for rank in range(landing.mesh.num_devices)}
    for send in plan.sends:
        part = tiles.tile(send.source)[send.source_region]
        assert part.numel() == send.elements > 0
        arrived[send.target][send.target_region] += 1
    for rank, times in arrived.items():
        valid = tuple(slice(0, size) for size in landing.valid_extent(plan.shape, rank))
        assert torch.equal(times[valid], torch.ones_like(times[valid]))
    gathering = mt.plan_redistribution(plan.shape, whole.dtype, plan.src, {})
    assert plan.before.bytes <= gathering.bytes
    assert plan.busiest()[1] + plan.after.bytes <= whole.numel() * 4  # scattering sends no device more


def plan_of(shape, one, src, other, dst, small=0):
    src, dst = Sharding.make(Mesh(one), len(shape), src), Sharding.make(Mesh(other), len(shape), dst)
    return TransferPlan.make(shape, "float32", 4, src, dst, small)


def test_replicas_share_the_work_of_sending():
    plan = plan_of((8, 6), {"x": 4}, {}, {"y": 2}, {"y": 1})
    assert plan.bytes == 8 * 6 * 4
    assert set(Counter(send.source for send in plan.sends)) == {0, 1, 2, 3}
    assert plan.busiest()[0] == plan.bytes // 4


def test_replicas_get_parts_and_spread_them():
    plan = plan_of((8, 6), {"x": 2}, {"x": 0}, {"d": 2, "m": 2}, {"d": 0})
    assert plan.bytes == 8 * 6 * 4
    assert str(plan.after.src) == "S[0], S[0]"
    assert [move.kind for move in plan.after.moves] == ["all_gather"]
    assert "after: (8, 6) float32, 'S[0], S[0]' -> 'S[0], R'" in str(plan)


def test_parts_are_of_the_dim_that_is_padded_least():
    plan = plan_of((6, 34), {"x": 1}, {}, {"p": 5}, {})
    assert str(plan.after.src) == "R"  # parts of 7 columns are 35: more than are sent to all
    plan = plan_of((6, 40), {"x": 1}, {}, {"p": 5}, {})
    assert str(plan.after.src) == "S[1]"
    assert plan.bytes + 5 * plan.after.bytes == 5 * 6 * 40 * 4
    src = Sharding.make(Mesh({"x": 5}), 2, partial={"x": "sum"})
    assert str(TransferPlan.make((6, 34), "float32", 4, src, src, 0).before.dst) == "S[1]"


def test_what_is_small_is_sent_to_all():
    plan = plan_of((8, 6), {"x": 2}, {"x": 0}, {"y": 4}, {}, small=4096)
    assert plan.bytes == 4 * 8 * 6 * 4
    assert not plan.after.moves


def test_what_is_partial_is_reduced_to_parts_first():
    src = Sharding.make(Mesh({"x": 2}), 2, partial={"x": "sum"})
    plan = TransferPlan.make((8, 6), "float32", 4, src, Sharding.make(Mesh({"y": 2}), 2, {"y": 0}), 0)
    assert [move.kind for move in plan.before.moves] == ["reduce_scatter"]
    assert [(send.source, send.target) for send in plan.sends] == [(0, 0), (1, 1)]


def test_meshes_that_are_alike_send_one_message_per_device():
    plan = plan_of((8, 6), {"d": 2, "m": 2}, {"d": 0}, {"d": 2, "m": 2}, {"d": 0})
    assert [(send.source, send.target) for send in plan.sends] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_transfer_takes_any_form_of_a_layout():
    whole = torch.arange(12.0).reshape(3, 4)
    here = mt.distribute(whole, {"x": 2}, {"x": 0})
    for layout in ({"y": 1}, "S[1]", Sharding.make(Mesh({"y": 3}), 2, {"y": 1})):
        assert repr(mt.transfer(here, {"y": 3}, layout)) == 'MeshTensor((3, 4), float32, S[1], Mesh({"y": 3}))'


def test_layouts_of_other_ranks_are_refused():
    with pytest.raises(MeshTensorError, match="why: they are layouts of tensors of different rank"):
        TransferPlan.make((8,), "float32", 4, Sharding.make(Mesh({"x": 2}), 1), Sharding.make(Mesh({"x": 2}), 2))


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        (lambda src: mt.transfer(torch.ones(3), {"d": 3}, {"d": 0}), "is no MeshTensor"),
        (lambda src: mt.transfer(None, {"d": 3}, {"d": 0}), "tensor=None is no MeshTensor"),
        (lambda src: mt.plan_transfer((8, 6), "float32", src, {"d": 3}, {"d": 0}), "dtype='float32' is no dtype"),
        (lambda src: mt.plan_transfer((-8, 6), torch.int8, src, {"d": 3}, {"d": 0}), r"shape=\(-8, 6\)"),
        (
            lambda src: mt.plan_transfer((8, 6), torch.int8, "S[0]", {"d": 3}, {"d": 0}),
            "the layout 'S\\[0\\]' is of no mesh",
        ),
        (lambda src: mt.plan_redistribution((8, 6), None, src, {"x": 1}), "dtype=None is no dtype"),
    ],
)
def test_what_is_no_tensor_on_a_mesh_is_refused(call, fact):
    with pytest.raises(MeshTensorError, match=fact):
        call(Sharding.make(Mesh({"x": 4}), 2, {"x": 0}))
