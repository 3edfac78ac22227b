"""Kernels whose loops carry a state in order and use it on the way."""

import tilelang.language as T
import torch


def running(steps, width, update, *, start=0.0, block=4, back=False):
    """`Y[t] = state` after `state = update(state, X[t])` for all t in order, or from the last one `back`, in columns;
    `E`: the state in the end."""

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
            for step in T.serial(steps):
                t = steps - 1 - step if back else step
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


def before_a_sum(rows, steps):
    """A decayed sum along every row, and then the row less its sum: the loop that is resumed stands before a cut."""

    @T.prim_func
    def before_a_sum_kernel(
        X: T.Tensor((rows, steps), "float32"), Y: T.Tensor((rows, steps), "float32"), Z: T.Tensor((rows, steps))
    ):
        with T.Kernel(rows, threads=32) as bx:
            state, total = T.alloc_var("float32"), T.alloc_fragment((1,), "float32")
            state = 1.0
            T.clear(total)
            for t in T.serial(steps):
                state = state * 0.5 + X[bx, t]
                Y[bx, t] = state
            for t in T.serial(steps):
                total[0] += X[bx, t]
            for t in T.serial(steps):
                Z[bx, t] = X[bx, t] - total[0]

    return before_a_sum_kernel


def counted(rows, steps, block=3):
    """How many blocks of a row there are: of what is read, nothing counts."""

    @T.prim_func
    def counted_kernel(X: T.Tensor((rows, steps), "float32"), Y: T.Tensor((rows,), "float32")):
        with T.Kernel(rows // 3, threads=32) as bx:
            x = T.alloc_shared((3, block), "float32")
            part, state = T.alloc_fragment((3,), "float32"), T.alloc_fragment((3,), "float32")
            T.clear(state)
            for ko in T.serial(steps // block):
                T.copy(X[bx * 3, ko * block], x)
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(3):
                    state[i] = state[i] + 1.0
            T.copy(state, Y[bx * 3])

    return counted_kernel


def rate_of_the_program(width, steps, kind):
    """`state = rate * state + X[:, t]`, with another rate in every program: of its number, or loaded for it."""

    @T.prim_func
    def rate_of_the_program_kernel(
        X: T.Tensor((width, steps), "float32"), R: T.Tensor((width // 4,), "float32"), Y: T.Tensor((width, steps))
    ):
        with T.Kernel(width // 4, threads=32) as bx:
            state = T.alloc_fragment((4,), "float32")
            rate = T.alloc_fragment((1,), "float32")
            T.fill(state, 1.0)
            rate[0] = R[bx]
            for t in T.serial(steps):
                for i in T.Parallel(4):
                    Y[bx * 4 + i, t] = state[i]
                    if kind == "number":
                        state[i] = X[bx * 4 + i, t] + T.if_then_else(bx % 2 == 0, 0.5, 1.0) * state[i]
                    elif kind == "loaded":
                        state[i] = X[bx * 4 + i, t] + R[bx] * state[i]
                    else:
                        state[i] = X[bx * 4 + i, t] + rate[0] * state[i]

    return rate_of_the_program_kernel


def chunks(steps, width=4):
    """Linear attention in chunks of two positions, all of which see each other."""

    @T.prim_func
    def chunks_kernel(
        Q: T.Tensor((2 * steps, 2), "float32"),
        K: T.Tensor((2 * steps, 2), "float32"),
        V: T.Tensor((2 * steps, width), "float32"),
        Y: T.Tensor((2 * steps, width), "float32"),
    ):
        with T.Kernel(1, threads=32):
            state, out = T.alloc_fragment((2, width), "float32"), T.alloc_fragment((2, width), "float32")
            q, k = T.alloc_shared((2, 2), "float32"), T.alloc_shared((2, 2), "float32")
            v = T.alloc_shared((2, width), "float32")
            scores = T.alloc_fragment((2, 2), "float32")
            T.clear(state)
            for to in T.serial(steps):
                T.copy(Q[to * 2, 0], q)
                T.copy(K[to * 2, 0], k)
                T.copy(V[to * 2, 0], v)
                T.clear(scores)
                T.gemm(q, k, scores, transpose_B=True)
                T.clear(out)
                T.gemm(scores, v, out)
                T.gemm(q, state, out)
                T.gemm(k, v, state, transpose_A=True)
                T.copy(out, Y[to * 2, 0])

    return chunks_kernel


def skipping(which):
    """A decayed state per row; each program leaves out other blocks of its 32, `which` says how: "later" ones, "first"
    ones, "some" between, or, by a number of its own, "all"."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32"), G: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(2, threads=32) as bm:
            x = T.alloc_shared((2, 2), "float32")
            part = T.alloc_fragment((2,), "float32")
            state = T.alloc_fragment((2,), "float32")
            T.fill(state, 0.0)
            for ko in T.serial(32):
                if {"later": ko <= bm * 20, "first": ko >= bm * 20, "some": (ko + bm) % 3 > 0, "all": G[bm] > 0}[which]:
                    T.copy(A[bm * 2, ko * 2], x)
                    T.reduce_sum(x, part, dim=1)
                    for i in T.Parallel(2):
                        state[i] = state[i] * (-0.5) - part[i]
            for i in T.Parallel(2):
                Y[bm * 2 + i] = state[i]

    return kernel


def skipping_in_torch(a, g, which):
    states = []
    for row in range(4):
        state, bm = torch.zeros(()), row // 2
        for ko, block in enumerate(a[row].reshape(32, 2)):
            if {"later": ko <= bm * 20, "first": ko >= bm * 20, "some": (ko + bm) % 3 > 0, "all": g[bm] > 0}[which]:
                state = state * (-0.5) - block.sum()
        states.append(state)
    return torch.stack(states)


def both_ways(steps, width, second="apart", *, block=4):
    """`F[t]` is added to sums of `X[s]`, `s <= t`, that fade; `B[t]` is set to such of `X[s]`, `s >= t`. `second`: what
    the loop from the end knows of the other."""

    @T.prim_func
    def both_ways_kernel(
        X: T.Tensor((steps, width), "float32"),
        F: T.Tensor((steps, width), "float32"),
        B: T.Tensor((steps, width), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, block), threads=32) as bx:
            x = T.alloc_fragment((block,), "float32")
            before = T.alloc_fragment((block,), "float32")
            after = T.alloc_fragment((block,), "float32")
            T.clear(before)
            T.clear(after)
            for step in T.serial(steps):
                T.copy(X[step, bx * block], x)
                for i in T.Parallel(block):
                    before[i] = before[i] * 0.5 + x[i]
                if second == "adds to the next":
                    T.atomic_add(F[(step + 1) % steps, bx * block], before)
                else:
                    T.atomic_add(F[step, bx * block], before)
            if second == "starts where the first ends":
                T.copy(before, after)
            for step in T.serial(steps):
                T.copy((F if second == "reads the results" else X)[steps - 1 - step, bx * block], x)
                for i in T.Parallel(block):
                    if second == "goes on":
                        before[i] = before[i] * 0.75 + x[i]
                        after[i] = before[i]
                    elif second == "reads the state":
                        after[i] = after[i] * 0.75 + x[i] * before[i]
                    else:
                        after[i] = after[i] * 0.75 + x[i]
                T.copy(after, B[steps - 1 - step, bx * block])

    return both_ways_kernel


def both_ways_in_torch(x, f, second="apart"):
    """What it leaves in F and B."""
    steps, f, back = len(x), f.clone(), torch.empty_like(x)
    before, after = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for t in range(steps):
        before = before * 0.5 + x[t]
        f[(t + 1) % steps if second == "adds to the next" else t] += before
    after = before if second in ("starts where the first ends", "goes on") else after
    read = f if second == "reads the results" else x
    for t in reversed(range(steps)):
        after = after * 0.75 + read[t] * (before if second == "reads the state" else 1.0)
        back[t] = after
    return f, back
