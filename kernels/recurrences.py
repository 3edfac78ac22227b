"""Recurrences over time, forwards and backwards."""

import tilelang.language as T
import torch


def advantages(steps, width, discount=0.75, block=16):
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16): from the last step to the first,
    `A[t] = R[t] + V[t + 1] - V[t] + discount * A[t + 1]`, where no episode ends at t."""

    @T.prim_func
    def advantages_kernel(
        R: T.Tensor((steps, width), "float32"),
        V: T.Tensor((steps, width), "float32"),
        ends: T.Tensor((steps, width), "int32"),
        A: T.Tensor((steps, width), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, block), threads=128) as bx:
            reward = T.alloc_fragment((block,), "float32")
            value = T.alloc_fragment((block,), "float32")
            following = T.alloc_fragment((block,), "float32")
            ended = T.alloc_fragment((block,), "int32")
            later = T.alloc_fragment((block,), "float32")
            T.clear(later)
            for i in T.serial(steps):
                t = steps - 1 - i
                T.copy(R[t, bx * block], reward)
                T.copy(V[t, bx * block], value)
                T.copy(V[T.min(t + 1, steps - 1), bx * block], following)
                T.copy(ends[t, bx * block], ended)
                for j in T.Parallel(block):
                    later[j] = (
                        T.if_then_else(ended[j] > 0, 0.0, discount * later[j])
                        + T.if_then_else(t + 1 < steps, following[j], 0.0)
                        + (reward[j] - value[j])
                    )
                T.copy(later, A[t, bx * block])

    return advantages_kernel


def advantages_reference(r, v, ends, discount=0.75):
    following = torch.cat([v[1:], torch.zeros_like(v[:1])]).double()
    later, found = torch.zeros_like(r[0], dtype=torch.float64), []
    for at in reversed(range(len(r))):
        later = torch.where(ends[at] > 0, 0.0, discount * later) + following[at] + (r[at] - v[at]).double()
        found.append(later)
    return torch.stack(found[::-1]).float()
