"""Causal attention of float32, and its gradients, compiled: keys after a block of queries are not looked at, where
torch's own multiplies small blocks and half of them for nothing.

Where there is no C++ compiler, and none has made it before, torch's serves. What ranks have is compared before a
program runs on them (`how`)."""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from mesh_tensor.base.errors import refuse

from .loops import in_parts, is_plain, loops

Tensor = torch.Tensor
_LEAST, _MOST = 48, 4096  # positions: of fewer, torch's is faster; scores of a few of them stay in a cache
_PER_THREAD = 1 << 23  # multiplications: with fewer, to start a thread costs more than it saves


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether queries, keys and values of shape (batch, positions, heads, width) are such that this serves: by shapes
    and by what they are, not by how they lie. As many heads of queries share one of keys as follow each other; not in
    gradients."""
    (batch, positions, heads, width), (_, _, shared, _) = q.shape, k.shape
    alike = k.shape == v.shape == (batch, positions, shared, width) and shared > 0 and heads % shared == 0
    return (
        alike
        and q.numel() > 0
        and _LEAST <= positions <= _MOST
        and all(map(is_plain, (q, k, v)))
        and _library() is not None
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """softmax(q @ k^T * scale) @ v, where a query sees the keys up to its own position, and per batch, head and query
    the logarithm of the sum of exponentials. `scale`: 1 / sqrt(width) where there is none."""
    library, (batch, positions, heads, width) = _library(), q.shape
    q, k, v = (_by_rows(tensor) for tensor in (q, k, v))
    y, sums = q.new_empty(q.shape), q.new_empty((batch, heads, positions))
    assert library is not None
    _run(library.mt_attention, (q, k, v, y, sums), (q, k, v, v), _scale(scale, width), heads // k.shape[2])
    return y, sums


def causal_attention_backward(
    seed: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, of that of y; `y` and `sums` as `causal_attention` gave them."""
    library = _library()
    seed, q, k, v = (_by_rows(tensor) for tensor in (seed, q, k, v))
    made = q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)
    assert library is not None
    function = library.mt_attention_backward
    _run(
        function, (seed, q, k, v, y.contiguous(), sums.contiguous(), *made), (q, k, v, seed), _scale(scale, q.shape[3])
    )
    return made


def how() -> str:
    """Who computes it in this process."""
    return "torch's" if _library() is None else "compiled"


def _by_rows(tensor: Tensor) -> Tensor:
    """The tensor, its last dim in one piece."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _scale(scale: float | None, width: int) -> float:
    return 1 / math.sqrt(width) if scale is None else scale


def _run(
    function: ctypes._NamedFuncPointer,
    tensors: tuple[Tensor, ...],
    lie: tuple[Tensor, ...],
    scale: float,
    share: int = 1,
) -> None:
    """On all heads; `lie`: the tensors whose strides the function asks for; `share`: heads of queries per head of
    keys."""
    batch, positions, heads, width = lie[0].shape
    numbers = (heads, positions, width, share, *(n for tensor in lie for n in tensor.stride()[:3]))
    sizes, addresses = (ctypes.c_int64 * len(numbers))(*numbers), [tensor.data_ptr() for tensor in tensors]
    failed: list[int] = []

    def run(first: int, last: int) -> None:
        if function(*addresses, sizes, scale, first, last):
            failed.append(first)

    in_parts(run, batch * heads, _PER_THREAD // (positions * positions * width))
    if failed:
        refuse("there is no memory for attention's scores", where=f"{batch} x {heads} heads of {positions} positions")


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = loops("cpu", "math", "gemm", "attention")
    if library is None:
        return None
    for function, pointers in ((library.mt_attention, 6), (library.mt_attention_backward, 10)):
        pointed = [ctypes.c_void_p] * pointers
        function.restype, function.argtypes = ctypes.c_int, (*pointed, ctypes.c_float, ctypes.c_int64, ctypes.c_int64)
    return library
