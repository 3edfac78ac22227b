"""Kernels whose loops carry a state in order and use it on the way."""

import tilelang.language as T


def running(steps, width, update, *, start=0.0, block=4):
    """`Y[t] = state` after `state = update(state, X[t])` for all t in order, in columns; `E`: the state in the end."""

    @T.prim_func
    def running_kernel(
        X: T.Tensor((steps, width), "float32"),
        Y: T.Tensor((steps, width), "float32"),
        E: T.Tensor((width,), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, block), threads=32) as bx:
            x = T.alloc_fragment((block,), "float32")
            state = T.alloc_fragment((block,), "float32")
            T.fill(state, start)
            for t in T.serial(steps):
                T.copy(X[t, bx * block], x)
                for i in T.Parallel(block):
                    state[i] = update(state[i], x[i])
                T.copy(state, Y[t, bx * block])
            T.copy(state, E[bx * block])

    return running_kernel


@T.macro
def _square(t, i, state, other, x):
    state[i] = state[i] * state[i] * 0.1 + x[i]


@T.macro
def _clipped(t, i, state, other, x):
    state[i] = T.min(state[i] + x[i], 1.0)


@T.macro
def _of_another_state(t, i, state, other, x):
    other[i] = other[i] * 0.5 + state[i]
    state[i] = state[i] + other[i]


@T.macro
def _of_the_step_before(t, i, state, other, x):
    state[i] = state[i] + x[i] * other[i]
    other[i] = x[i]


@T.macro
def _under_a_condition_on_it(t, i, state, other, x):
    if state[i] < 2.0:
        state[i] = state[i] + x[i]


@T.macro
def _set_back_at_times(t, i, state, other, x):
    if t % 3 == 2:
        state[i] = 0.0
    state[i] = state[i] + x[i]


@T.macro
def _halved_or_doubled(t, i, state, other, x):
    if t % 3 == 2:
        state[i] = state[i] * 2.0
    else:
        state[i] = state[i] * 0.5
    state[i] = state[i] + x[i]


@T.macro
def _kept_from_an_earlier_step(t, i, state, other, x):
    if t % 2 == 0:
        other[i] = x[i]
    state[i] = state[i] + other[i]


@T.macro
def _half_of_the_columns(t, i, state, other, x):
    if i < 2:
        state[i] = state[i] + x[i]


@T.macro
def _the_neighbour_s(t, i, state, other, x):
    state[i] = state[3 - i] * 0.5 + x[i]


#: What is no linear function of the state, or not of the state alone.
WRONG = {
    "square": _square,
    "clipped": _clipped,
    "of another state": _of_another_state,
    "of the step before": _of_the_step_before,
    "under a condition on it": _under_a_condition_on_it,
    "set back at times": _set_back_at_times,
    "halved or doubled": _halved_or_doubled,
    "kept from an earlier step": _kept_from_an_earlier_step,
    "half of the columns": _half_of_the_columns,
    "the neighbour's": _the_neighbour_s,
}


def running_wrong(steps, width, wrong):
    """Like `running`, with an update that is `wrong`."""
    update = WRONG[wrong]

    @T.prim_func
    def running_wrong_kernel(
        X: T.Tensor((steps, width), "float32"),
        Y: T.Tensor((steps, width), "float32"),
        E: T.Tensor((width,), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, 4), threads=32) as bx:
            x = T.alloc_fragment((4,), "float32")
            state = T.alloc_fragment((4,), "float32")
            other = T.alloc_fragment((4,), "float32")
            T.fill(state, 0.5)
            T.fill(other, 1.0)
            for t in T.serial(steps):
                T.copy(X[t, bx * 4], x)
                for i in T.Parallel(4):
                    update(t, i, state, other, x)
                T.copy(state, Y[t, bx * 4])
            T.copy(state, E[bx * 4])

    return running_wrong_kernel


def after_a_sum(steps, width, online=False):
    """Sums of columns, which a loop that carries a state over the same dim then uses."""

    @T.prim_func
    def after_a_sum_kernel(X: T.Tensor((steps, width), "float32"), E: T.Tensor((width,), "float32")):
        with T.Kernel(T.ceildiv(width, 4), threads=32) as bx:
            x = T.alloc_fragment((4, 4), "float32")
            total = T.alloc_fragment((4,), "float32")
            state = T.alloc_fragment((4,), "float32")
            m = T.alloc_fragment((4,), "float32")
            before = T.alloc_fragment((4,), "float32")
            part = T.alloc_fragment((4,), "float32")
            T.clear(total)
            for to in T.serial(steps // 4):
                T.copy(X[to * 4, bx * 4], x)
                T.reduce_sum(x, total, dim=0, clear=False)
            T.clear(state)
            T.fill(m, -T.infinity("float32"))
            for to in T.serial(steps // 4):
                T.copy(X[to * 4, bx * 4], x)
                if online:
                    T.copy(m, before)
                    for i, j in T.Parallel(4, 4):
                        x[i, j] = x[i, j] * total[j]
                    T.reduce_max(x, m, dim=0, clear=False)
                    for i, j in T.Parallel(4, 4):
                        x[i, j] = T.exp(x[i, j] - m[j])
                    T.reduce_sum(x, part, dim=0)
                    for j in T.Parallel(4):
                        state[j] = state[j] * T.exp(before[j] - m[j]) + part[j]
                else:
                    T.reduce_max(x, part, dim=0)
                    for j in T.Parallel(4):
                        state[j] = state[j] * 0.5 + part[j] * total[j]
            T.copy(state, E[bx * 4])

    return after_a_sum_kernel
