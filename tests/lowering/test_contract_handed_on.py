"""Clause 8: what a loop carries in order and uses on the way is handed on from device to device; where one iteration
makes a linear function, or a maximum, of it, all devices at once, else one after the other."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.linear_attention import linear_attention, linear_attention_reference
from mesh_tensor.lowering.pipeline import lower_kernel
from tests.kernels.adversarial.index_values import argmax_rows
from tests.other_machines import machine

from .scan_kernels import (
    WRONG,
    after_a_sum,
    before_a_sum,
    chunks,
    counted,
    rate_of_the_program,
    running,
    running_wrong,
    skipping,
    skipping_in_torch,
)
from .support import outline

#: An update in a kernel, and in torch; and what the state starts from.
UPDATES = {
    "sum": (lambda s, x: s + x, lambda s, x: s + x, 1.5),
    "decayed": (lambda s, x: s * 0.5 + x, lambda s, x: s * 0.5 + x, 0.0),
    "gated": (lambda s, x: x + (x * 0.3) * s, lambda s, x: x + (x * 0.3) * s, -2.0),
    "alternating": (lambda s, x: s * (-0.5) + x, lambda s, x: s * (-0.5) + x, 0.0),
    "maximum": (lambda s, x: T.max(s, x), torch.maximum, 0.25),
    "starting anew": (
        lambda s, x: T.if_then_else(x > 0.5, 0.0, s) * 0.5 + x,
        lambda s, x: torch.where(x > 0.5, 0.0, s) * 0.5 + x,
        0.75,
    ),
}


def compiled(func, mesh, layouts, *, poison=True):
    """For a machine on which bytes are all that counts: states are handed on, however small the tensors."""
    with machine(1):
        made = mt.annotate(func, mt.Mesh(mesh), layouts)
        return mt.compile(made, target="interpret", poison=poison)


def in_order(x, update, start):
    state, found = torch.full((x.shape[1],), start), []
    for row in x:
        state = update(state, row)
        found.append(state)
    return torch.stack(found), state


def rows(*axes):
    return {"X": dict.fromkeys(axes, 0), "Y": dict.fromkeys(axes, 0)}


def test_states_are_gathered_and_every_device_starts_from_those_before():
    with machine(1):
        func = mt.annotate(running(8, 8, UPDATES["decayed"][0]), mt.Mesh({"x": 2}), rows("x"))
        made = outline(lower_kernel(func))
    assert made == [
        "kernel(X, state_total_w1, state_scale_w1)",
        "all_gather(state_total_w1, dim 0, x)",
        "all_gather(state_scale_w1, dim 0, x)",
        "kernel(state_total_w1.1, state_scale_w1.1, state_start_w1, state_end_w1)",
        "slice(state_start_w1, dim 0, x)",
        "kernel(X, Y, E, state_start_w1.1, state_end_w1)",
    ]


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(("mesh", "steps"), [({"x": 2}, 8), ({"x": 3}, 7), ({"x": 5}, 6), ({"x": 2, "y": 2}, 9)])
def test_running_states(name, mesh, steps):
    update, reference, start = UPDATES[name]
    x = torch.randn(steps, 8)
    kernel = compiled(running(steps, 8, update, start=start), mesh, rows(*mesh))
    assert "gather                 X" not in kernel.explain()
    for result, expected in zip(kernel(x), in_order(x, reference, start), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(("mesh", "steps"), [({"x": 3}, 7), ({"x": 2, "y": 2}, 9)])
def test_running_states_from_the_last_position_to_the_first(name, mesh, steps):
    update, reference, start = UPDATES[name]
    x = torch.randn(steps, 8)
    kernel = compiled(running(steps, 8, update, start=start, back=True), mesh, rows(*mesh))
    assert "gather                 X" not in kernel.explain()
    found, end = in_order(x.flip(0), reference, start)
    for result, expected in zip(kernel(x), (found.flip(0), end), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_of_equal_maxima_from_the_end_the_last_one_wins():
    @T.prim_func
    def kernel(A: T.Tensor((10, 4), "float32"), At: T.Tensor((4,), "int32"), On: T.Tensor((10, 4), "int32")):
        with T.Kernel(1, threads=32):
            best, where = T.alloc_fragment((4,), "float32"), T.alloc_fragment((4,), "int32")
            T.fill(best, -T.infinity("float32"))
            T.fill(where, -1)
            for step in T.serial(10):
                for j in T.Parallel(4):
                    if A[9 - step, j] > best[j]:
                        best[j] = A[9 - step, j]
                        where[j] = 9 - step
                T.copy(where, On[9 - step, 0])
            T.copy(where, At)

    a = torch.randint(0, 3, (10, 4)).float()
    made = compiled(kernel, {"x": 3}, {"A": {"x": 0}, "On": {"x": 0}})
    assert "scan" in made.explain()
    assert "A.1" not in made.explain()
    places, on_the_way = made(a)
    expected = torch.stack([9 - a[at:].flip(0).argmax(0) for at in range(10)])
    firsts = torch.stack(
        [
            torch.tensor([max(t for t in range(at, 10) if a[t, j] == a[at:, j].max()) for j in range(4)])
            for at in range(10)
        ]
    )
    assert torch.equal(expected, firsts), "argmax takes the first of equals"
    assert torch.equal(on_the_way.long(), firsts)
    assert torch.equal(places.long(), firsts[0])


def test_what_authors_state_of_loops_that_go_back_is_not_gone_by():
    """It was tried on loops that go forwards."""

    def larger(before, after):
        return (T.max(before[0], after[0]),)

    @T.prim_func
    def kernel(A: T.Tensor((8, 4), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            state = T.alloc_fragment((4,), "float32")
            mt.combine(state=(state,), with_=larger)
            T.fill(state, 0.0)
            for step in T.serial(8):
                for j in T.Parallel(4):
                    state[j] = T.if_then_else(
                        state[j] * state[j] > 0.25, T.max(state[j], A[7 - step, j]), A[7 - step, j]
                    )
            T.copy(state, B)

    assert "state_total" not in compiled(kernel, {"x": 2}, {"A": {"x": 0}}).explain()


@pytest.mark.parametrize("left", [torch.inf, torch.nan])
def test_a_state_that_starts_anew_knows_nothing_of_what_was_there(left):
    update, reference, start = UPDATES["starting anew"]
    x = torch.zeros(8, 4)
    x[1, :3], x[3, 1], x[5, 2] = left, 1.0, 1.0
    kernel = compiled(running(8, 4, update, start=start), {"x": 4}, rows("x"))
    for result, expected in zip(kernel(x), in_order(x, reference, start), strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("wrong", WRONG)
def test_for_what_only_looks_like_it_devices_take_turns(wrong):
    x = torch.randn(31, 8).abs()
    func = running_wrong(31, 8, wrong)
    assert mt.sharding_rule(func).factors["m"] == "turns"
    kernel = compiled(func, {"x": 2}, rows("x"))
    alone = mt.compile(mt.annotate(func, mt.Mesh({"x": 1}), {}), target="interpret")
    assert ("X.1" in kernel.explain()) is (wrong == "of another state"), "which depends on nothing but how often"
    for result, expected in zip(kernel(x), alone(x), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 2, "h": 2}])
def test_linear_attention_by_chunks(mesh, decay):
    shapes = [(2, 64, 2, 8), (2, 64, 2, 8), (2, 64, 2, 4)]
    layouts = {name: {"x": 1, **({"h": 2} if "h" in mesh else {})} for name in ("Q", "K", "V", "Out")}
    q, k, v = (torch.randn(shape) for shape in shapes)
    kernel = compiled(linear_attention(2, 2, 64, 8, 4, decay=decay), mesh, layouts)
    assert "Q.1" not in kernel.explain()
    for result, expected in zip(kernel(q, k, v), linear_attention_reference(q, k, v, decay), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_chunks_that_an_axis_would_take_apart_are_made_whole():
    """3 chunks on 2 devices."""
    q, k, v = torch.randn(1, 48, 1, 8), torch.randn(1, 48, 1, 8), torch.randn(1, 48, 1, 4)
    layouts = {name: {"x": 1} for name in ("Q", "K", "V", "Out")}
    kernel = compiled(linear_attention(1, 1, 48, 8, 4), {"x": 2}, layouts)
    assert "tiles of dim 1 are whole blocks of 16" in kernel.explain()
    torch.testing.assert_close(kernel(q, k, v)[0], linear_attention_reference(q, k, v)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("online", [False, True])
def test_sums_that_an_update_uses_are_completed_before(online):
    x = torch.rand(16, 8)
    kernel = compiled(after_a_sum(16, 8, online), {"x": 2}, {"X": {"x": 0}})
    assert "X.1" not in kernel.explain()
    assert kernel.explain().index("all_reduce(sum)") < kernel.explain().index("kernel_1")
    alone = mt.compile(mt.annotate(after_a_sum(16, 8, online), mt.Mesh({"x": 1}), {}), target="interpret")
    torch.testing.assert_close(kernel(x), alone(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["interpret", "c"])
@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 2, "y": 2}])
def test_devices_still_start_where_those_before_end_if_the_rest_is_cut_again(mesh, target):
    """Compiled, every device but the first took the start of the first."""
    x = torch.randn(4, 11)
    with machine(1):
        func = mt.annotate(before_a_sum(4, 11), mt.Mesh(mesh), {n: dict.fromkeys(mesh, 1) for n in "XYZ"})
        kernel = mt.compile(func, target=target, poison=target == "interpret")
    assert "state_start" in kernel.explain()
    assert "all_reduce(sum)" in kernel.explain()
    running, less = kernel(x)
    torch.testing.assert_close(running.T, in_order(x.T, lambda s, x: s * 0.5 + x, 1.0)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(less, x - x.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mesh", "sizes"), [({"x": 2}, (8, 16)), ({"x": 3}, (8, 13)), ({"x": 2, "y": 2}, (5, 7))])
def test_the_first_of_equal_maxima_wins(mesh, sizes):
    a = torch.randint(0, 3, sizes).float()
    kernel = compiled(argmax_rows(*sizes), mesh, {"A": dict.fromkeys(mesh, 1)})
    assert "scan" in kernel.explain()
    values, positions = kernel(a)
    torch.testing.assert_close(values, a.max(1).values)
    assert positions.tolist() == [int((row == row.max()).nonzero()[0, 0]) for row in a]


@pytest.mark.parametrize("devices", [2, 4])
def test_what_counts_blocks_counts_them_once(devices):
    """The state's part of the loop reads nothing: it would run as often on every device."""
    kernel = compiled(counted(6, 12), {"x": devices}, {"X": {"x": 1}})
    torch.testing.assert_close(kernel(torch.randn(6, 12)), torch.full((6,), 4.0))


