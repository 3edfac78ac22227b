"""What is no machine, and what a machine can't do."""

from dataclasses import replace

import pytest

from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.machine import Link, Machine, Memory, Roofline
from tests.refusals import refusal

GOOD = Machine("good", {"float32": 1e12}, (Memory(10**9, 1e11),), (Link("wire", 8, rate=1e9, start=1e-5),))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"flops": {}}, "no rate of operations (flops)"),
        ({"flops": {"float32": 0}}, "flops of float32 is 0"),
        ({"flops": {"float32": float("nan")}}, "flops of float32 is nan"),
        ({"flops": {"float32": float("inf")}}, "flops of float32 is inf"),
        ({"flops": {"float32": 1e-300}}, "flops of float32 is 1e-300"),
        ({"memory": (Memory(10**9, 1e300),)}, "memory[0].rate is 1e+300"),
        ({"call": 1e300}, "call is 1e+300"),
        ({"flops": {"float32": "1e12"}}, "flops of float32 is '1e12'"),
        ({"memory": ()}, "no memory"),
        ({"memory": (Memory(10, 1.0), Memory(5, 1.0))}, "memory are not in order"),
        ({"links": (Link("a", None, 1.0, 0.0), Link("b", 8, 1.0, 0.0))}, "links are not in order"),
        ({"links": (Link("a", 8, rate=-1.0, start=0.0),)}, "rate of link a is -1.0"),
        ({"links": (Link("a", 8, rate=1.0, start=-1e-6),)}, "start of link a is -1e-06"),
        ({"launch": -1.0}, "launch is -1.0"),
        ({"busy": 1.5}, "busy is 1.5, a share"),
        ({"devices": 0}, "devices is 0"),
        ({"devices": 2.5}, "devices is 2.5, no whole number above 0"),
        ({"processor": 3}, "processor is 3, no text"),
        ({"processors": True}, "processors is True, no whole number above 0"),
        ({"links": (Link("a", 0, 1.0, 0.0),)}, "devices of link a is 0, no whole number above 0"),
        ({"links": (Link("a", "8", 1.0, 0.0),)}, "devices of link a is '8', no whole number above 0"),
        ({"flops": {"float32": 10**400}}, "flops of float32 is 1000"),
        ({"cold_start": -0.5}, "cold_start is -0.5"),
        ({"cold_start": "x"}, "cold_start is 'x'"),
        ({"apart": -1e-6}, "apart is -1e-06"),
        ({"result": float("nan")}, "result is nan"),
        ({"name": ""}, "its name is ''"),
        ({"classes": {"matmul": Roofline(flops=0.0)}}, "flops of class matmul is 0.0"),
        ({"flops": {3: 1.0}}, "flops has the name 3, no text"),
        ({"links": (Link(["a"], 8, 1.0, 0.0),)}, "a link's name is ['a']"),
        ({"links": (Link("a", 4, 1.0, 0.0), Link("a", 8, 1.0, 0.0))}, "2 links are called 'a'"),
        ({"links": (Link("device", 8, 1.0, 0.0),)}, "a link is called 'device'"),
    ],
)
def test_numbers_that_can_not_be(change, fact):
    message = refusal(replace, GOOD, **change)
    assert fact in message
    assert "fix: rates and sizes are numbers above 0" in message


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"flops": [1]}, "flops is [1], no mapping"),
        ({"sources": None}, "sources is None, no mapping"),
        ({"memory": None}, "memory has None, no Memory"),
        ({"memory": (1, Memory(1, 1.0))}, "memory has 1, no Memory"),
        ({"links": "ab"}, "links has 'a', no Link"),
        ({"classes": {"matmul": 3}}, "classes has 3, no Roofline"),
        ({"tuning": None}, "tuning has None, no Tuning"),
        ({"memory": Memory(1, 1.0)}, "memory is Memory(size=1, rate=1.0), no list of them"),
    ],
)
def test_parts_of_other_kinds(change, fact):
    message = refusal(replace, GOOD, **change)
    assert fact in message


def test_all_that_is_wrong_is_told_at_once():
    message = refusal(replace, GOOD, flops={"float32": 0}, launch=-1.0)
    assert message.startswith("2 problems:\n  - flops of float32 is 0\n  - launch is -1.0\n")


def test_a_dtype_without_a_rate():
    message = refusal(GOOD.peak, "bfloat16")
    assert "no rate of operations on bfloat16" in message
    assert "it has rates for 'float32'" in message
    assert "'bfloat16': ..." in message


def test_more_devices_than_anything_connects():
    with pytest.raises(MeshTensorError, match="nothing connects 9 devices") as caught:
        GOOD.link(9)
    assert "its links reach 8" in str(caught.value)
    with pytest.raises(MeshTensorError, match="nothing connects 9 devices"):
        GOOD.joining(7, 8)
    with pytest.raises(MeshTensorError, match="it has no links"):
        replace(GOOD, links=()).link(2)
    with pytest.raises(MeshTensorError, match="it has no links"):
        assert replace(GOOD, links=()).flops_per_byte


def test_more_devices_than_there_are():
    message = refusal(lambda: GOOD.with_devices(4).check_holds(8, "the mesh {'x': 8}"))
    assert "the mesh {'x': 8} has 8 devices, the machine 4" in message
    assert "machine.with_devices(8)" in message
    GOOD.check_holds(8, "the mesh")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("{", "a machine's text is no JSON"),
        ("[]", "a machine's text is [], no object"),
        ("[" * 100_000, "a machine's text is no JSON"),
        ('{"name": "a"}', "it has no flops"),
        ('{"name": "a", "flop": {}, "memory": []}', "a machine has no 'flop'; did you mean 'flops'?"),
        ('{"name": "a", "flops": {"float32": 1}, "memory": [{"size": 1, "rat": 1}]}', "memory has no 'rat'"),
        ('{"name": "a", "flops": {"float32": 1}, "memory": [{"size": 1}]}', "memory has size, and needs size, rate"),
        ('{"name": "a", "flops": 3, "memory": []}', "flops is 3, no object"),
        ('{"name": "a", "flops": {"float32": 1}, "memory": [{"size": "x", "rate": 1}]}', "memory[0].size is 'x'"),
        (
            '{"name": "a", "flops": {"float32": 1}, "memory": [{"size": 1, "rate": 1}], "devices": "x"}',
            "devices is 'x'",
        ),
        ('{"name": "a", "flops": {"float32": 1}, "memory": [{"size": 1, "rate": 1}], "price": "x"}', "price is 'x'"),
        ('{"name": "a", "flops": {"float32": 1}, "memory": [{"size": 1, "rate": 1}], "tuning": {"stak": 1}}', "'stak'"),
    ],
)
def test_text_that_is_no_machine(text, fact):
    message = refusal(Machine.from_text, text)
    assert fact in message


def test_an_unknown_preset():
    message = refusal(Machine.preset, "h1000x8")
    assert "there is no machine 'h1000x8'; did you mean 'h100'?" in message
    assert "'a100'" in message


def test_a_preset_of_more_devices_than_can_be_counted():
    with pytest.raises(MeshTensorError, match="there is no machine"):
        Machine.preset("h100x" + "9" * 5000)
