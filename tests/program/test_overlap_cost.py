"""The cost model of overlap: bulk where nothing can be gained, slabs where a collective hides behind a kernel."""

from dataclasses import replace

import pytest

from mesh_tensor.base.collectives import collective_time
from mesh_tensor.base.machine import Link, Machine, Memory
from mesh_tensor.base.machine_presets import CPU, CPU_TO_SPARE
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.program.overlap_sites import Sent, Work, choose, predict

# A second of computing and a second of sending, where neither disturbs the other.
IDEAL = Machine("ideal", {"float32": 1e9}, (Memory(1, 1e12),), (Link("wire", None, rate=1e9, start=0.0),))
TWO = Mesh({"x": 2})


def sent(nbytes):
    return (Sent("all_gather", nbytes, TWO, ("x",)),)


EVEN = Work(flops=10**9, touched=0, repeated=0, sent=sent(10**9))


def slow_to_start(seconds):
    return replace(IDEAL, links=(replace(IDEAL.links[0], start=seconds),))


@pytest.mark.parametrize(("count", "seconds"), [(1, 2.0), (2, 1.5), (4, 1.25), (8, 1.125)])
def test_ideal_pipeline(count, seconds):
    assert predict(EVEN, IDEAL, count) == pytest.approx(seconds)


def test_the_more_slabs_the_better_where_they_cost_nothing():
    assert choose(EVEN, IDEAL).count == 8


def test_latency_limits_the_number():
    assert choose(EVEN, slow_to_start(0.05)).count == 4
    assert choose(EVEN, slow_to_start(0.5)).count == 1


def test_what_every_slab_reads_again_limits_it_too():
    assert choose(replace(EVEN, touched=10**11, repeated=10**11), IDEAL).count == 4


def test_what_a_collective_takes_from_the_kernel_is_not_gained():
    assert choose(EVEN, replace(IDEAL, busy=1.0)).count == 1


def test_little_to_send_is_not_worth_it():
    assert choose(replace(EVEN, sent=sent(10**7)), IDEAL).count == 1


def test_a_memory_bound_kernel_is_as_slow_as_its_memory():
    assert predict(Work(0, 10**12, 0, ()), IDEAL, 1) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [512, 2048, 8192])
def test_with_a_core_per_rank_nothing_is_gained(size):
    """K-split matmul on 2 ranks; also by as much as predictions are wrong, and at any number of slabs."""
    tile = 4 * size**2
    work = Work(size**3, 2 * tile, tile // 2, sent(tile))
    assert choose(work, CPU).count == 1
    assert all(predict(work, CPU, count) > predict(work, CPU, 1) for count in (2, 4, 8))


def test_with_cores_to_spare_a_thin_product_gains():
    """Its collective takes about as long as its kernel."""

    def count(size, depth):
        tile, inputs = 4 * size**2, 4 * size * depth
        return choose(Work(size**2 * depth, tile + inputs, inputs // 2, sent(tile)), CPU_TO_SPARE).count

    assert count(2048, 256) > 1
    assert count(2048, 8192) == 1
    assert count(128, 256) == 1


def test_collectives_cost_what_they_cost_elsewhere():
    """Also over the inner links of a machine that has several kinds."""
    machine = Machine.preset("h100")
    mesh = Mesh({"x": 4, "y": 8})
    for kind, axes in (("all_reduce", ("y",)), ("all_gather", ("x",)), ("all_to_all", ("x", "y"))):
        each = Work(0, 0, 0, (Sent(kind, 10**8, mesh, axes),))
        assert predict(each, machine, 1) == collective_time(machine, kind, 10**8, mesh, axes)
    inner, outer = (predict(Work(0, 0, 0, (Sent("all_gather", 10**8, mesh, (a,)),)), machine, 1) for a in "yx")
    assert inner < outer
