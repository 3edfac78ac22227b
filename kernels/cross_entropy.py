"""Cross-entropy of rows of logits, and its gradient."""

import tilelang.language as T
import torch
import torch.nn.functional as F


def cross_entropy(rows, classes, block_M=16, dtype="float32", accum_dtype="float32"):
    """`loss[m] = log(sum_n exp(logits[m, n])) - logits[m, labels[m]]`; a block holds whole rows."""

    @T.prim_func
    def cross_entropy_kernel(
        logits: T.Tensor((rows, classes), dtype),
        labels: T.Tensor((rows,), "int32"),
        loss: T.Tensor((rows,), dtype),
    ):
        with T.Kernel(T.ceildiv(rows, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, classes), accum_dtype)
            right = T.alloc_fragment((block_M, classes), accum_dtype)
            row_max = T.alloc_fragment((block_M,), accum_dtype)
            row_sum = T.alloc_fragment((block_M,), accum_dtype)
            score = T.alloc_fragment((block_M,), accum_dtype)
            labels_shared = T.alloc_shared((block_M,), "int32")
            T.copy(logits[bx * block_M, 0], x)
            T.copy(labels[bx * block_M], labels_shared)
            for i, j in T.Parallel(block_M, classes):
                right[i, j] = T.if_then_else(labels_shared[i] == j, x[i, j], 0)
            T.reduce_sum(right, score, dim=1)
            T.reduce_max(x, row_max, dim=1)
            for i, j in T.Parallel(block_M, classes):
                x[i, j] = T.exp(x[i, j] - row_max[i])
            T.reduce_sum(x, row_sum, dim=1)
            for i in T.Parallel(block_M):
                score[i] = T.log(row_sum[i]) + row_max[i] - score[i]
            T.copy(score, loss[bx * block_M])

    return cross_entropy_kernel


def labelled_cross_entropy(rows, classes, block_M=4, dtype="float32"):
    """The loss of every row, by its label's own score, and the gradient of their sum; rows with a negative label don't
    count. `rows` are whole blocks."""

    @T.prim_func
    def labelled_cross_entropy_kernel(
        logits: T.Tensor((rows, classes), dtype),
        labels: T.Tensor((rows,), "int32"),
        loss: T.Tensor((rows,), dtype),
        d_logits: T.Tensor((rows, classes), dtype),
    ):
        with T.Kernel(rows // block_M, threads=128) as bx:
            x = T.alloc_fragment((block_M, classes), dtype)
            row_max, row_sum = T.alloc_fragment((block_M,), dtype), T.alloc_fragment((block_M,), dtype)
            T.copy(logits[bx * block_M, 0], x)
            T.reduce_max(x, row_max, dim=1)
            for i, j in T.Parallel(block_M, classes):
                x[i, j] = T.exp(x[i, j] - row_max[i])
            T.reduce_sum(x, row_sum, dim=1)
            for i in T.Parallel(block_M):
                m = bx * block_M + i
                score = logits[m, T.max(labels[m], 0)]
                loss[m] = T.if_then_else(labels[m] >= 0, T.log(row_sum[i]) + row_max[i] - score, 0.0)
            for i, j in T.Parallel(block_M, classes):
                m = bx * block_M + i
                share = T.exp(logits[m, j] - row_max[i]) / row_sum[i]
                d_logits[m, j] = T.if_then_else(labels[m] >= 0, share, 0.0)
            for i in T.Parallel(block_M):
                m = bx * block_M + i
                if labels[m] >= 0:
                    d_logits[m, labels[m]] = d_logits[m, labels[m]] - 1.0

    return labelled_cross_entropy_kernel


def labelled_cross_entropy_reference(logits, labels):
    """`F.cross_entropy` of every row, and the gradient of their sum."""
    given = logits.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(given, labels.long().clamp(min=-1), ignore_index=-1, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), given)
    return loss.detach(), gradient


def cross_entropy_backward(rows, classes, block_M=16, dtype="float32", accum_dtype="float32"):
    """The gradient of `cross_entropy`: `(softmax(logits[m, :]) - onehot(labels[m])) * d_loss[m]`."""

    @T.prim_func
    def cross_entropy_backward_kernel(
        logits: T.Tensor((rows, classes), dtype),
        labels: T.Tensor((rows,), "int32"),
        d_loss: T.Tensor((rows,), dtype),
        d_logits: T.Tensor((rows, classes), dtype),
    ):
        with T.Kernel(T.ceildiv(rows, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, classes), accum_dtype)
            row_max = T.alloc_fragment((block_M,), accum_dtype)
            row_sum = T.alloc_fragment((block_M,), accum_dtype)
            gradient = T.alloc_fragment((block_M,), accum_dtype)
            labels_shared = T.alloc_shared((block_M,), "int32")
            T.copy(logits[bx * block_M, 0], x)
            T.copy(labels[bx * block_M], labels_shared)
            T.copy(d_loss[bx * block_M], gradient)
            T.reduce_max(x, row_max, dim=1)
            for i, j in T.Parallel(block_M, classes):
                x[i, j] = T.exp(x[i, j] - row_max[i])
            T.reduce_sum(x, row_sum, dim=1)
            for i, j in T.Parallel(block_M, classes):
                x[i, j] = (x[i, j] / row_sum[i] - T.if_then_else(labels_shared[i] == j, 1, 0)) * gradient[i]
            T.copy(x, d_logits[bx * block_M, 0])

    return cross_entropy_backward_kernel


def cross_entropy_reference(logits, labels):
    """The loss of every row."""
    return F.cross_entropy(logits.double(), labels.long(), reduction="none").to(
        torch.promote_types(logits.dtype, torch.float32)
    )
