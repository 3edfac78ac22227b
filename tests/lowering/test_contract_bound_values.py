"""Clause 8: values that a kernel binds to variables count for what they were made of, whatever was bound on the way."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.other_machines import machine

STEPS, WIDTH = 12, 8


@T.macro
def _of_itself(a, state, t, j):
    before = state[j]
    part = before * before * 0.1
    state[j] = state[j] * 0.5 + a[t, j] + part


@T.macro
def _above_itself(a, state, t, j):
    before = state[j]
    less = before - 1.0
    state[j] = T.max(state[j], a[t, j] + less)


@T.macro
def _added_to_itself(a, state, t, j):
    before = state[j]
    part = before * 0.1
    state[j] += a[t, j] + part


@T.macro
def _under_its_condition(a, state, t, j):
    before = state[j]
    part = before * 0.1
    state[j] = T.if_then_else(part > 0.05, 0.0, state[j] * 0.5) + a[t, j]


@T.macro
def _by_another_element(a, state, t, j):
    first = state[0] * 0.1
    state[j] = state[j] * 0.5 + T.if_then_else(j > 0, first, 0.0) + a[t, j]


@T.macro
def _scaled_twice(a, state, t, j):
    power = T.exp(-a[t, j] * a[t, j])
    rate = power * 0.9
    state[j] = state[j] * rate + rate + T.sqrt(power)


@T.macro
def _gain(a, state, t, j):
    gain = a[t, j] * 2.0
    changed = state[j] * 0.5 + gain
    state[j] = changed


@T.macro
def _overwritten(a, state, t, j):
    before = state[j]
    state[j] = a[t, j]
    state[j] = state[j] + before * 0.5


IN_TURNS = {
    "of itself": _of_itself,
    "above itself": _above_itself,
    "under its condition": _under_its_condition,
    "by another element": _by_another_element,
    "overwritten": _overwritten,
}
HANDED_ON = {
    "added to itself": _added_to_itself,
    "scaled twice": _scaled_twice,
    "gain": _gain,
}


def carried(update):
    @T.prim_func
    def carried_kernel(A: T.Tensor((STEPS, WIDTH), "float32"), B: T.Tensor((STEPS, WIDTH), "float32")):
        with T.Kernel(1, threads=32):
            state = T.alloc_fragment((WIDTH,), "float32")
            T.fill(state, 0.25)
            for t in T.serial(STEPS):
                for j in T.Parallel(WIDTH):
                    update(A, state, t, j)
                for j in T.Parallel(WIDTH):
                    B[t, j] = state[j]

    return carried_kernel


def compiled(func, devices, layouts):
    with machine(1):
        made = mt.annotate(func, mt.Mesh({"x": devices}), layouts)
        return mt.compile(made, target="interpret", poison=True)


@pytest.mark.parametrize("name", [*IN_TURNS, *HANDED_ON])
def test_states_that_are_made_by_way_of_variables(name):
    a, rows = torch.randn(STEPS, WIDTH), {"A": {"x": 0}, "B": {"x": 0}}
    func = carried({**IN_TURNS, **HANDED_ON}[name])
    kernel = compiled(func, 3, rows)
    assert "A.1" not in kernel.explain()
    assert ("state_turn0" in kernel.explain()) == (name in IN_TURNS)
    torch.testing.assert_close(kernel(a), compiled(func, 1, {})(a), rtol=1e-5, atol=1e-5)


def test_places_that_come_of_a_state():
    """A row of a table, which a running sum names by way of a variable."""

    @T.prim_func
    def kernel(
        N: T.Tensor((STEPS,), "int32"),
        table: T.Tensor((8, WIDTH), "float32"),
        A: T.Tensor((STEPS, WIDTH), "float32"),
        B: T.Tensor((STEPS, WIDTH), "float32"),
    ):
        with T.Kernel(1, threads=32):
            state, count = T.alloc_fragment((WIDTH,), "float32"), T.alloc_fragment((1,), "int32")
            T.clear(state)
            T.clear(count)
            for t in T.serial(STEPS):
                count[0] = count[0] + N[t]
                row = count[0]
                for j in T.Parallel(WIDTH):
                    state[j] = state[j] * 0.5 + table[row % 8, j] + A[t, j]
                for j in T.Parallel(WIDTH):
                    B[t, j] = state[j]

    inputs = [torch.randint(0, 3, (STEPS,), dtype=torch.int32), torch.randn(8, WIDTH), torch.randn(STEPS, WIDTH)]
    layouts = {name: {"x": 0} for name in ("N", "A", "B")}
    result, alone = (compiled(kernel, n, layouts)(*inputs) for n in (4, 1))
    torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_sums_along_a_chunk_are_of_the_chunk(scaled):
    """As those of logarithms of decays in a Mamba's chunks; what the state is scaled with is the last of them."""
    chunk = 4

    @T.prim_func
    def kernel(A: T.Tensor((24,), "float32"), X: T.Tensor((24, 4), "float32"), Y: T.Tensor((24, 4), "float32")):
        with T.Kernel(1, threads=32):
            total, x = T.alloc_shared((chunk,), "float32"), T.alloc_fragment((chunk, 4), "float32")
            state, part = T.alloc_fragment((4,), "float32"), T.alloc_fragment((4,), "float32")
            T.clear(state)
            for c in T.serial(24 // chunk):
                T.copy(A[c * chunk : (c + 1) * chunk], total)
                T.copy(X[c * chunk, 0], x)
                T.cumsum(total)
                for i, j in T.Parallel(chunk, 4):
                    Y[c * chunk + i, j] = state[j] * T.exp(total[i])
                for i, j in T.Parallel(chunk, 4):
                    x[i, j] = x[i, j] * T.exp(total[chunk - 1] - total[i])
                T.reduce_sum(x, part, dim=0)
                if scaled:
                    for j in T.Parallel(4):
                        state[j] = state[j] * T.exp(total[chunk - 1])
                for j in T.Parallel(4):
                    state[j] = state[j] + part[j]

    a, x = -torch.rand(24), torch.randn(24, 4)
    made = compiled(kernel, 3, {"A": {"x": 0}, "X": {"x": 0}, "Y": {"x": 0}})
    assert "X.1" not in made.explain()
    torch.testing.assert_close(made(a, x), compiled(kernel, 1, {})(a, x), rtol=1e-5, atol=1e-5)
