"""Clause 8: where nothing is known of what an iteration makes of a state, devices take turns, and each hands on what it
ends with. What a loop does beside that is left to all of them at the same time."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

import mesh_tensor as mt
from kernels.recurrences import delta_states, delta_states_reference, recurrent_network, recurrent_network_reference
from mesh_tensor.lowering.pipeline import lower_kernel
from tests.other_machines import machine

from .support import local_kernels, nodes, outline
from .turn_kernels import (
    all_from_each,
    as_data_say,
    by_way_of_another,
    counted_drops,
    last_row,
    of_all_rows,
    ordered_pipeline,
    softmax_on_the_way,
    sums_of_blocks,
    there_and_back,
    with_a_copy,
)


def annotated(func, mesh, dims):
    return mt.annotate(func, mt.Mesh(mesh), {name: dict.fromkeys(mesh, dim) for name, dim in dims.items()})


def compiled(func, mesh, dims):
    """For a machine on which bytes are all that counts."""
    with machine(1):
        return mt.compile(annotated(func, mesh, dims), target="interpret", poison=True)


def check(func, mesh, dims, inputs):
    """The kernel, split that way, gives what it gives unsplit, and gathers no input."""
    kernel, alone = compiled(func, mesh, dims), compiled(func, {"x": 1}, {})
    results, expected = (made(*(tensor.clone() for tensor in inputs)) for made in (kernel, alone))
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert "_turn0" in kernel.explain()
    assert not any(f"{name}.1" in kernel.explain() for name in dims)


def test_each_device_hands_on_to_the_next_and_the_rest_is_for_all():
    with machine(1):
        made = outline(lower_kernel(annotated(there_and_back(64, 4), {"x": 3}, {"X": 0, "Y": 0, "Z": 0})))
    there = [
        "kernel(X, there_turn0_w1)",
        "halo(there_turn0_w1, x)",
        "kernel(there_turn0_w1.1, there_next1_w1)",
        "kernel(X, there_next1_w1, there_turn1_w1)",
        "halo(there_turn1_w1, x)",
        "kernel(there_turn1_w1.1, there_start_w1)",
        "kernel(X, there_start_w1, there_turn2_w1)",
        "halo(there_turn2_w1, x)",
        "kernel(there_turn2_w1.1, there_end_w1)",
    ]
    assert made[: len(there)] == there
    assert [step for step in made if "all_gather" in step] == []


def test_a_kernel_says_that_devices_wait():
    rule = mt.sharding_rule(recurrent_network(8, 8, 4))
    assert "turns" in rule.factors.values()
    alone, text = (
        compiled(there_and_back(31, 8), mesh, dict.fromkeys("XYZ", 0)).explain()
        for mesh in ({"x": 1}, {"x": 3, "y": 1})
    )
    assert "devices take turns" not in alone
    there, back = text.split("devices take turns\n")[1].split("\n")[:2]
    assert "along x, from the first device on, each makes there in its part of loop t" in there
    assert "along x, from the last device on, each makes back in its part of loop t" in back
    assert "to the one before it, which waits for it" in back


KERNELS = {
    "drops": (counted_drops(80), {"X": 0, "Y": 0}, [(80,)]),
    "back": (there_and_back(31, 8), {"X": 0, "Y": 0, "Z": 0}, [(31, 8)]),
    "last": (last_row(40, 4), {"X": 0}, [(40, 4)]),
    "softmax": (softmax_on_the_way(4, 240), {"X": 1, "Y": 1}, [(4, 240)]),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 5}, {"x": 2, "y": 2}])
def test_what_nothing_is_known_of(name, mesh):
    func, dims, shapes = KERNELS[name]
    if name == "softmax" and mesh != {"x": 5}:
        mesh = {"x": 3} if mesh == {"x": 2} else mesh
    check(func, mesh, dims, [torch.randn(shape) for shape in shapes])


def test_what_data_say():
    check(
        as_data_say(31, 4), {"x": 3}, {"X": 0, "G": 0, "Y": 0}, [torch.randn(31, 4), torch.randint(0, 2, (31,)).int()]
    )


@pytest.mark.parametrize(
    ("kind", "is_made_again"),
    [("zero", True), ("rounded", True), ("both", True), ("else", False), ("before", False), ("times", False)],
)
@pytest.mark.parametrize("devices", [2, 3])
def test_copies_of_a_state_are_made_again(kind, is_made_again, devices):
    func, dims, inputs = with_a_copy(61, 4, kind), {"X": 0, "Y": 0}, [torch.randn(61, 4), torch.randn(4)]
    check(func, {"x": devices}, dims, inputs)
    assert ("used_turn0" in compiled(func, {"x": devices}, dims).explain()) is not is_made_again


@pytest.mark.parametrize(("steps", "devices"), [(64, 4), (63, 4), (33, 5), (16, 3)])
def test_a_network(steps, devices):
    inputs = [torch.randn(steps, 5, 8), torch.randn(8, 8) * 0.3, torch.randn(5, 8)]
    kernel = compiled(recurrent_network(steps, 5, 8, block=4), {"x": devices}, {"X": 0, "Y": 0})
    assert "state_turn0" in kernel.explain()
    torch.testing.assert_close(kernel(*inputs), recurrent_network_reference(*inputs), rtol=1e-4, atol=1e-5)


def test_a_network_on_more_devices_than_wait_for_each_other_is_whole():
    inputs = [torch.randn(40, 4, 4), torch.randn(4, 4) * 0.3, torch.randn(4, 4)]
    kernel = compiled(recurrent_network(40, 4, 4, block=4), {"x": 20}, {"X": 0, "Y": 0})
    assert "would be handed on from device to device 19 times, of at most 15" in kernel.explain()
    torch.testing.assert_close(kernel(*inputs), recurrent_network_reference(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "h": 2}])
def test_the_delta_rule_by_chunks(mesh):
    shapes = [(1, 256, 2, 8)] * 2 + [(1, 256, 2, 4), (1, 256, 2), (1, 2, 8, 4)]
    inputs = [torch.randn(shape) * 0.3 for shape in shapes]
    heads = {"h": 2} if "h" in mesh else {}
    layouts = {name: {"x": 1, **heads} for name in ("K", "W", "U", "G", "H", "V_new")}
    func = delta_states(1, 256, 2, 8, 4, chunk=16, block=4)
    with machine(1):
        kernel = mt.compile(mt.annotate(func, mt.Mesh(mesh), layouts), target="interpret", poison=True)
    assert "state_turn0" in kernel.explain()
    assert "K.1" not in kernel.explain()
    torch.testing.assert_close(kernel(*inputs), delta_states_reference(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("dims", [{"X": 0, "Z": 0, "Y": 0}, {"Z": 0, "Y": 0}])
def test_iterations_that_walk_all_rows_are_not_split(linear, dims):
    func, inputs = of_all_rows(6, 4, linear), [torch.randn(6, 4), torch.randn(6, 4)]
    kernel, alone = compiled(func, {"x": 3}, dims), compiled(func, {"x": 1}, {})
    torch.testing.assert_close(kernel(*inputs), alone(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("width", [8, 10])
def test_what_a_state_holds_past_its_end_is_not_lost(linear, width):
    x = torch.randn(12, width)
    kernel = compiled(sums_of_blocks(12, width, linear), {"x": 3}, {"X": 0, "Y": 0})
    row, state = torch.zeros(12, 12), torch.ones(3, 4)
    row[:, :width] = x
    expected = []
    for step in row.reshape(12, 3, 4):
        if linear:
            state = state * 0.5 + step
            expected.append(state.sum(1))
        else:
            expected.append(state.sum(1))
            state = torch.tanh(state * 0.5 + 0.3 * state.sum(1, keepdim=True) + step)
    torch.testing.assert_close(kernel(x), torch.stack(expected)[:, : -(-width // 4)], rtol=1e-4, atol=1e-5)
    assert ("start" in kernel.explain()) == (width == 8)  # else it is whole


@pytest.mark.parametrize("linear", [True, False])
def test_programs_that_walk_the_dim_too_are_not_split(linear):
    func, x = all_from_each(12, linear), torch.randn(12)
    assert mt.sharding_rule(func).factors["m"].startswith("whole")
    state = x
    for step in x:
        state = state * 0.5 + step if linear else torch.tanh(state * 1.5 + step)
    kernel = compiled(func, {"x": 3}, {"X": 0, "Y": 0})
    torch.testing.assert_close(kernel(x), state, rtol=1e-4, atol=1e-5)


def test_an_order_of_statements_is_dropped_where_some_of_them_are():
    func = ordered_pipeline(64, 4)
    with machine(1):
        kernels = local_kernels(lower_kernel(annotated(func, {"x": 2}, {"X": 0, "Y": 0})))
    loops = [loop for kernel in kernels for loop in nodes(kernel, tirx.For) if "num_stages" in loop.annotations]
    orders = [list(loop.annotations.get("tl_pipeline_order", [])) for loop in loops]
    assert orders == [[], [0, 1, 2]]
    check(func, {"x": 2}, {"X": 0, "Y": 0}, [torch.randn(64, 4)])


@T.macro
def _halved(state, other, j):
    other[j] = other[j] + state[j] * 0.5
    state[j] = other[j]


@T.macro
def _taken_from(state, other, j):
    other[j] = other[j] - state[j]
    state[j] = other[j]


@T.macro
def _halved_twice(state, other, j):
    other[j] = other[j] + state[j] * 0.25
    state[j] = state[j] * 0.5 + other[j]


@T.macro
def _added_to(state, other, j):
    other[j] = other[j] - state[j] * 0.25
    state[j] = state[j] + other[j]


#: How a state comes back by way of another buffer, and what it is of itself and of the input then.
BY_WAY_OF_ANOTHER = {
    "halved": (_halved, lambda state, x: state * 0.5 + x),
    "taken from": (_taken_from, lambda state, x: x - state),
    "halved twice": (_halved_twice, lambda state, x: state * 0.75 + x),
    "added to": (_added_to, lambda state, x: state * 0.75 + x),
}


@pytest.mark.parametrize("kind", BY_WAY_OF_ANOTHER)
def test_what_comes_back_by_way_of_another_buffer_is_not_lost(kind):
    update, step = BY_WAY_OF_ANOTHER[kind]
    x, state, found = torch.randn(11, 4), torch.full((4,), 0.5), []
    for row in x:
        state = step(state, row)
        found.append(state)
    kernel = compiled(by_way_of_another(11, 4, update), {"x": 3}, {"X": 0, "Y": 0})
    made, end = kernel(x)
    torch.testing.assert_close(made, torch.stack(found), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end, state, rtol=1e-5, atol=1e-5)
