"""Kernels whose loops carry what only the one device after the other can make."""

import tilelang.language as T


def counted_drops(size):
    """Numbers, and how often one of them was set back: in a loop over blocks, position by position."""

    @T.prim_func
    def counted_drops_kernel(
        X: T.Tensor((size,), "float32"), Y: T.Tensor((size,), "float32"), N: T.Tensor((1,), "int32")
    ):
        with T.Kernel(1, threads=32):
            state = T.alloc_var("float32")
            count = T.alloc_var("int32")
            state = 1.0
            count = 0
            for block in T.serial(size // 4):
                for i in T.serial(4):
                    state = T.max(T.min(state * state, 2.0) - X[block * 4 + i], -1.0)
                    if state > 0.2:
                        count = count + 1
                        state = state - 0.1
                    Y[block * 4 + i] = state
            N[0] = count

    return counted_drops_kernel


def there_and_back(steps, width):
    """A loop from the first step to the last, and one from the last to the first that starts where it ended."""

    @T.prim_func
    def there_and_back_kernel(
        X: T.Tensor((steps, width), "float32"),
        Y: T.Tensor((steps, width), "float32"),
        Z: T.Tensor((steps, width), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, 4), threads=32) as bx:
            there = T.alloc_fragment((4,), "float32")
            back = T.alloc_fragment((4,), "float32")
            T.fill(there, 0.3)
            for t in T.serial(steps):
                for j in T.Parallel(4):
                    there[j] = T.tanh(there[j] * 1.5 + X[t, bx * 4 + j])
                    Y[t, bx * 4 + j] = there[j]
            T.copy(there, back)
            for t in T.serial(steps):
                for j in T.Parallel(4):
                    back[j] = T.tanh(back[j] * 1.5 + X[steps - 1 - t, bx * 4 + j])
                    Z[steps - 1 - t, bx * 4 + j] = back[j]

    return there_and_back_kernel


def last_row(steps, width):
    """The loop leaves its last row, too, and is there for nothing else."""

    @T.prim_func
    def last_row_kernel(
        X: T.Tensor((steps, width), "float32"), Y: T.Tensor((width,), "float32"), E: T.Tensor((width,), "float32")
    ):
        with T.Kernel(1, threads=32):
            row = T.alloc_fragment((width,), "float32")
            state = T.alloc_fragment((width,), "float32")
            T.clear(state)
            T.clear(row)
            for t in T.serial(steps):
                T.copy(X[t, 0], row)
                for j in T.Parallel(width):
                    state[j] = T.tanh(state[j] + row[j])
            T.copy(row, Y)
            T.copy(state, E)

    return last_row_kernel


def as_data_say(steps, width):
    """What an iteration does with the state depends on data, and on where it is."""

    @T.prim_func
    def as_data_say_kernel(
        X: T.Tensor((steps, width), "float32"), G: T.Tensor((steps,), "int32"), Y: T.Tensor((steps, width), "float32")
    ):
        with T.Kernel(1, threads=32):
            state = T.alloc_fragment((width,), "float32")
            gate = T.alloc_shared((1,), "int32")
            T.fill(state, 0.3)
            for t in T.serial(steps):
                gate[0] = G[t]
                if gate[0] > 0:
                    for j in T.Parallel(width):
                        state[j] = T.tanh(state[j] * 1.5 + X[t, j])
                else:
                    for j in T.Parallel(width):
                        state[j] = state[width - 1 - j] * 0.5 + T.cast(t, "float32")
                T.copy(state, Y[t, 0])

    return as_data_say_kernel


def softmax_on_the_way(rows, size, block=4):
    """The state of an online softmax, which every block is divided by as far as it has come."""

    @T.prim_func
    def softmax_on_the_way_kernel(X: T.Tensor((rows, size), "float32"), Y: T.Tensor((rows, size), "float32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_fragment((rows, block), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            before = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            own = T.alloc_fragment((rows,), "float32")
            T.fill(largest, -T.infinity("float32"))
            T.clear(total)
            for k in T.serial(size // block):
                T.copy(X[0, k * block], x)
                T.copy(largest, before)
                T.reduce_max(x, largest, dim=1, clear=False)
                for i, j in T.Parallel(rows, block):
                    x[i, j] = T.exp(x[i, j] - largest[i])
                T.reduce_sum(x, own, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * T.exp(before[i] - largest[i]) + own[i]
                for i, j in T.Parallel(rows, block):
                    Y[i, k * block + j] = x[i, j] / total[i]

    return softmax_on_the_way_kernel


def with_a_copy(steps, width, kind):
    """A state, and what is used for it: a copy, where both start from `zero`, or from S, `rounded` for the copy, or for
    `both`; or one that starts as something `else`, is that of the step `before`, or is copied at `times`."""

    @T.prim_func
    def with_a_copy_kernel(
        X: T.Tensor((steps, width), "float32"),
        S: T.Tensor((width,), "float32"),
        Y: T.Tensor((steps, width), "float32"),
        E: T.Tensor((width,), "float32"),
    ):
        with T.Kernel(1, threads=32):
            state = T.alloc_fragment((width,), "float32")
            used = T.alloc_shared((width,), "float16")
            row = T.alloc_fragment((width,), "float32")
            if kind == "rounded":
                T.copy(S, state)
                T.copy(state, used)
            elif kind == "both":
                T.copy(S, used)
                T.copy(used, state)
            else:
                T.clear(state)
                T.fill(used, 0.5 if kind == "else" else 0.0)
            for t in T.serial(steps):
                T.copy(X[t, 0], row)
                if kind == "before":
                    T.copy(state, used)
                for j in T.Parallel(width):
                    state[j] = T.sin(used[j] * 1.5 + state[j] * 0.1) + row[j]
                if kind == "times":
                    if t % 2 == 0:
                        T.copy(state, used)
                elif kind != "before":
                    T.copy(state, used)
                T.copy(used, Y[t, 0])
            T.copy(used, E)

    return with_a_copy_kernel


def of_all_rows(steps, width, linear):
    """Each iteration walks all rows, not only its own: it can't be split."""

    @T.macro
    def update(state, of_all, X, Z, t):
        if linear:
            T.clear(of_all)
            for u in T.serial(steps):
                for j in T.Parallel(width):
                    of_all[j] += X[u, j]
            for j in T.Parallel(width):
                state[j] = state[j] * 0.5 + of_all[j] * Z[t, j]
        else:
            for u in T.serial(steps):
                for j in T.Parallel(width):
                    state[j] = T.tanh(state[j] + X[u, j])
            for j in T.Parallel(width):
                state[j] = state[j] * 0.5 + Z[t, j]

    @T.prim_func
    def of_all_rows_kernel(
        X: T.Tensor((steps, width), "float32"),
        Z: T.Tensor((steps, width), "float32"),
        Y: T.Tensor((steps, width), "float32"),
    ):
        with T.Kernel(1, threads=32):
            state = T.alloc_fragment((width,), "float32")
            of_all = T.alloc_fragment((width,), "float32")
            T.clear(state)
            for t in T.serial(steps):
                update(state, of_all, X, Z, t)
                for j in T.Parallel(width):
                    Y[t, j] = state[j] + X[t, j]

    return of_all_rows_kernel


def sums_of_blocks(steps, width, linear):
    """Blocks of 4 may reach past a row's end, and what is there goes into their sums."""

    @T.macro
    def update(state, row, total):
        if linear:
            for j in T.Parallel(4):
                state[j] = state[j] * 0.5 + row[j]
            T.reduce_sum(state, total, dim=0)
        else:
            T.reduce_sum(state, total, dim=0)
            for j in T.Parallel(4):
                state[j] = T.tanh(state[j] * 0.5 + total[0] * 0.3 + row[j])

    @T.prim_func
    def sums_of_blocks_kernel(
        X: T.Tensor((steps, width), "float32"), Y: T.Tensor((steps, T.ceildiv(width, 4)), "float32")
    ):
        with T.Kernel(T.ceildiv(width, 4), threads=32) as bx:
            state = T.alloc_fragment((4,), "float32")
            row = T.alloc_fragment((4,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.fill(state, 1.0)
            for t in T.serial(steps):
                T.copy(X[t, bx * 4], row)
                update(state, row, total)
                Y[t, bx] = total[0]

    return sums_of_blocks_kernel


def all_from_each(size, linear):
    """Each program starts from its own number, and goes through all of them."""

    @T.prim_func
    def all_from_each_kernel(X: T.Tensor((size,), "float32"), Y: T.Tensor((size,), "float32")):
        with T.Kernel(size, threads=32) as bx:
            state = T.alloc_fragment((1,), "float32")
            state[0] = X[bx]
            for t in T.serial(size):
                state[0] = state[0] * 0.5 + X[t] if linear else T.tanh(state[0] * 1.5 + X[t])
            Y[bx] = state[0]

    return all_from_each_kernel


def ordered_pipeline(steps, width):
    """What its author says of three statements, of which the state needs two."""

    @T.prim_func
    def ordered_pipeline_kernel(X: T.Tensor((steps, width), "float32"), Y: T.Tensor((steps, width), "float32")):
        with T.Kernel(1, threads=32):
            state = T.alloc_fragment((width,), "float32")
            row = T.alloc_shared((width,), "float32")
            T.fill(state, 0.1)
            for t in T.Pipelined(steps, num_stages=2, order=[0, 1, 2], stage=[0, 1, 1]):
                T.copy(X[t, 0], row)
                for j in T.Parallel(width):
                    state[j] = T.tanh(state[j] * 1.5 + row[j])
                T.copy(state, Y[t, 0])

    return ordered_pipeline_kernel


def by_way_of_another(steps, width, update):
    """The state comes back by way of a buffer that the update leaves something in: `update` of both and an input."""

    @T.prim_func
    def by_way_of_another_kernel(
        X: T.Tensor((steps, width), "float32"), Y: T.Tensor((steps, width), "float32"), E: T.Tensor((width,), "float32")
    ):
        with T.Kernel(1, threads=32):
            state = T.alloc_fragment((width,), "float32")
            other = T.alloc_fragment((width,), "float32")
            T.fill(state, 0.5)
            for t in T.serial(steps):
                T.copy(X[t, 0], other)
                for j in T.Parallel(width):
                    update(state, other, j)
                T.copy(state, Y[t, 0])
            T.copy(state, E)

    return by_way_of_another_kernel
