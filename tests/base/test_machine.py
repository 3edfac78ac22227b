"""Machines: rates by dtype, by size and by distance, names, and text."""

from dataclasses import replace

import pytest
import torch

from mesh_tensor.base.machine import Link, Machine, Memory, Roofline, Tuning
from mesh_tensor.base.machine_presets import CPU, PRESETS

SMALL = Machine(
    "small",
    {"float32": 1e12, "float16": 4e12},
    (Memory(1000, 1e12), Memory(10**9, 1e11)),
    (Link("near", 4, rate=1e10, start=1e-6), Link("far", 64, rate=1e9, start=1e-5, hop=1e-6)),
    classes={"matmul": Roofline(start=1e-6, flops=0.5), "elementwise": Roofline(memory=0.5)},
)


def test_rates_are_by_dtype_and_integers_count_as_float32():
    assert (SMALL.peak("float16"), SMALL.peak("float32"), SMALL.peak("int64"), SMALL.peak("bool")) == (
        4e12,
        1e12,
        1e12,
        1e12,
    )


def test_rates_of_torch_dtypes():
    assert (SMALL.peak(torch.float16), SMALL.peak(torch.int64)) == (4e12, 1e12)


@pytest.mark.parametrize(("nbytes", "rate"), [(0, 1e12), (1000, 1e12), (1001, 1e11), (10**12, 1e11)])
def test_the_nearest_memory_that_holds_the_bytes_counts(nbytes, rate):
    assert SMALL.memory_rate(nbytes) == rate


@pytest.mark.parametrize(("devices", "name"), [(1, "near"), (4, "near"), (5, "far"), (64, "far")])
def test_the_innermost_link_that_reaches_counts(devices, name):
    assert SMALL.link(devices).name == name


@pytest.mark.parametrize(("ends", "name"), [((0, 3), "near"), ((5, 7), "near"), ((3, 4), "far"), ((0, 63), "far")])
def test_devices_of_one_block_are_joined_inside_it(ends, name):
    assert SMALL.joining(*ends).name == name


def test_an_operator_takes_as_long_as_the_slower_of_its_operations_and_its_bytes():
    assert SMALL.work(1e12, 10**6, "float32").seconds == 1.0
    assert SMALL.work(1, 10**11, "float32").seconds == 1.0
    assert SMALL.work(1e12, 10**6, "float32", "matmul").seconds == pytest.approx(2.0 + 1e-6)
    assert SMALL.work(1, 10**11, "float32", "nn.relu", "elementwise").seconds == 2.0  # the first name that there is
    assert [SMALL.work(*work, "float32", "matmul").bound for work in ((1e12, 1), (1, 1e9), (1, 1))] == [
        "flops",
        "memory",
        "start",
    ]


def test_equal_machines_are_equal_and_hash_alike():
    other = replace(SMALL, flops=dict(SMALL.flops))
    assert other == SMALL
    assert hash(other) == hash(SMALL)
    assert replace(SMALL, launch=1e-6) != SMALL
    assert replace(SMALL, classes={}) != SMALL


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_rates_links_and_sources_and_come_back_from_text(name):
    machine = Machine.preset(name)
    assert machine.links
    assert machine.sources
    assert Machine.from_text(machine.to_text()) == machine
    assert f"machine {machine.name}" in str(machine)


def test_a_preset_may_say_how_many_devices_it_has():
    machine = Machine.preset("h100x16")
    assert (machine.name, machine.devices) == ("h100x16", 16)
    assert replace(machine, name="h100", devices=None) == Machine.preset("h100")
    assert machine.link(8).name == "NVLink"
    assert (machine.launch, machine.call, machine.busy) == (2e-6, 0.0, 0.1)
    assert machine.link(16).name == "network"


def test_text_keeps_every_field():
    machine = replace(SMALL, launch=1e-6, busy=0.5, devices=8, price=2.5, tuning=Tuning(stack=7), sources={"all": "me"})
    assert Machine.from_text(machine.to_text()) == machine


def test_the_table_says_what_the_machine_can_do():
    lines = str(SMALL).splitlines()
    assert lines[1] == "  devices  float32 1 T, float16 4 T flop/s"
    assert lines[2] == "  memory   1 kB at 1 TB/s; 1 GB at 100 GB/s"
    assert "  far      up to 64: 1 GB/s, starts in 10 us, 1 us per further message" in lines
    assert "  class    matmul: 1 us and 50% of flop/s, 100% of bytes/s" in lines


def test_plans_are_made_for_what_cpu_ranks_were_measured_to_do():
    assert CPU.flops_per_byte == 64
    assert CPU.bytes_per_start == 200_000


def test_a_mesh_lies_where_it_starts():
    near, node, far = Link("pair", 2, 4.0, 0.0), Link("node", 8, 2.0, 0.0), Link("network", None, 1.0, 0.0)
    machine = Machine("nodes", {"float32": 1.0}, (Memory(1, 1.0),), (near, node, far))
    assert machine.seen_from(0, 64) is machine
    assert machine.seen_from(2, 4) is machine  # in one node
    assert machine.seen_from(8, 16) is machine
    assert [machine.seen_from(4, 8).link(n).name for n in (2, 4, 8)] == ["pair", "node", "network"]
    assert [machine.seen_from(6, 4).link(n).name for n in (2, 4)] == ["pair", "network"]
    assert [machine.seen_from(7, 4).link(n).name for n in (2, 4)] == ["network", "network"]
