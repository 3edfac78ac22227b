"""Kernels whose loops over columns scale sums to the maximum of the last block; and what that may not be used for."""

import tilelang.language as T


def last_block(rows, columns, width, *, wrong=None, masked=None, skips=False, block=8, start=-float("inf")):
    """`Out = softmax(X) @ V`, `L = logsumexp(X)` by rows.

    `masked`: these columns don't count, nor, with `skips`, blocks that are not in `S`. `wrong`: what is done with the
    state that depends on which block was the last."""
    first, last = masked or (0, 0)
    row_block = 4

    @T.prim_func
    def last_block_kernel(
        X: T.Tensor((rows, columns), "float32"),
        V: T.Tensor((columns, width), "float32"),
        S: T.Tensor((rows // row_block, T.ceildiv(columns, block)), "bool"),
        Out: T.Tensor((rows, width), "float32"),
        L: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(rows // row_block, threads=32) as bx:
            x = T.alloc_fragment((row_block, block), "float32")
            v = T.alloc_shared((block, width), "float32")
            acc = T.alloc_fragment((row_block, width), "float32")
            m = T.alloc_fragment((row_block,), "float32")
            before = T.alloc_fragment((row_block,), "float32")
            rescale = T.alloc_fragment((row_block,), "float32")
            total = T.alloc_fragment((row_block,), "float32")
            part = T.alloc_fragment((row_block,), "float32")
            T.fill(m, start)
            T.clear(total)
            T.clear(acc)
            for ko in T.serial(T.ceildiv(columns, block)):
                if not skips or S[bx, ko]:
                    T.copy(X[bx * row_block, ko * block], x)
                    T.copy(V[ko * block, 0], v)
                    for i, j in T.Parallel(row_block, block):
                        c = ko * block + j
                        x[i, j] = T.if_then_else(
                            c < columns and not (c >= first and c < last), x[i, j], -T.infinity("float32")
                        )
                    T.copy(m, before)
                    T.reduce_max(x, m, dim=1, clear=True)
                    for i in T.Parallel(row_block):
                        rescale[i] = T.exp(before[i] - m[i])
                    for i, j in T.Parallel(row_block, block):
                        x[i, j] = T.exp(x[i, j] - m[i])
                    T.reduce_sum(x, part, dim=1)
                    for i in T.Parallel(row_block):
                        total[i] = total[i] * rescale[i] + part[i]
                    for i, j in T.Parallel(row_block, width):
                        if wrong == "sums of two rates":
                            acc[i, j] = acc[i, j] * rescale[i] * rescale[i]
                        else:
                            acc[i, j] = acc[i, j] * rescale[i]
                    if wrong == "sums of two rates":
                        for i, j in T.Parallel(row_block, block):
                            x[i, j] = x[i, j] * T.exp(-m[i])
                    T.gemm(x, v, acc)
            for i, j in T.Parallel(row_block, width):
                if wrong == "not divided":
                    acc[i, j] = acc[i, j] * 0.5
                elif wrong == "divided twice":
                    acc[i, j] = acc[i, j] / total[i] / total[i]
                elif wrong == "divided by a little more":
                    acc[i, j] = acc[i, j] / (total[i] + 1e-2)
                elif wrong == "divided by another row's":
                    acc[i, j] = acc[i, j] / total[(i + 1) % row_block]
                elif wrong == "where it is large":
                    acc[i, j] = T.if_then_else(m[i] > 1.0, acc[i, j] / total[i], 0.0)
                elif wrong == "under a condition":
                    if total[i] > 10.0:
                        acc[i, j] = acc[i, j] / total[i]
                else:
                    acc[i, j] = acc[i, j] / total[i]
            T.copy(acc, Out[bx * row_block, 0])
            if wrong == "handed from iteration to iteration":
                T.clear(part)
                for _ in T.serial(2):
                    T.copy(part, L[bx * row_block])
                    T.copy(m, part)
            elif wrong == "as an index":
                for i in T.Parallel(row_block):
                    L[bx * row_block + T.min(T.Cast("int32", total[i]), 3)] = 1.0
            else:
                for i in T.Parallel(row_block):
                    if wrong == "stored":
                        part[i] = m[i]
                    elif wrong == "counted twice":
                        part[i] = 2.0 * m[i] + T.log(total[i])
                    elif wrong == "another base":
                        part[i] = m[i] + T.log2(total[i])
                    elif wrong == "taken away":
                        part[i] = T.log(total[i]) - m[i]
                    elif wrong == "largest":
                        part[i] = T.max(m[i], T.log(total[i]))
                    else:
                        part[i] = m[i] + T.log(total[i])
                T.copy(part, L[bx * row_block])

    return last_block_kernel


WRONG = (
    "sums of two rates",
    "not divided",
    "divided twice",
    "divided by a little more",
    "divided by another row's",
    "where it is large",
    "under a condition",
    "handed from iteration to iteration",
    "as an index",
    "stored",
    "counted twice",
    "another base",
    "taken away",
    "largest",
)
