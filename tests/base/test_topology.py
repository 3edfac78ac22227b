"""Several meshes with names, and their devices."""

import pickle

import pytest

from mesh_tensor import Mesh, MeshTensorError, Topology


def test_devices_are_numbered_in_order():
    topology = Topology({"m0": {"x": 2}, "m1": Mesh({"x": 2, "y": 2})})
    assert topology.names == tuple(topology) == ("m0", "m1")
    assert len(topology) == 2
    assert "m1" in topology
    assert topology["m1"] == Mesh({"x": 2, "y": 2})
    assert [topology.devices(name) for name in topology] == [(0, 1), (2, 3, 4, 5)]
    assert topology.places(4) == (("m1", 2),)
    assert topology.num_devices == 6
    assert topology.is_disjoint


def test_meshes_may_share_devices_where_that_is_said():
    topology = Topology({"a": {"x": 2}, "b": {"x": 2}}, devices={"a": [0, 1], "b": [1, 2]})
    assert topology.places(1) == (("a", 1), ("b", 0))
    assert topology.num_devices == 3
    assert not topology.is_disjoint


def test_it_is_a_value():
    one, other = Topology({"a": {"x": 2}}), Topology({"a": {"x": 2}}, devices={"a": [1, 0]})
    assert one == Topology(one)
    assert one != other
    assert one != 3
    assert hash(one) == hash(Topology({"a": {"x": 2}}))
    assert pickle.loads(pickle.dumps(other)) == other
    assert repr(one) == 'Topology({"a": {"x": 2}})'
    assert repr(other) == 'Topology({"a": {"x": 2}}, devices={\'a\': (1, 0)})'
    with pytest.raises(AttributeError, match="a Topology is immutable: can't set 'names'"):
        one.names = ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology([1]), r"a topology is a dict from names to meshes, not \[1\]"),
        (lambda: Topology({}), "the topology has no mesh"),
        (lambda: Topology({"": {"x": 1}, 3: {"x": 1}}), r"(?s)mesh name '' is not a non-empty str.*mesh name 3 is not"),
        (lambda: Topology({"a": {"x": 0}}), "axis 'x' has size 0"),
        (lambda: Topology({"mesh0": {"x": 1}})["mesh1"], r"no mesh is called 'mesh1'; did you mean 'mesh0'\?"),
        (lambda: Topology({"a": {"x": 2}}, devices={"a": [0]}), "mesh 'a' has 2 devices, but 1 are given"),
        (lambda: Topology({"a": {"x": 2}}, devices={"a": [0, 0]}), "mesh 'a' has device 0 twice"),
        (lambda: Topology({"a": {"x": 2}}, devices={"a": [0, 2]}), "device 1 is in no mesh"),
        (lambda: Topology({"a": {"x": 1}}, devices={"a": [-1]}), "which are not all numbers from 0"),
        (lambda: Topology({"a": {"x": 1}}, devices={"b": [0]}), r"(?s)'b', which is no mesh.*no devices for mesh 'a'"),
    ],
)
def test_what_is_no_topology_is_refused(make, message):
    with pytest.raises(MeshTensorError, match=message):
        make()
