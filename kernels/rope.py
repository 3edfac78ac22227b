"""Rotary position embedding: pairs of features are rotated by an angle that grows with the position."""

import tilelang.language as T
import torch


def rope(seq, heads, dim, interleaved=False, block_S=32, dtype="float32", accum_dtype="float32"):
    """Rotate `x[s, h, :]` by the angles whose `cos` and `sin` are tabled per position and pair.

    A pair is features (d, d + dim/2), or (2d, 2d + 1) if `interleaved`. `dim` is even."""
    half = dim // 2
    stride, distance = (2, 1) if interleaved else (1, half)

    @T.prim_func
    def rope_kernel(
        x: T.Tensor((seq, heads, dim), dtype),
        cos: T.Tensor((seq, half), dtype),
        sin: T.Tensor((seq, half), dtype),
        out: T.Tensor((seq, heads, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(seq, block_S), heads, threads=128) as (bx, by):
            x_shared = T.alloc_shared((block_S, dim), dtype)
            cos_shared = T.alloc_shared((block_S, half), dtype)
            sin_shared = T.alloc_shared((block_S, half), dtype)
            out_shared = T.alloc_shared((block_S, dim), dtype)
            T.copy(x[bx * block_S : (bx + 1) * block_S, by, 0:dim], x_shared)
            T.copy(cos[bx * block_S, 0], cos_shared)
            T.copy(sin[bx * block_S, 0], sin_shared)
            for i, d in T.Parallel(block_S, half):
                first = T.cast(x_shared[i, d * stride], accum_dtype)
                second = T.cast(x_shared[i, d * stride + distance], accum_dtype)
                c = T.cast(cos_shared[i, d], accum_dtype)
                s = T.cast(sin_shared[i, d], accum_dtype)
                out_shared[i, d * stride] = first * c - second * s
                out_shared[i, d * stride + distance] = second * c + first * s
            T.copy(out_shared, out[bx * block_S : (bx + 1) * block_S, by, 0:dim])

    return rope_kernel


def rope_backward(seq, heads, dim, interleaved=False, block_S=32, dtype="float32", accum_dtype="float32"):
    """The gradient of `rope` with respect to x: `d_out`, rotated back."""
    half = dim // 2
    stride, distance = (2, 1) if interleaved else (1, half)

    @T.prim_func
    def rope_backward_kernel(
        cos: T.Tensor((seq, half), dtype),
        sin: T.Tensor((seq, half), dtype),
        d_out: T.Tensor((seq, heads, dim), dtype),
        d_x: T.Tensor((seq, heads, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(seq, block_S), heads, threads=128) as (bx, by):
            d_out_shared = T.alloc_shared((block_S, dim), dtype)
            cos_shared = T.alloc_shared((block_S, half), dtype)
            sin_shared = T.alloc_shared((block_S, half), dtype)
            d_x_shared = T.alloc_shared((block_S, dim), dtype)
            T.copy(d_out[bx * block_S : (bx + 1) * block_S, by, 0:dim], d_out_shared)
            T.copy(cos[bx * block_S, 0], cos_shared)
            T.copy(sin[bx * block_S, 0], sin_shared)
            for i, d in T.Parallel(block_S, half):
                first = T.cast(d_out_shared[i, d * stride], accum_dtype)
                second = T.cast(d_out_shared[i, d * stride + distance], accum_dtype)
                c = T.cast(cos_shared[i, d], accum_dtype)
                s = T.cast(sin_shared[i, d], accum_dtype)
                d_x_shared[i, d * stride] = first * c + second * s
                d_x_shared[i, d * stride + distance] = second * c - first * s
            T.copy(d_x_shared, d_x[bx * block_S : (bx + 1) * block_S, by, 0:dim])

    return rope_backward_kernel


def packed_rope(tokens, sequences, longest, heads, dim):
    """`rope` of sequences of different lengths, one after the other in the rows of x: a program for each token,
    of which `place_of` has the sequence and the position in it; sequence b starts in row `starts[b]`."""
    half = dim // 2

    @T.prim_func
    def packed_rope_kernel(
        x: T.Tensor((tokens, heads, dim), "float32"),
        starts: T.Tensor((sequences,), "int32"),
        place_of: T.Tensor((tokens, 2), "int32"),
        cos: T.Tensor((longest, half), "float32"),
        sin: T.Tensor((longest, half), "float32"),
        out: T.Tensor((tokens, heads, dim), "float32"),
    ):
        with T.Kernel(tokens, threads=128) as bt:
            rows = T.alloc_shared((heads, dim), "float32")
            rotated = T.alloc_shared((heads, dim), "float32")
            position = place_of[bt, 1]
            row = starts[place_of[bt, 0]] + position
            T.copy(x[row, 0, 0], rows)
            for h, d in T.Parallel(heads, dim):
                other = T.if_then_else(d < half, -rows[h, (d + half) % dim], rows[h, (d + half) % dim])
                rotated[h, d] = rows[h, d] * cos[position, d % half] + other * sin[position, d % half]
            T.copy(rotated, out[row, 0, 0])

    return packed_rope_kernel


def packed_rope_reference(x, starts, place_of, cos, sin):
    """`rope_reference` of rows in the order of tokens, put where they belong."""
    sequences, positions = place_of.long().T
    rows = starts.long()[sequences] + positions
    out = torch.zeros_like(x)
    out[rows] = rope_reference(x[rows], cos[positions], sin[positions])
    return out


def rope_tables(seq, dim, base=10000.0):
    """`cos` and `sin` of `position * base^(-2d / dim)`, each (seq, dim / 2), float32."""
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rope_reference(x, cos, sin, interleaved=False):
    """`x` (seq, heads, dim), rotated in float64 with complex numbers."""
    half = x.shape[-1] // 2
    wide = x.double()
    pairs = wide.unflatten(-1, (half, 2)) if interleaved else wide.unflatten(-1, (2, half)).mT
    angles = torch.complex(cos.double(), sin.double())[:, None, :]
    rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    return (rotated if interleaved else rotated.mT).flatten(-2).to(x.dtype)
