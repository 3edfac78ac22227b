"""Kernels whose loops over columns carry a running maximum and what is scaled to it; and kernels that only look so."""

import math

import tilelang.language as T
import torch

SCALE = math.log2(math.e)
LOWEST = {"infinity": -math.inf, "finite": -(2.0**30)}


def online(
    rows,
    columns,
    width,
    *,
    wrong=None,
    start="infinity",
    base="exp2",
    masked=0,
    guarded=False,
    guard=None,
    block=8,
    row_block=4,
):
    """`Out = softmax(X) @ V`, `L = logsumexp(X)` by rows, in one pass over blocks of columns.

    `masked`: the first columns of the first half of the rows don't count; `guarded`: what doesn't is left out of sums.
    `guard`: while nothing counts, 0 stands in for the maximum that is carried, for a copy of it, or for powers that
    it takes down. `wrong`: what is not as it should be."""
    lowest = LOWEST[start]

    def power(x):
        return T.exp2(x * SCALE) if base == "exp2" else T.exp(x)

    def asked(before, now):
        return before if wrong == "guarded by what came before" else now

    def weight(x, largest, of):
        made = power(x - largest)
        return T.if_then_else(of == lowest, 0.0, made) if guard == "powers" else made

    @T.prim_func
    def online_kernel(
        X: T.Tensor((rows, columns), "float32"),
        V: T.Tensor((columns, width), "float32"),
        Out: T.Tensor((rows, width), "float32"),
        L: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, row_block), threads=32) as bx:
            x = T.alloc_fragment((row_block, block), "float32")
            v = T.alloc_shared((block, width), "float32")
            acc = T.alloc_fragment((row_block, width), "float32")
            y = T.alloc_fragment((row_block, block), "float32")
            m = T.alloc_fragment((row_block,), "float32")
            safe = T.alloc_fragment((row_block,), "float32")
            before = T.alloc_fragment((row_block,), "float32")
            rescale = T.alloc_fragment((row_block,), "float32")
            total = T.alloc_fragment((row_block,), "float32")
            part = T.alloc_fragment((row_block,), "float32")
            T.fill(m, lowest)
            T.clear(total)
            T.clear(acc)
            for ko in T.serial(T.ceildiv(columns, block)):
                T.copy(X[bx * row_block, ko * block], x)
                T.copy(V[ko * block, 0], v)
                if wrong == "powers of another":
                    T.copy(x, y)
                for i, j in T.Parallel(row_block, block):
                    x[i, j] = T.if_then_else(
                        ko * block + j < columns and not (bx * row_block + i < rows // 2 and ko * block + j < masked),
                        x[i, j],
                        lowest,
                    )
                T.copy(m, before)
                T.reduce_max(x, m, dim=1, clear=False)
                if wrong == "maximum of two times":
                    for i in T.Parallel(row_block):
                        m[i] = T.max(m[i], 2.0 * before[i])
                if guard == "carried":
                    for i in T.Parallel(row_block):
                        m[i] = T.if_then_else(asked(before[i], m[i]) == lowest, 0.0, m[i])
                elif guard == "copied":
                    for i in T.Parallel(row_block):
                        safe[i] = T.if_then_else(asked(before[i], m[i]) != lowest, m[i], 0.0)
                for i in T.Parallel(row_block):
                    if wrong == "no rescale":
                        rescale[i] = 1.0
                    elif wrong == "another rate":
                        rescale[i] = power((before[i] - m[i]) * 0.5)
                    elif wrong == "rescaled the other way":
                        rescale[i] = power(m[i] - before[i])
                    elif wrong == "another row":
                        rescale[i] = power(before[(i + 1) % row_block] - m[(i + 1) % row_block])
                    else:
                        rescale[i] = weight(before[i], safe[i] if guard == "copied" else m[i], before[i])
                for i, j in T.Parallel(row_block, block):
                    if wrong == "left out by what came before":
                        x[i, j] = T.if_then_else(m[i] > 1.0, power(x[i, j] - m[i]), 0.0)
                    elif wrong == "counts where it is left out":
                        x[i, j] = T.if_then_else((ko * block + j) % 3 > 0, power(x[i, j] - m[i]), 1.0)
                    elif guarded:
                        x[i, j] = T.if_then_else(x[i, j] > -100.0, power(x[i, j] - m[i]), 0.0)
                    elif wrong == "the maximum of before":
                        x[i, j] = power(x[i, j] - before[i])
                    else:
                        x[i, j] = weight(
                            y[i, j] if wrong == "powers of another" else x[i, j],
                            safe[i] if guard == "copied" else m[i],
                            asked(before[i], m[i]),
                        )
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(row_block):
                    if wrong == "squares of blocks":
                        total[i] = total[i] * rescale[i] + part[i] * part[i]
                    elif wrong == "counts blocks":
                        total[i] = total[i] * rescale[i] + part[i] + 1.0
                    elif wrong == "reads m":
                        total[i] = total[i] * rescale[i] + part[i] * m[i]
                    elif wrong == "rescaled twice":
                        total[i] = (total[i] * rescale[i] + part[i]) * rescale[i]
                    elif wrong == "half of the rows":
                        if i < row_block // 2:
                            total[i] = total[i] * rescale[i] + part[i]
                    else:
                        total[i] = total[i] * rescale[i] + part[i]
                if wrong != "acc not rescaled":
                    for i, j in T.Parallel(row_block, width):
                        acc[i, j] = acc[i, j] * rescale[i]
                T.gemm(x, v, acc)
                if wrong == "leaves early" and total[0] > 2.0:
                    T.loop_break()
                if wrong == "state is stored":
                    T.copy(total, L[bx * row_block])
                if wrong == "weights are stored":
                    T.copy(part, L[bx * row_block])
            if wrong == "the stand-in is stored":
                T.copy(m, L[bx * row_block])
            for i, j in T.Parallel(row_block, width):
                acc[i, j] = acc[i, j] / total[i]
            T.copy(acc, Out[bx * row_block, 0])
            if wrong not in ("state is stored", "weights are stored", "the stand-in is stored"):
                for i in T.Parallel(row_block):
                    part[i] = m[i] + T.log(total[i])
                T.copy(part, L[bx * row_block])

    return online_kernel


WRONG = (
    "maximum of two times",
    "no rescale",
    "another rate",
    "rescaled the other way",
    "another row",
    "the maximum of before",
    "squares of blocks",
    "counts blocks",
    "reads m",
    "rescaled twice",
    "half of the rows",
    "acc not rescaled",
    "leaves early",
    "state is stored",
    "weights are stored",
    "left out by what came before",
    "counts where it is left out",
    "powers of another",
)


def online_reference(x, v):
    """In float64."""
    x = x.double()
    return (torch.softmax(x, 1) @ v.double()).float(), torch.logsumexp(x, 1).float()


def log_sum(rows, columns, block=8, row_block=4):
    """`Y = softmax(X)` by rows: a pass that carries the logarithm of the sum, and one that writes."""

    @T.prim_func
    def log_sum_kernel(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(T.ceildiv(rows, row_block), threads=32) as bx:
            x = T.alloc_fragment((row_block, block), "float32")
            powers = T.alloc_fragment((row_block, block), "float32")
            largest = T.alloc_fragment((row_block,), "float32")
            total = T.alloc_fragment((row_block,), "float32")
            lse = T.alloc_fragment((row_block,), "float32")
            T.fill(lse, -T.infinity("float32"))
            for ko in T.serial(columns // block):
                T.copy(X[bx * row_block, ko * block], x)
                T.reduce_max(x, largest, dim=1, clear=True)
                for i, j in T.Parallel(row_block, block):
                    powers[i, j] = T.exp2(x[i, j] * SCALE - largest[i] * SCALE)
                T.reduce_sum(powers, total, dim=1, clear=True)
                for i in T.Parallel(row_block):
                    lse[i] = largest[i] * SCALE + T.log2(T.exp2(lse[i] - largest[i] * SCALE) + total[i])
            for ko in T.serial(columns // block):
                T.copy(X[bx * row_block, ko * block], x)
                for i, j in T.Parallel(row_block, block):
                    powers[i, j] = T.exp2(x[i, j] * SCALE - lse[i])
                T.copy(powers, Y[bx * row_block, ko * block])

    return log_sum_kernel


def smooth_maximum(rows, columns, block, start=-math.inf):
    """`Y = logsumexp(X)` by rows, and of what it starts from; every block is taken down by its own maximum."""

    @T.prim_func
    def smooth_maximum_kernel(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows,), "float32")):
        with T.Kernel(rows // 2, threads=32) as bx:
            x = T.alloc_fragment((2, block), "float32")
            largest, total = T.alloc_fragment((2,), "float32"), T.alloc_fragment((2,), "float32")
            lse = T.alloc_fragment((2,), "float32")
            T.fill(lse, start)
            for ko in T.serial(columns // block):
                T.copy(X[bx * 2, ko * block], x)
                T.reduce_max(x, largest, dim=1)
                for i, j in T.Parallel(2, block):
                    x[i, j] = T.exp(x[i, j] - largest[i])
                T.reduce_sum(x, total, dim=1)
                for i in T.Parallel(2):
                    lse[i] = largest[i] + T.log(T.exp(lse[i] - largest[i]) + total[i])
            T.copy(lse, Y[bx * 2])

    return smooth_maximum_kernel
