"""What collectives take: messages, bytes, and the links that groups cross."""

import math

import pytest

from mesh_tensor.base.collectives import collective_time, reach
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.machine import Link, Machine, Memory
from mesh_tensor.base.mesh import Mesh

NEAR, FAR = Link("near", 8, rate=1e10, start=1e-6, hop=1e-7), Link("far", None, rate=1e9, start=1e-5, hop=1e-6)
MACHINE = Machine("nodes of 8", {"float32": 1e12}, (Memory(10**9, 1e11),), (NEAR, FAR))
FLAT = Machine("flat", {"float32": 1e12}, (Memory(10**9, 1e11),), (NEAR,))


def seconds(kind, nbytes, shape, *axes, machine=MACHINE):
    return collective_time(machine, kind, nbytes, Mesh(shape), axes)


@pytest.mark.parametrize(
    ("shape", "axes", "size", "link", "rate"),
    [
        ({"x": 8}, ("x",), 8, "near", 1e10),
        ({"x": 2, "y": 8}, ("y",), 8, "near", 1e10),
        ({"x": 2, "y": 8}, ("x",), 2, "far", 1e9),  # one member per node
        ({"x": 2, "y": 8}, ("x", "y"), 16, "far", 8e9),  # eight members share what a node has
        ({"x": 4, "y": 4}, ("x",), 4, "far", 2e9),  # two per node
        ({"x": 4, "y": 4}, ("y",), 4, "near", 1e10),
        ({"x": 64}, ("x",), 64, "far", 8e9),
        ({"x": 16, "y": 1}, ("y",), 1, "near", 1e10),
    ],
)
def test_a_group_crosses_the_links_that_its_axes_reach(shape, axes, size, link, rate):
    groups = reach(MACHINE, Mesh(shape), axes)
    assert (groups.size, groups.link.name, groups.rate) == (size, link, rate)


def test_a_ring_passes_on_one_message_less_than_it_has_members():
    assert seconds("all_gather", 7e6, {"x": 8}, "x") == pytest.approx(1e-6 + 6e-7 + 7e-4)
    assert seconds("reduce_scatter", 7e6, {"x": 8}, "x") == seconds("all_gather", 7e6, {"x": 8}, "x")


def test_an_all_reduce_goes_around_twice_or_up_and_down_a_tree():
    large, small = 14e6, 14.0
    assert seconds("all_reduce", large, {"x": 8}, "x") == pytest.approx(1e-6 + 13e-7 + large / 1e10)
    assert seconds("all_reduce", small, {"x": 8}, "x") == pytest.approx(1e-6 + 5e-7 + small * 8 / 7 / 1e10)


def test_an_all_to_all_leaves_a_node_over_each_members_own_link():
    """Of 15 parts 8 leave the node, at a tenth of the rate."""
    time = seconds("all_to_all", 15e6, {"x": 2, "y": 8}, "x", "y")
    assert time == pytest.approx(1e-5 + 14e-6 + 8e6 / 1e9)
    assert seconds("all_to_all", 7e6, {"x": 2, "y": 8}, "y") == pytest.approx(1e-6 + 6e-7 + 7e-4)


def test_a_permute_is_one_message():
    assert seconds("permute", 1e6, {"x": 2, "y": 8}, "x") == pytest.approx(1e-5 + 1e-3)


@pytest.mark.parametrize("kind", ["slice", "to_partial"])
def test_what_sends_nothing_takes_no_time_on_links(kind):
    assert seconds(kind, 0, {"x": 8}, "x") == 0.0


def test_axes_of_size_1_take_no_time():
    assert seconds("all_reduce", 100, {"x": 1, "y": 4}, "x") == 0.0


def test_more_devices_cost_a_ring_more_messages():
    times = [seconds("all_gather", 1e6, {"x": 2**n}, "x") for n in range(1, 17)]
    assert times == sorted(times)
    assert math.isfinite(times[-1])


def test_a_group_beyond_all_links_is_refused():
    with pytest.raises(MeshTensorError, match="nothing connects 16 devices") as caught:
        seconds("all_reduce", 1e6, {"x": 16}, "x", machine=FLAT)
    assert "its links reach 8" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "axes", "link", "rate"),
    [
        ({"x": 4, "y": 3}, ("y",), "far", 1e9),  # devices 6, 7 | 8
        ({"x": 2, "y": 6}, ("y",), "far", 2e9),  # 6, 7 | 8 .. 11
        ({"x": 2, "y": 3}, ("y",), "near", 1e10),  # all in one node
        ({"x": 6, "y": 4}, ("y",), "near", 1e10),
        ({"x": 12}, ("x",), "far", 4e9),  # eight, and four
        ({"x": 2, "y": 2, "z": 3}, ("y",), "far", 1e9),  # 6 | 9
    ],
)
def test_groups_that_lie_in_two_nodes_cross_what_connects_these(shape, axes, link, rate):
    groups = reach(MACHINE, Mesh(shape), axes)
    assert (groups.link.name, groups.rate) == (link, rate)


def test_groups_that_lie_in_two_nodes_that_nothing_connects():
    with pytest.raises(MeshTensorError, match="nothing connects 12 devices"):
        reach(FLAT, Mesh({"x": 4, "y": 3}), ("y",))
    assert reach(FLAT, Mesh({"x": 6, "y": 4}), ("y",)).rate == 1e10