@pytest.mark.parametrize("kind", ["number", "loaded", "copied"])
def test_rates_of_programs_are_kept_apart(kind):
    func = rate_of_the_program(8, 5, kind)
    x, rates = torch.randn(8, 5), torch.tensor([0.5, 1.0])
    state, expected = torch.ones(8), []
    for column in x.T:
        expected.append(state)
        state = state * rates.repeat_interleave(4) + column
    for mesh, layouts in [
        ({"x": 2}, {"X": {"x": 1}, "Y": {"x": 1}}),
        ({"x": 2, "y": 2}, {"X": {"x": 1, "y": 0}, "Y": {"x": 1, "y": 0}}),
    ]:
        kernel = compiled(func, mesh, layouts)
        assert "state_scale" in kernel.explain(), "the state is handed on"
        torch.testing.assert_close(kernel(x, rates), torch.stack(expected, 1))


def test_what_is_handed_on_is_split_by_the_same_axes_in_all_parts():
    """Y's columns are split over y, which is free again in the part that makes states, and was asked to split V's
    rows."""
    q, k, v = torch.randn(12, 2), torch.randn(12, 2), torch.randn(12, 4)
    state, expected = torch.zeros(2, 4), []
    for a, b, c in zip(q.split(2), k.split(2), v.split(2), strict=True):
        expected.append(a @ b.T @ c + a @ state)
        state = state + b.T @ c
    for layouts in (
        {"Q": {"x": 0}, "K": {}, "V": {"x": 0, "y": 0}, "Y": {"y": 1}},
        {"V": {"x": 0, "y": 1}, "Y": {"x": 0}},
        {"Y": {"x": 0}},
    ):
        kernel = compiled(chunks(6), {"x": 2, "y": 2}, layouts)
        torch.testing.assert_close(kernel(q, k, v), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 5}])
def test_running_products_stay_whole(mesh):
    x = torch.randn(12, 8)
    kernel = compiled(running(12, 8, lambda s, x: s * x, start=2.0), mesh, rows("x"))
    for result, expected in zip(kernel(x), in_order(x, torch.mul, 2.0), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("which", ["later", "first", "some", "all"])
def test_programs_that_leave_out_blocks_scale_by_those_they_have(which, devices):
    a, g = torch.randn(4, 64), torch.tensor([1.0, -1.0, 0.0, 0.0])
    kernel = compiled(skipping(which), {"x": devices}, {"A": {"x": 1}})
    assert "state_scale" in kernel.explain()
    torch.testing.assert_close(kernel(a, g), skipping_in_torch(a, g, which))
